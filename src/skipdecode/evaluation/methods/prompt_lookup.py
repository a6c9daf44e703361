"""Prompt-lookup decoding: drafts are n-grams of the prompt, checked in one forward (transformers' implementation)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from skipdecode.errors import UsageError
from skipdecode.evaluation.methods.base import LayerCount, Timed

__all__ = ["Drafting", "PromptLookup"]


class Drafting(Timed):
    """A lossless method that drafts tokens and checks them with the whole model; one row at a time."""

    max_batch = 1
    lossless = True

    def session(self, model: Any, eos: set[int]) -> AbstractContextManager[Any]:
        """Drafts run layers that the output does not show, so they are counted."""
        return LayerCount(model)

    def layer_tokens(self, rows: list[list[int]], prompt_tokens: int, num_layers: int, session: Any) -> int:
        """All that ran, less the prompt's one pass."""
        return int(session.total) - num_layers * prompt_tokens


class PromptLookup(Drafting):
    """Drafts of up to `draft_tokens` tokens that followed the last tokens' n-gram earlier in the text.

    Source: https://github.com/apoorvumang/prompt-lookup-decoding
    """

    name = "prompt-lookup"

    def __init__(self, draft_tokens: int = 10) -> None:
        if draft_tokens < 1:
            raise UsageError(f"draft_tokens={draft_tokens} is not accepted: give 1 or more")
        self.draft_tokens = draft_tokens

    def options(self) -> dict[str, Any]:
        """See `Timed.options`."""
        return {"prompt_lookup_num_tokens": self.draft_tokens}

    def settings(self) -> dict[str, Any]:
        """See `Method.settings`."""
        return {"name": self.name, "draft_tokens": self.draft_tokens}
