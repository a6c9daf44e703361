"""Chooses the depth of requests that ask for `adaptive`, once their prompts have run, by the logits.

A choice stays in the runner's state of the request, which outlives preemption; the scheduler hears of it and tells all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from skipdecode.engine.adaptive import features
from skipdecode.vllm.settings import PluginSettings
from skipdecode.vllm.step_rows import StepBatch

__all__ = ["DepthChoice"]


class DepthChoice:
    """The choices of one model runner."""

    def __init__(self, settings: PluginSettings) -> None:
        self._settings, self._undecided = settings, len(settings.schedules)
        self._due: list[tuple[int, str]] = []

    def expect(self, batch: StepBatch, ids: list[str], drafts: dict[str, list[int]]) -> None:
        """Note which requests of a step, in its order, choose after it, and their rows of its logits."""
        chooses = (batch.schedule == self._undecided) & (batch.start + batch.rows == batch.prompt)
        if chooses.any():
            last = np.cumsum([1 + len(drafts.get(i, ())) for i in ids]) - 1
            self._due = [(int(last[n]), ids[n]) for n in np.flatnonzero(chooses)]

    def choose(self, state: Any, requests: Any) -> dict[str, int]:
        """The plans that are chosen now, by request; `state` is vLLM's between a forward and its tokens."""
        due, self._due = self._due, []
        if state is None or state.logits is None:
            return {}
        for row, i in due:
            known = features(state.logits[row], requests[i].num_prompt_tokens)
            depth = self._settings.chooser(requests[i]).first_depth(known)  # type: ignore[union-attr]
            requests[i].skipdecode = self._undecided + 1 + depth
        return {i: requests[i].skipdecode for _, i in due}
