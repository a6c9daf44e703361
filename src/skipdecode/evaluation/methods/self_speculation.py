"""Self-speculation: the first layers draft, the whole model checks (transformers' `assistant_early_exit`)."""

from __future__ import annotations

from typing import Any

from skipdecode.errors import UsageError
from skipdecode.evaluation.methods.prompt_lookup import Drafting
from skipdecode.models.families import decoder_layers, unwrap

__all__ = ["SelfSpeculation"]


class SelfSpeculation(Drafting):
    """Drafts come from the first `exit_layer` layers and the model's own head.

    Source: LayerSkip, arXiv 2404.16710. Drafting pays on models trained for early exit only.
    """

    def __init__(self, exit_layer: int) -> None:
        self.exit_layer = exit_layer
        self.name = f"self-speculation-{exit_layer}"

    def options(self) -> dict[str, Any]:
        """See `Timed.options`."""
        return {"assistant_early_exit": self.exit_layer}

    def settings(self) -> dict[str, Any]:
        """See `Method.settings`."""
        return {"name": self.name, "exit_layer": self.exit_layer}

    def check(self, model: Any) -> None:
        """Raises UsageError if the drafting layers are none, or all."""
        layers = len(decoder_layers(unwrap(model)))
        if not 1 <= self.exit_layer < layers:
            raise UsageError(
                f"exit_layer={self.exit_layer} is not accepted for {layers} layers: give 1 to {layers - 1}"
            )
