"""What rows leave behind in a layer that they do not run, and a checkpoint's fit.

A prompt under a split schedule runs some layers only; of the others that its answer will run, keys and values are
stored. They are the layer's own projection of the state that passes by, or what a fit's map makes of it
(`skipdecode.models.fit_maps.PromptMap`). Where a fit has a bridge over a layer, rows that skip it take the bridge.

Maps of prompts may take *taps*, the states of the prompt tokens before a row. These are rows of the same step, of an
earlier step where a prompt comes in chunks, or of another request where requests share a prefix. So states are kept for
each block of the KV cache: those of the last prompt tokens that were stored there. This is enough, because a prefix is
shared by whole blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.checkpoint_schedule import digest_in
from skipdecode.models.fit import Fit
from skipdecode.models.fit_maps import Bridge, PromptMap, normed
from skipdecode.models.loading.fit_file import choose_fit
from skipdecode.schedule import Schedule
from skipdecode.vllm.step_rows import StepBatch

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.linear import LinearBase

_NORMS = ("input_layernorm", "self_attn_layer_norm", "attention_layernorm", "ln_1")  # in front of attention


def checkpoint_fit(model: ModelConfig) -> Fit | None:
    """The fit of a checkpoint (vLLM's `model_config`), in a directory or on the hub; None where there is none.

    Raises FitError: the fit is broken, missing, another one, or for another model.
    """
    digest = digest_in(vars(model.hf_config))
    fit_file = choose_fit(str(model.model), digest, revision=getattr(model, "revision", None))
    if fit_file is None:
        return None
    fit, config, file = Fit.load(fit_file.file), model.hf_text_config, fit_file.file
    fit.check_digest(digest, f"fit {file}")
    keys = 2 * model.get_total_num_kv_heads() * model.get_head_size()
    fit.check_sizes(config.hidden_size, [keys] * config.num_hidden_layers, f"fit {file}")
    return fit


@dataclass(frozen=True)
class PromptMaps:
    """A fit's maps of prompts' keys and values in one layer.

    `maps`: one for each prompt set that some schedule has; None where the layer has none for it. `indices`: for each
    schedule the index of the map that its prompts take; -1: the layer's own projection. `also_projects`: whether some
    layer projects some prompts on its own.
    """

    maps: tuple[PromptMap | None, ...]
    indices: tuple[int, ...]
    also_projects: bool


def prompt_maps(fit: Fit | None, schedules: Sequence[Schedule]) -> dict[int, PromptMaps]:
    """Maps of a fit for the prompts of schedules, by layer; empty where it has none."""
    sets = () if fit is None else [p for p in fit.prompt_sets if any(s.prompt_layers() == p for s in schedules)]
    by_layer, also_projects = {}, False
    for layer in sorted({layer for s in schedules for layer in s.projected} if sets else ()):
        maps = tuple(fit.prompt_maps(prompt).get(layer) for prompt in sets)  # type: ignore[union-attr]
        mapped = {prompt: n for n, prompt in enumerate(sets) if maps[n] is not None}
        by_layer[layer] = maps, tuple(mapped.get(s.prompt_layers(), -1) for s in schedules)
        also_projects |= any(layer in s.projected and s.prompt_layers() not in mapped for s in schedules)
    return {layer: PromptMaps(maps, indices, also_projects) for layer, (maps, indices) in by_layer.items() if any(maps)}


class KeyProjection(nn.Module):
    """A decoder layer's way to keys and values; shares the layer's modules.

    `layer`: a decoder layer with its weights loaded. `maps`: those of a fit, which stand in for the layer's own
    projection of some schedules' prompts. `shard`: number of this process among those that share the heads, and how
    many these are.

    Raises UnsupportedFeatureError if the attention backend stores keys and values within attention only.
    """

    def __init__(self, layer: nn.Module, maps: PromptMaps | None = None, shard: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        path, target = next((name, part) for name, part in layer.named_modules() if hasattr(part, "kv_cache"))
        attention = layer.get_submodule(path.rpartition(".")[0])
        if getattr(target.attn_backend, "forward_includes_kv_cache_update", True):
            raise UnsupportedFeatureError(
                f"schedules that project a prompt's keys and values do not work with the attention backend "
                f"{target.attn_backend.get_name()}: choose another (--attention-backend), or set prompt='full'"
            )
        norms = [getattr(layer, name) for name in _NORMS if hasattr(layer, name)]
        self.norm = norms[0] if getattr(layer, "do_layer_norm_before", True) else None
        self.key_norm = getattr(attention, "k_norm", None)
        self.rotary = getattr(attention, "rotary_emb", None)
        self.shape = (-1, target.num_kv_heads, target.head_size)
        self.width = target.num_kv_heads * target.head_size
        fused = next(part for part in attention.children() if type(part).__name__.startswith("QKV"))
        self.weight, self.bias = _last_rows(fused, 2 * self.width)
        self._target = [target]  # A list, for its weights are not this module's.
        self.maps = None if maps is None else _KeyMaps(maps, self.shape, shard, self.weight)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        positions: Tensor | None = None,
        schedules: Tensor | None = None,
        starts: Tensor | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, heads, head size) of states (rows, width); the states stay as they are.

        Where there are maps, `schedules` and `starts` (rows,) say which row has which, as `StepRows` has them, and
        `context` has the states before each row, for maps with taps (`ContextMemory.context`).
        """
        states = hidden_states if residual is None else hidden_states + residual
        projected = None
        if self.maps is None or self.maps.also_projects:
            projected = states if self.norm is None else self.norm(states)
            projected = nn.functional.linear(projected, self.weight, self.bias)
        if self.maps is not None:
            projected = self.maps(states, schedules, starts, projected, context)
        keys, values = projected.chunk(2, -1)  # type: ignore[union-attr]
        keys = keys.contiguous()
        if self.key_norm is not None:
            by_head = self.key_norm.weight.numel() == self.shape[-1]  # else over all heads at once
            keys = self.key_norm(keys.view(self.shape) if by_head else keys).view(-1, self.width)
        if self.rotary is not None:
            # The keys stand for the queries too, which not every kind of rotation can do without.
            keys = self.rotary(positions, keys.clone(), keys)[1]
        return keys.view(self.shape), values.reshape(self.shape)

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put keys and values into the cache; `slots` (rows,) are their places."""
        (target,) = self._target
        target.impl.do_kv_cache_update(target, keys, values, target.kv_cache, slots)


class _KeyMaps(nn.Module):
    """A fit's maps for the heads of this process, in the model's type; alike in all layers, so that one piece serves.

    A layer that has no map for some prompts has zeros there, and never uses them.
    """

    def __init__(self, maps: PromptMaps, shape: tuple[int, int, int], shard: tuple[int, int], like: Tensor) -> None:
        super().__init__()
        (_, heads, size), (number, shards) = shape, shard
        example = next(prompt_map for prompt_map in maps.maps if prompt_map is not None)
        total = len(example.bias) // (2 * size)
        # With more processes than heads, several have the same.
        first = number * heads if heads * shards == total else number * total // shards
        for name in ("weight", "bias", "first"):
            empty = torch.zeros_like(getattr(example, name))
            parts = [empty if prompt_map is None else getattr(prompt_map, name).data for prompt_map in maps.maps]
            stacked = torch.stack(parts)
            of_heads = stacked.view(len(stacked), 2, total, size, *stacked.shape[2:])[:, :, first : first + heads]
            self.register_buffer(name, of_heads.flatten(1, 3).to(like.device, like.dtype).contiguous())
        self.also_projects = maps.also_projects
        self.register_buffer("indices", torch.tensor(maps.indices, device=like.device))

    def forward(
        self, states: Tensor, schedules: Tensor, starts: Tensor, projected: Tensor | None, context: Tensor | None
    ) -> Tensor:
        """Keys and values side by side, (rows, width), of states; `projected` are the layer's own of them.

        `context` has the states before each row, for maps with taps.
        """
        weight, bias, first, map_indices = (self.get_buffer(name) for name in ("weight", "bias", "first", "indices"))
        features = normed(states).to(states.dtype).view(-1, states.shape[-1])
        if context is not None:
            features = torch.cat((features, context), -1)
        mapped = nn.functional.linear(features, weight.flatten(0, 1)).view(-1, *bias.shape) + bias
        mapped = torch.where(starts[:, None, None], first, mapped)
        indices = map_indices[schedules]
        chosen = mapped.gather(1, indices.clamp(min=0)[:, None, None].expand(-1, 1, mapped.shape[2])).squeeze(1)
        return chosen if projected is None else torch.where(indices[:, None] < 0, projected, chosen)


def _last_rows(linear: LinearBase, rows: int) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer's last outputs."""
    weight = linear.weight.data
    if not weight.numel():
        # On CPUs vLLM keeps it packed only. The identity gives it back exactly: of each sum one term is not 0.
        unit = torch.eye(linear.input_size, dtype=linear.params_dtype)
        weight = linear.cpu_linear(unit, linear.weight, None).t()[-rows:].contiguous()
    bias = getattr(linear, "bias", None)
    return weight[-rows:], None if bias is None else bias.data[-rows:].to(weight.dtype)


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
        """Replace `hidden_states` (rows, width); the residual stays as it is."""
        states = hidden_states if residual is None else hidden_states + residual
        inside = nn.functional.linear(normed(states).to(hidden_states.dtype), self.down)  # type: ignore[arg-type]
        return hidden_states + nn.functional.linear(inside, self.up, self.bias)  # type: ignore[arg-type]


def layer_bridges(
    fit: Fit | None, layers: Iterable[int], dtype: torch.dtype, device: torch.device
) -> dict[int, LayerBridge]:
    """The bridges over `layers`, by the layer's number, where there is one."""
    bridges = {} if fit is None else fit.bridges_over(layers)
    rank = max((int(bridge.down.shape[0]) for bridge in bridges.values()), default=0)
    return {n: LayerBridge(bridge, rank, dtype, device) for n, bridge in bridges.items()}


@dataclass(frozen=True)
class ContextRows:
    """Where the states before a step's rows are, and where the step stores states for later ones.

    `rows` and `indices`: (context tokens, num_rows): the row of the token that many tokens before, or its index in the
    memory; -1 where it is not there. `stored` and `stored_at`: rows whose states later steps may need, and their
    indices in the memory.
    """

    rows: NDArray[np.int64]
    indices: NDArray[np.int64]
    stored: NDArray[np.int64]
    stored_at: NDArray[np.int64]


def context_rows(batch: StepBatch, context_tokens: int, blocks: NDArray[np.int32], block_size: int) -> ContextRows:
    """The `ContextRows` of a step; `blocks` (requests, blocks of a text): numbers of the blocks of the KV cache."""
    request = np.repeat(np.arange(len(batch.rows)), batch.rows)
    within = np.arange(batch.num_rows) - np.repeat(np.cumsum(batch.rows) - batch.rows, batch.rows)
    position = batch.start[request] + within

    def memory_index(at: NDArray[np.int64]) -> NDArray[np.int64]:
        block: NDArray[np.int64] = blocks[request, np.maximum(at, 0) // block_size].astype(np.int64)
        return block * context_tokens + at % context_tokens

    back = np.arange(1, context_tokens + 1)[:, None]
    in_step = within >= back
    rows = np.where(in_step, np.arange(batch.num_rows) - back, -1)
    earlier = np.stack([memory_index(position - distance) for distance in range(1, context_tokens + 1)])
    indices = np.where(~in_step & (position >= back), earlier, -1)
    # The last prompt token runs the layers, so it is no tap of a token that does not.
    end = np.minimum(batch.start + batch.rows, batch.prompt - 1)[request]
    next_block = (position // block_size + 1) * block_size
    stored = np.flatnonzero((position < end) & (position + context_tokens >= np.minimum(end, next_block)))
    stored_at = memory_index(position)[stored]
    # vLLM shares a block from the step on that fills it.
    filled = {(index, position[row]): row for index, row in zip(stored_at.tolist(), stored.tolist(), strict=True)}
    for tap, row in zip(*np.nonzero(indices >= 0), strict=True):
        earlier_row = filled.get((indices[tap, row], position[row] - tap - 1))
        if earlier_row is not None:
            rows[tap, row], indices[tap, row] = earlier_row, -1
    return ContextRows(rows, indices, stored, stored_at)


def stops_of(schedules: Sequence[Schedule], layers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Number of layers below each layer that the prompts of each schedule run; where all are equal, so are states."""
    return {layer: tuple(bisect_left(s.prompt_layers(), layer) for s in schedules) for layer in layers}


class ContextMemory:
    """The states of a model's last prompt tokens in each block, for each stop of its prompts.

    `context_tokens`: tokens before a row that a map takes. `stops`: as `stops_of` gives them, for the layers with maps.
    """

    def __init__(self, context_tokens: int, stops: dict[int, tuple[int, ...]]) -> None:
        self.context_tokens, self._stops = context_tokens, stops
        self._memory: dict[tuple[int, ...], Tensor] = {}
        self._written: dict[tuple[int, ...], Tensor] = {}
        self._earlier: dict[tuple[int, ...], Tensor] = {}
        self._step: dict[str, Tensor] | None = None
        self._size = 0  # of the memory that the step needs

    def begin(self, rows: ContextRows | None, device: torch.device) -> None:
        """Start a step; None: one that projects nothing, or that vLLM makes up (states before rows are zeros)."""
        self._step = None
        if rows is not None:
            self._step = {name: torch.from_numpy(of).to(device) for name, of in vars(rows).items()}
            self._size = 1 + max(rows.indices.max(initial=0), rows.stored_at.max(initial=0))

    def context(self, layer: int, states: Callable[[], Tensor]) -> Tensor:
        """The normed states before each row, (rows, context_tokens * width), at a layer; `states` gives all rows'."""
        stop = self._stops[layer]
        if stop not in self._earlier:
            self._earlier[stop] = self._look_back(stop, states())
        return self._earlier[stop]

    def _look_back(self, stop: tuple[int, ...], states: Tensor) -> Tensor:
        if self._step is None:
            return states.new_zeros(len(states), self.context_tokens * states.shape[1])
        normed_states = normed(states).to(states.dtype)
        memory = self._grown(stop, normed_states)
        self._written[stop] = normed_states[self._step["stored"]]
        earlier = [
            _rows_or_zeros(rows, normed_states) + _rows_or_zeros(indices, memory)
            for rows, indices in zip(self._step["rows"], self._step["indices"], strict=True)
        ]
        return torch.cat(earlier, -1)

    def end(self) -> None:
        """The step is over: later steps see its states, which its own layers did not."""
        if self._step is not None:
            for stop, states in self._written.items():
                self._memory[stop][self._step["stored_at"]] = states
        self._step, self._written, self._earlier = None, {}, {}

    def _grown(self, stop: tuple[int, ...], like: Tensor) -> Tensor:
        """The memory of a stop, large enough for the step."""
        memory = self._memory.get(stop, like[:0])
        if len(memory) < self._size:
            larger = like.new_zeros(max(self._size, 2 * len(memory)), like.shape[1])
            larger[: len(memory)] = memory
            memory = self._memory[stop] = larger
        return memory


def _rows_or_zeros(index: Tensor, states: Tensor) -> Tensor:
    """States by index, zeros where it is -1."""
    return states[index.clamp(min=0)].masked_fill(index.unsqueeze(-1) < 0, 0)
