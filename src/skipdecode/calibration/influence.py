"""Block influence: how much a layer turns the hidden states, from one full-depth pass.

Source: ShortGPT (arXiv 2403.03853), section 3.2: 1 - cosine between a layer's input and output, averaged over tokens;
here over the response tokens that are fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.data.prompts import Example
from skipdecode.models.attach import Attachment
from skipdecode.models.families import decoder_layers
from skipdecode.tuning.collate import IGNORE, collate
from skipdecode.tuning.objective import response_logits

__all__ = ["block_influence"]


def block_influence(
    attachment: Attachment, examples: Sequence[Example], *, batch_size: int, pad_id: int
) -> tuple[float, ...]:
    """1 - mean cosine of each layer's input and output over response tokens; 0 for a layer that changes nothing."""
    model = attachment.model
    ordered = sorted(examples, key=lambda e: (len(e.response), len(e.prompt), e.id))
    layers = list(decoder_layers(model))
    watch = _Watch(len(layers))
    handles = [layer.register_forward_hook(watch.hook(index), with_kwargs=True) for index, layer in enumerate(layers)]
    try:
        with torch.inference_mode(), attachment.paused():
            for first in range(0, len(ordered), batch_size):
                batch = collate(ordered[first : first + batch_size], pad_id).to(model.device)
                # A token is fed where the next column has a target; column 0 of the targets belongs to the prompt.
                watch.fed = functional.pad(batch.targets[:, 1:] != IGNORE, (batch.prompt_length, 0))
                response_logits(model, batch, attached=False)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(1 - total / max(1, watch.tokens) for total in watch.cosines)


class _Watch:
    """Sums cosines over the tokens that are marked in `fed` (rows, columns)."""

    def __init__(self, layers: int) -> None:
        self.fed = torch.zeros(0)
        self.cosines = [0.0] * layers
        self._tokens = [0] * layers

    @property
    def tokens(self) -> int:
        """Tokens that every layer saw."""
        return self._tokens[0]

    def hook(self, index: int) -> Any:
        """A forward hook for one layer."""

        def watch(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            after: Tensor = output[0] if isinstance(output, tuple) else output
            rows = self.fed
            cosines = functional.cosine_similarity(before[rows].double(), after[rows].double(), dim=-1)
            self.cosines[index] += float(cosines.sum())
            self._tokens[index] += int(rows.sum())

        return watch
