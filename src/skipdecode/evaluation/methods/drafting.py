"""Lossless methods that draft tokens and check them with the whole model (transformers' implementations)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from skipdecode.engine.generate import LayerCount
from skipdecode.errors import UsageError
from skipdecode.evaluation.methods.base import GenerateMethod

__all__ = ["PromptLookup", "SelfSpeculation"]


class _Drafting(GenerateMethod):
    """One row at a time. Drafts run layers that the output does not show, so they are counted."""

    max_batch = 1

    def around(self, model: Any, eos: frozenset[int]) -> AbstractContextManager[Any]:
        return LayerCount(model)


class PromptLookup(_Drafting):
    """Drafts of up to `draft_tokens` tokens that followed the last tokens' n-gram earlier in the text.

    Source: https://github.com/apoorvumang/prompt-lookup-decoding
    """

    name = "prompt-lookup"

    def __init__(self, draft_tokens: int = 10) -> None:
        if draft_tokens < 1:
            raise UsageError(f"draft_tokens={draft_tokens} is not accepted: give 1 or more")
        self.draft_tokens = draft_tokens

    def options(self) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.draft_tokens}

    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "draft_tokens": self.draft_tokens}


class SelfSpeculation(_Drafting):
    """Drafts come from the first `exit_layer` layers and the model's own head (`assistant_early_exit`).

    Source: LayerSkip, arXiv 2404.16710. Drafting pays on models trained for early exit only.
    """

    def __init__(self, exit_layer: int) -> None:
        self.exit_layer = exit_layer
        self.name = f"self-speculation-{exit_layer}"

    def options(self) -> dict[str, Any]:
        return {"assistant_early_exit": self.exit_layer}

    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "exit_layer": self.exit_layer}

    def check_shape(self, model_type: str, num_layers: int) -> None:
        """Raises UsageError if the drafting layers are none, or all."""
        if not 1 <= self.exit_layer < num_layers:
            raise UsageError(
                f"exit_layer={self.exit_layer} is not accepted for {num_layers} layers: give 1 to {num_layers - 1}"
            )
