"""Attention metadata of the layers that run only some of a step's rows, made by the backend's own builder.

vLLM builds metadata once a step, for all rows. The builders are watched while they do: what a builder was given is cut
to a layer's rows and given to the same builder again. So nothing here knows a backend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.vllm.step_rows import NONE, RowSubset, StepRows

_PER_REQUEST = (
    "block_table_tensor",
    "is_prefilling",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "rswa_prefix_lens",
    "req_idx",
)
_LENGTHS = ("seq_lens", "seq_lens_cpu_upper_bound", "_seq_lens_cpu")
_PER_ROW = ("slot_mapping", "positions")
_COMPUTED = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "query_start_loc", "query_start_loc_cpu")
_CACHES = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
_AS_IT_IS = ("causal",)
# Builders that may build again within a step; others (FlashInfer, Flex) plan into memory that is in use.
_REPEATABLE = (
    *("CPUAttentionMetadataBuilder", "FlashAttentionMetadataBuilder", "TritonAttentionMetadataBuilder"),
    "Mamba2AttentionMetadataBuilder",
)
_PLAIN = (*_PER_REQUEST, *_LENGTHS, *_PER_ROW, *_COMPUTED, *_CACHES, *_AS_IT_IS, "_num_computed_tokens_cpu")


class StepMetadata:
    """Watches the metadata builders of a runner, and builds for parts of a step.

    `groups`: the runner's `attn_groups`: for each KV cache group its attention groups. `layer_names`: names of the
    attention modules inside each decoder layer, by the layer's number.

    Raises UnsupportedFeatureError if the attention backend cannot build metadata for parts of a step.
    """

    def __init__(self, groups: Any, layer_names: dict[int, list[str]]) -> None:
        self._given: dict[int, Any] = {}
        self._builders: list[Any] = []
        builder_of: dict[str, int] = {}
        for group in (g for groups_of_cache in groups for g in groups_of_cache):
            builder_of |= dict.fromkeys(group.layer_names, len(self._builders))
            self._watch(group.metadata_builders[0])
        self._of_layer = {layer: [(name, builder_of[name]) for name in names] for layer, names in layer_names.items()}

    def fill(self, step: StepRows, metadata: dict[str, Any], slots: dict[str, Tensor]) -> None:
        """Put the metadata and slots of all layers that run a part into the forward context's dictionaries."""
        made: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        for layer, names in self._of_layer.items():
            kind = step.layers[layer]
            if kind < 0:
                continue
            for name, builder in names:
                key = (kind, builder)
                if key not in made:
                    cut = cut_metadata(self._given[builder], step.parts[kind])
                    # `fast_build`: FlashAttention 3 else plans into the one buffer that it has for CUDA graphs.
                    made[key] = self._builders[builder](0, cut, fast_build=True), cut.slot_mapping
                metadata[name], slots[name] = made[key]

    def projected_slots(self, step: StepRows, slots: dict[str, Tensor]) -> dict[int, Tensor]:
        """For each layer that projects: where its rows' keys and values go, of the slots of all rows."""
        rows = [*(part.rows for part in step.parts), slice(step.num_rows)]  # The last is found by ALL.
        return {
            layer: _take(slots[names[0][0]], rows[kind])
            for layer, names in self._of_layer.items()
            if (kind := step.projects[layer]) != NONE
        }

    def _watch(self, builder: Any) -> None:
        number, build = len(self._builders), builder.build
        name = type(builder).__name__
        if name not in _REPEATABLE:
            raise UnsupportedFeatureError(
                f"the attention backend of {name} does not work with skipped layers: choose another, such as "
                "--attention-backend FLASH_ATTN or TRITON_ATTN"
            )
        builder.supports_update_block_table = False  # It would copy another group's metadata, past `build`.

        def watched(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            self._given[number] = common_attn_metadata
            return build(common_prefix_len, common_attn_metadata, *args, **kwargs)

        self._builders.append(build)
        builder.build = watched


def cut_metadata(given: Any, part: RowSubset) -> Any:
    """vLLM's metadata common to all backends, for a part of the rows.

    Raises UnsupportedFeatureError if it holds something that is not known here.
    """
    unknown = [f.name for f in dataclasses.fields(given) if f.name not in _PLAIN and getattr(given, f.name) is not None]
    if unknown:
        raise UnsupportedFeatureError(
            f"vLLM's attention metadata has {unknown[0]!r}, which cannot be cut to some rows: this feature does not "
            "work with skipped layers"
        )
    values: dict[str, Any] = {}
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if value is None or field.name in _COMPUTED:
            continue
        if field.name in _PER_REQUEST:
            values[field.name] = _take(value, part.requests)
        elif field.name == "_num_computed_tokens_cpu":
            values[field.name] = _plus(_take(value, part.requests), part.lead)
        elif field.name in _LENGTHS:
            values[field.name] = _plus(_take(value, part.requests), -part.cut)
        elif field.name in _PER_ROW:
            values[field.name] = _take(value, part.rows)
        elif field.name in _CACHES:
            values[field.name] = None
    starts = np.concatenate(([0], np.cumsum(part.counts))).astype(np.int32)
    starts_cpu = torch.from_numpy(starts)
    longest = given.seq_lens_cpu_upper_bound
    return dataclasses.replace(
        given,
        query_start_loc=starts_cpu.to(given.query_start_loc.device, given.query_start_loc.dtype),
        query_start_loc_cpu=starts_cpu,
        num_reqs=len(part.counts),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(part.counts.max()),
        max_seq_len=given.max_seq_len if longest is None else int(values["seq_lens_cpu_upper_bound"].max()),
        **values,
    )


def _take(value: Any, chosen: Any) -> Any:
    if isinstance(chosen, slice) or isinstance(value, np.ndarray):
        return value[chosen]
    return value[torch.from_numpy(chosen).to(value.device)]


def _plus(lengths: Any, more: NDArray[np.int64]) -> Any:
    """Lengths of texts with so many tokens more."""
    if not more.any():
        return lengths
    return lengths + torch.from_numpy(more).to(lengths.device, lengths.dtype)
