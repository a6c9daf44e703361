"""Counts tokens and layers of the engine's steps, for the metrics. Uses numpy, and only fields of vLLM's scheduler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from skipdecode.vllm.settings import PluginSettings
from skipdecode.vllm.step_rows import LayerLimits, StepBatch

PREFIX = "skipdecode:"
"""Prefix of the names of counts on their way to the front end."""
DEPTH_PREFIX = f"{PREFIX}depth:"
"""Followed by a number of layers: finished requests whose tokens ran that many layers on average, rounded."""


class DepthMeter:
    """The counts since the last report."""

    def __init__(self, settings: PluginSettings, limits: LayerLimits) -> None:
        self._settings, self._limits = settings, limits
        self._counts: Counter[str] = Counter()

    def batch(self, requests: list[Any], rows: list[int], already_counted: bool) -> StepBatch:
        """Requests as a `StepBatch`; `already_counted`: their computed tokens include `rows`."""
        width = np.array(rows, np.int64)
        start = np.array([r.num_computed_tokens for r in requests], np.int64)
        return StepBatch(
            start=start - width if already_counted else start,
            rows=width,
            prompt=np.array([r.num_prompt_tokens for r in requests], np.int64),
            schedule=np.array([self._settings.index_of(r) for r in requests], np.int64),
        )

    def count_step(self, requests: dict[str, Any], scheduled: dict[str, int]) -> None:
        """Count a scheduled step."""
        if not scheduled:
            return
        batch = self.batch([requests[i] for i in scheduled], list(scheduled.values()), already_counted=True)
        ran = self._limits.counts(batch)
        decodes = batch.start >= batch.prompt
        self._counts["steps"] += 1
        self._counts["layers"] += int(ran.any(0).sum())
        self._counts["decode_tokens"] += int(batch.rows[decodes].sum())
        self._counts["decode_token_layers"] += int(ran[decodes].sum())

    def count_finished(self, request: Any) -> None:
        """Count a finished request."""
        fed = request.num_tokens - request.num_prompt_tokens - 1
        if fed > 0:
            schedule = self._settings.schedules[self._settings.index_of(request)]
            self._counts[f"depth:{round(schedule.mean_budget(fed))}"] += 1

    def report(self) -> dict[str, int]:
        """The counts since the last report."""
        counts = {PREFIX + name: count for name, count in self._counts.items()}
        self._counts.clear()
        return counts
