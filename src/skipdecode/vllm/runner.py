"""vLLM's workers and their model runner (V1), with layers that are skipped: rows in order of depth, a plan a step.

vLLM makes the worker by the name that the plugin gives it. `SkipRunner` is mixed into the runner's class once vLLM has
made the runner. It overrides only steps that vLLM names as methods of their own: the order of the batch, and the call
of the model.

Attention metadata of the layers that run only some of a step's rows is made by the backend's own builder. vLLM builds
metadata once a step, for all rows. The builders are watched while they do: what a builder was given is cut to a layer's
rows and given to the same builder again. So nothing here knows a backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.gate import with_mixin
from skipdecode.models.release import Forward
from skipdecode.vllm.gates import LayerGates, find_layers
from skipdecode.vllm.projection import (
    ContextMemory,
    ContextRows,
    KeyProjection,
    checkpoint_fit,
    context_rows,
    layer_bridges,
    prompt_maps,
    stops_of,
)
from skipdecode.vllm.settings import PluginSettings
from skipdecode.vllm.step_rows import ALL, NONE, LayerLimits, RowSubset, Selection, StepBatch, StepRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class SkipWorker(Worker):  # type: ignore[misc]
    """The worker of this platform."""

    def init_device(self, *args: object, **kwargs: object) -> None:
        super().init_device(*args, **kwargs)
        settings = PluginSettings.of_engine(self.vllm_config)
        if settings is not None:
            runner = self.model_runner
            runner.skipping = Skipping(settings, self.vllm_config, runner.device)
            base: Any = type(runner)  # for mypy, not hashable
            runner.__class__ = with_mixin(SkipRunner, base)


class SkipRunner:
    """Mixed into the class of a V1 model runner, CPU or GPU."""

    skipping: Skipping

    def load_model(self, *args: object, **kwargs: object) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.skipping.gate(self.get_model())  # type: ignore[attr-defined]

    def profile_run(self, *args: object, **kwargs: object) -> None:
        super().profile_run(*args, **kwargs)  # type: ignore[misc]
        self.skipping.compile_layers(self)

    def initialize_kv_cache(self, *args: object, **kwargs: object) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        self.skipping.watch(self.attn_groups)  # type: ignore[attr-defined]
        _make_stage_input(self)

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        super()._may_reorder_batch(scheduler_output)  # type: ignore[misc]
        self.skipping.order(self.input_batch, self.requests, scheduler_output)  # type: ignore[attr-defined]

    def _determine_batch_execution_and_padding(self, *args: object, **kwargs: object) -> Any:
        if self.skipping.step is not None:  # Without padding, for a CUDA graph would run every layer.
            kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]

    def _model_forward(self, *args: object, **kwargs: object) -> Any:
        run = super()._model_forward  # type: ignore[misc]
        if not self.skipping.begin(get_forward_context()):
            return run(*args, **kwargs)
        try:
            output = run(*args, **kwargs)
        finally:
            self.skipping.gates.end()
        if not self.skipping.gates.finished:
            raise UnsupportedFeatureError(
                "this vLLM ran its own graph in a step that skips layers: start it with --enforce-eager"
            )
        return output


def _make_stage_input(runner: GPUModelRunner) -> None:
    """Make the buffers of a later pipeline stage; vLLM leaves out the warm-up that does, in eager mode on a CPU."""
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


class Skipping:
    """State of a runner that skips layers: `step`, the rows of the step to come, the gates, and metadata."""

    def __init__(self, settings: PluginSettings, vllm_config: VllmConfig, device: torch.device) -> None:
        self._settings, self._config, self._device = settings, vllm_config, device
        self._fit = checkpoint_fit(vllm_config.model_config)
        bridged = frozenset(map(int, () if self._fit is None else self._fit.bridges))
        self._limits = LayerLimits(settings.schedules, bridged)
        self.step: StepRows | None = None
        self._context: ContextRows | None = None

    def gate(self, model: nn.Module) -> None:
        """Gate the decoder layers of a loaded model."""
        architecture = self._config.model_config.architecture
        layers, axis, norm = find_layers(model, architecture, self._settings.num_layers)
        # The modules that keep something of a text: keys and values, or a recurrent state.
        modules = self._config.compilation_config.static_forward_context
        names = {id(module): name for name, module in modules.items() if hasattr(module, "kv_cache")}
        self._layer_names = {i: [names[id(m)] for m in x.modules() if id(m) in names] for i, x in layers.items()}
        # A recurrent operation is called by its layer's name, which a piece for several layers would hold fixed.
        compiles = None if self._config.model_config.is_hybrid else self._config
        self.gates = LayerGates(layers, axis, compiles, norm)
        projected = {layer for s in self._settings.schedules for layer in s.projected}
        maps = prompt_maps(self._fit, self._settings.schedules)
        shard = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.gates.projections = {i: KeyProjection(layers[i], maps.get(i), shard) for i in projected & set(layers)}
        if self._fit is not None and self._fit.context_tokens and maps:
            stops = stops_of(self._settings.schedules, list(maps))
            self.gates.memory = ContextMemory(self._fit.context_tokens, stops)
        self.gates.bridges = layer_bridges(self._fit, layers, self._config.model_config.dtype, self._device)
        # Those that vLLM compiles.
        self._graphs: list[Any] = [module for module in model.modules() if "do_not_compile" in module.__dict__]

    def compile_layers(self, runner: GPUModelRunner) -> None:
        """Make the pieces that steps which skip will call, by steps without attention that call every layer."""
        if self.gates.pieces.eager:
            return
        rows, layers = min(64, runner.max_num_tokens), range(self._settings.num_layers)
        nothing, texts = (NONE,) * len(layers), (np.zeros(rows, np.int64), np.zeros(rows, np.bool_))
        all_run = StepRows((ALL,) * len(layers), nothing, (), rows)
        projected, bridged = self.gates.projections, self.gates.bridges
        across = tuple(ALL if i in bridged else NONE for i in layers)
        keys = StepRows(nothing, tuple(ALL if i in projected else NONE for i in layers), (), rows, across, *texts)
        for step, blocks in ((all_run, False), (all_run, True), *(((keys, False),) if projected or bridged else ())):
            self.gates.pieces.makes_blocks = blocks
            with self.layer_by_layer(step):
                runner._dummy_run(rows, is_profile=True)
        self.gates.pieces.makes_blocks = False

    @contextmanager
    def layer_by_layer(self, step: StepRows) -> Iterator[None]:
        """Runs that vLLM makes up call the layers of a step by the gates, and not vLLM's graph of them all."""
        before = [module.do_not_compile for module in self._graphs]
        try:
            for module in self._graphs:
                module.do_not_compile = True
            self.gates.begin(step, self._device, {})
            yield
        finally:
            self.gates.end()
            for module, was in zip(self._graphs, before, strict=True):
                module.do_not_compile = was

    def watch(self, groups: list[list[AttentionGroup]]) -> None:
        """The KV cache is there, and with it the builders of attention metadata."""
        self._metadata = StepMetadata(groups, self._layer_names)

    def order(
        self, input_batch: InputBatch, requests: dict[str, CachedRequestState], scheduler_output: SchedulerOutput
    ) -> None:
        """Sort the batch from shallow to deep, prompts last, and work out which rows run which layer."""
        batch = self._batch(input_batch, requests, scheduler_output.num_scheduled_tokens)
        if not len(batch.rows):
            self.step = None
            return
        order = np.lexsort((self._limits.depth(batch), batch.start < batch.prompt))
        if (np.diff(order) < 0).any():
            _permute(input_batch, order)
            batch = StepBatch(*(getattr(batch, name)[order] for name in ("start", "rows", "prompt", "schedule")))
        self.step, memory = self._limits.step(batch), self.gates.memory
        if memory is not None and self.step is not None and self.step.schedules is not None:
            table = input_batch.block_table[0]
            self._context = context_rows(batch, memory.context_tokens, table.block_table.np, table.block_size)

    def begin(self, context: ForwardContext) -> bool:
        """Get ready for the forward to come; returns whether it calls layers by the gates."""
        (step, self.step), (context_at, self._context) = (self.step, None), (self._context, None)
        # Without metadata it is a dummy run, of which `order` knows nothing.
        if step is None or not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            return False
        if context.cudagraph_runtime_mode != CUDAGraphMode.NONE:
            raise UnsupportedFeatureError(
                "this vLLM would replay a graph of every layer in a step that skips: start it with --enforce-eager"
            )
        slots = self._metadata.projected_slots(step, context.slot_mapping)
        self._metadata.fill(step, context.attn_metadata, context.slot_mapping)
        self.gates.begin(step, self._device, slots, context_at)
        context.skip_compiled = True  # vLLM's own switch: the loop over the layers runs in Python.
        return True

    def _batch(
        self, input_batch: InputBatch, requests: dict[str, CachedRequestState], scheduled: dict[str, int]
    ) -> StepBatch:
        ids = input_batch.req_ids
        count = len(ids)
        return StepBatch(
            start=input_batch.num_computed_tokens_cpu[:count].astype(np.int64),
            rows=np.fromiter((scheduled[i] for i in ids), np.int64, count),
            prompt=input_batch.num_prompt_tokens[:count].astype(np.int64),
            schedule=np.array([self._settings.index_of(requests[i]) for i in ids], np.int64),
        )


