"""Keys and values of rows that a layer projects: made of the state that passes by, and stored. Nothing else is done.

A prompt under a split schedule runs some layers only; of the others that its answer will run it leaves keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.errors import ScheduleError, UnsupportedFeatureError
from skipdecode.schedule import Schedule

__all__ = ["PROJECTING", "KeyProjection", "check_projects"]

# Architectures that can project, and the norm in front of their attention. A new one is a row here, and a test.
PROJECTING = dict.fromkeys(
    (
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ),
    "input_layernorm",
) | {"OPTForCausalLM": "self_attn_layer_norm"}


def check_projects(schedules: Iterable[Schedule], architecture: str, quantization: object = None) -> None:
    """Raise ScheduleError if a schedule projects what this architecture, or these weights, cannot."""
    refusal = None
    if architecture not in PROJECTING:
        refusal = f"vLLM's {architecture} cannot do here (those that can: {', '.join(sorted(PROJECTING))})"
    elif quantization is not None:
        refusal = f"weights quantised by {quantization} cannot do here"
    for schedule in schedules:
        if schedule.projected and refusal:
            raise ScheduleError(
                f"schedule {schedule.name!r} projects a prompt's keys and values in layers "
                f"{', '.join(map(str, schedule.projected))}, which {refusal}: set prompt='full'"
            )


class KeyProjection(nn.Module):
    """A decoder layer's way to keys and values; shares the layer's modules.

    Parameters
    ----------
    layer : Module
        A decoder layer with its weights loaded.
    architecture : str
        One that `check_projects` lets pass.

    Raises
    ------
    UnsupportedFeatureError
        If the attention backend stores keys and values within attention only.
    """

    def __init__(self, layer: Any, architecture: str) -> None:
        super().__init__()
        attention = layer.self_attn
        target = attention.attn
        if getattr(target.attn_backend, "forward_includes_kv_cache_update", True):
            raise UnsupportedFeatureError(
                f"schedules that project a prompt's keys and values do not work with the attention backend "
                f"{target.attn_backend.get_name()}: choose another (--attention-backend), or set prompt='full'"
            )
        self.norm = getattr(layer, PROJECTING[architecture]) if getattr(layer, "do_layer_norm_before", True) else None
        self.key_norm = getattr(attention, "k_norm", None)
        self.rotary = getattr(attention, "rotary_emb", None)
        self.shape = (-1, target.num_kv_heads, target.head_size)
        self.width = target.num_kv_heads * target.head_size
        self.weight, self.bias = _last_rows(attention.qkv_proj, 2 * self.width)
        self._target = [target]  # A list, for its weights are not this module's.

    def forward(self, hidden_states: Tensor, residual: Any = None, positions: Tensor | None = None) -> Any:
        """Keys and values (rows, heads, head size) of states (rows, width); the states stay as they are."""
        states = hidden_states if residual is None else hidden_states + residual
        states = states if self.norm is None else self.norm(states)
        keys, values = nn.functional.linear(states, self.weight, self.bias).chunk(2, -1)
        keys = keys.contiguous()
        if self.key_norm is not None:
            keys = self.key_norm(keys.view(self.shape)).flatten(-2)
        if self.rotary is not None:
            # The keys stand for the queries too, which not every kind of rotation can do without.
            keys = self.rotary(positions, keys.clone(), keys)[1]
        return keys.view(self.shape), values.reshape(self.shape)

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put keys and values into the cache; `slots` (rows,) are their places."""
        (target,) = self._target
        target.impl.do_kv_cache_update(target, keys, values, target.kv_cache, slots)


def _last_rows(linear: Any, rows: int) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer's last outputs."""
    weight = linear.weight.data
    if not weight.numel():
        # On CPUs vLLM keeps it packed only. The identity gives it back exactly: of each sum one term is not 0.
        unit = torch.eye(linear.input_size, dtype=linear.params_dtype)
        weight = linear.cpu_linear(unit, linear.weight, None).t()[-rows:].contiguous()
    bias = getattr(linear, "bias", None)
    return weight[-rows:], None if bias is None else bias.data[-rows:].to(weight.dtype)
