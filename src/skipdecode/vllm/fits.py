"""A fit in vLLM: bridges over layers that rows sit out. `projection` has the maps of prompts' keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.errors import FitError
from skipdecode.models.fit import FIT_FILE, Bridge, Fit, normed
from skipdecode.schedule import Schedule

__all__ = ["LayerBridge", "checkpoint_fit", "layer_bridges"]


def checkpoint_fit(model: Any, schedules: Sequence[Schedule]) -> Fit | None:
    """The fit beside the weights of a checkpoint's directory (vLLM's `model_config`); None where there is none.

    Raises
    ------
    FitError
        The fit is broken, for another model, or maps prompts of a schedule from several tokens.
    """
    file = Path(str(model.model)) / FIT_FILE
    if not file.is_file():
        return None
    fit, config = Fit.load(file), model.hf_text_config
    fit.check_sizes(config.num_hidden_layers, config.hidden_size, f"fit {file}")
    if fit.taps and any(s.projected and s.prompt_layers() in fit.prompt_sets for s in schedules):
        raise FitError(
            f"fit {file}: its keys and values of prompts see {fit.taps} tokens before their own, which vLLM does not "
            "keep between parts of a prompt: fit with --fit-taps 0"
        )
    return fit


class LayerBridge(nn.Module):
    """A bridge on vLLM's two states, in the model's type; zeros fill up its rank, so that all bridges are alike."""

    def __init__(self, bridge: Bridge, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        more = rank - bridge.down.shape[0]
        down = nn.functional.pad(bridge.down.data, (0, 0, 0, more))
        up = nn.functional.pad(bridge.up.data, (0, more))
        for name, tensor in (("down", down), ("up", up), ("bias", bridge.bias.data)):
            self.register_buffer(name, tensor.to(device, dtype).contiguous())

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        """What takes the place of `hidden_states` (rows, width); the residual stays as it is."""
        states = hidden_states if residual is None else hidden_states + residual
        inside = nn.functional.linear(normed(states).to(hidden_states.dtype), self.down)  # type: ignore[arg-type]
        return hidden_states + nn.functional.linear(inside, self.up, self.bias)  # type: ignore[arg-type]


def layer_bridges(fit: Fit | None, layers: Any, dtype: torch.dtype, device: torch.device) -> dict[int, LayerBridge]:
    """The bridges over those of `layers` that have one, by the layer's number."""
    found = {} if fit is None else {n: bridge for n in layers if (bridge := fit.bridge(n)) is not None}
    rank = max((int(bridge.down.shape[0]) for bridge in found.values()), default=0)
    return {n: LayerBridge(bridge, rank, dtype, device) for n, bridge in found.items()}