def _permute(input_batch: InputBatch, order: NDArray[np.int64]) -> None:
    """Bring the batch into an order by vLLM's own swaps."""
    index_of = list(range(len(order)))  # where each request is that was first here
    holds = list(range(len(order)))
    for target, wanted in enumerate(order.tolist()):
        source = index_of[wanted]
        if source != target:
            input_batch.swap_states(target, source)
            other = holds[target]
            holds[target], holds[source] = wanted, other
            index_of[wanted], index_of[other] = target, source


_PER_REQUEST = (
    *("block_table_tensor", "is_prefilling", "encoder_seq_lens", "encoder_seq_lens_cpu"),
    *("rswa_prefix_lens", "req_idx"),
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

    def __init__(self, groups: list[list[AttentionGroup]], layer_names: dict[int, list[str]]) -> None:
        self._common: dict[int, CommonAttentionMetadata] = {}
        self._builders: list[Forward] = []
        builder_of: dict[str, int] = {}
        for group in (g for groups_of_cache in groups for g in groups_of_cache):
            builder_of |= dict.fromkeys(group.layer_names, len(self._builders))
            self._watch(group.metadata_builders[0])
        self._of_layer = {layer: [(name, builder_of[name]) for name in names] for layer, names in layer_names.items()}

    def fill(self, step: StepRows, metadata: dict[str, Any], slots: dict[str, Tensor]) -> None:
        """Put the metadata and slots of all layers that run a part into the forward context's dictionaries."""
        built: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        for layer, names in self._of_layer.items():
            kind = step.layers[layer]
            if kind < 0:
                continue
            for name, builder in names:
                key = (kind, builder)
                if key not in built:
                    cut = cut_metadata(self._common[builder], step.parts[kind])
                    # `fast_build`: FlashAttention 3 else plans into the one buffer that it has for CUDA graphs.
                    built[key] = self._builders[builder](0, cut, fast_build=True), cut.slot_mapping
                metadata[name], slots[name] = built[key]

    def projected_slots(self, step: StepRows, slots: dict[str, Tensor]) -> dict[int, Tensor]:
        """Slots of the keys and values of each projecting layer's rows, of the slots of all rows."""
        rows = [*(part.rows for part in step.parts), slice(step.num_rows)]  # The last is found by ALL.
        return {
            layer: _take(slots[names[0][0]], rows[kind])
            for layer, names in self._of_layer.items()
            if (kind := step.projects[layer]) != NONE
        }

    def _watch(self, builder: AttentionMetadataBuilder) -> None:
        number, build = len(self._builders), builder.build
        name = type(builder).__name__
        if name not in _REPEATABLE:
            raise UnsupportedFeatureError(
                f"the attention backend of {name} does not work with skipped layers: choose another, such as "
                "--attention-backend FLASH_ATTN or TRITON_ATTN"
            )
        builder.supports_update_block_table = False  # It would copy another group's metadata, past `build`.

        def watched(common_prefix_len: int, common_attn_metadata: Any, *args: object, **kwargs: object) -> Any:
            self._common[number] = common_attn_metadata
            return build(common_prefix_len, common_attn_metadata, *args, **kwargs)

        self._builders.append(build)
        builder.build = watched


def cut_metadata(whole: CommonAttentionMetadata, part: RowSubset) -> CommonAttentionMetadata:
    """vLLM's metadata common to all backends, for a part of the rows.

    Raises UnsupportedFeatureError if it holds something that is not known here.
    """
    unknown = [f.name for f in dataclasses.fields(whole) if f.name not in _PLAIN and getattr(whole, f.name) is not None]
    if unknown:
        raise UnsupportedFeatureError(
            f"vLLM's attention metadata has {unknown[0]!r}, which cannot be cut to some rows: this feature does not "
            "work with skipped layers"
        )
    values: dict[str, Any] = {}
    for field in dataclasses.fields(whole):
        value = getattr(whole, field.name)
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
    longest = whole.seq_lens_cpu_upper_bound
    return dataclasses.replace(
        whole,
        query_start_loc=starts_cpu.to(whole.query_start_loc.device, whole.query_start_loc.dtype),
        query_start_loc_cpu=starts_cpu,
        num_reqs=len(part.counts),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(part.counts.max()),
        max_seq_len=whole.max_seq_len if longest is None else int(values["seq_lens_cpu_upper_bound"].max()),
        **values,
    )


def _take(value: Any, chosen: Selection) -> Any:
    if isinstance(chosen, slice) or isinstance(value, np.ndarray):
        return value[chosen]
    return value[torch.from_numpy(chosen).to(value.device)]


def _plus(lengths: Tensor, more: NDArray[np.int64]) -> Tensor:
    """Lengths of texts with so many tokens more."""
    if not more.any():
        return lengths
    return lengths + torch.from_numpy(more).to(lengths.device, lengths.dtype)
