"""vLLM's workers and their model runner (V1), with layers that are skipped: rows in order of depth, a plan a step.

vLLM makes the worker by the name that the plugin gives it. `SkipRunner` is mixed into the runner's class once vLLM has
made the runner. It overrides only steps that vLLM names as methods of their own: the order of the batch, and the call
of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.gate import with_mixin
from skipdecode.vllm.gates import LayerGates, find_layers
from skipdecode.vllm.metadata import StepMetadata
from skipdecode.vllm.projection import KeyProjection, checkpoint_fit, given_keys, layer_bridges
from skipdecode.vllm.settings import PluginSettings
from skipdecode.vllm.step_rows import ALL, NONE, LayerLimits, StepBatch, StepRows
from skipdecode.vllm.taps import TapMemory, TapRows, stops_of, tap_rows

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class SkipWorker(Worker):  # type: ignore[misc]
    """The worker of this platform."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        super().init_device(*args, **kwargs)
        settings = PluginSettings.of_engine(self.vllm_config)
        if settings is not None:
            runner = self.model_runner
            base: Any = type(runner)
            runner.skipping = Skipping(settings, self.vllm_config, runner.device)
            runner.__class__ = with_mixin(SkipRunner, base)


class SkipRunner:
    """Mixed into the class of a V1 model runner, CPU or GPU."""

    skipping: Skipping

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.skipping.gate(self.get_model())  # type: ignore[attr-defined]

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)  # type: ignore[misc]
        self.skipping.compile_layers(self)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        self.skipping.watch(self.attn_groups)  # type: ignore[attr-defined]
        _make_stage_input(self)

    def _may_reorder_batch(self, scheduler_output: Any) -> None:
        super()._may_reorder_batch(scheduler_output)  # type: ignore[misc]
        self.skipping.order(self.input_batch, self.requests, scheduler_output)  # type: ignore[attr-defined]

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        if self.skipping.step is not None:  # Without padding, for a CUDA graph would run every layer.
            kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
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


def _make_stage_input(runner: Any) -> None:
    """What a later pipeline stage receives into: made in a warm-up that vLLM leaves out in eager mode on a CPU."""
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


class Skipping:
    """What a runner needs to skip layers: `step`, the rows of the step to come, the gates, and metadata."""

    def __init__(self, settings: PluginSettings, vllm_config: Any, device: torch.device) -> None:
        self._settings, self._config, self._device = settings, vllm_config, device
        self._fit = checkpoint_fit(vllm_config.model_config)
        bridged = frozenset(map(int, () if self._fit is None else self._fit.bridges))
        self._limits = LayerLimits(settings.schedules, bridged)
        self.step: StepRows | None = None
        self._taps: TapRows | None = None

    def gate(self, model: Any) -> None:
        """Gate the decoder layers of a loaded model."""
        architecture = self._config.model_config.architecture
        layers, axis, norm = find_layers(model, architecture, self._settings.num_layers)
        # The modules that keep something of a text: keys and values, or a recurrent state.
        kept = self._config.compilation_config.static_forward_context
        names = {id(module): name for name, module in kept.items() if hasattr(module, "kv_cache")}
        self._layer_names = {i: [names[id(m)] for m in x.modules() if id(m) in names] for i, x in layers.items()}
        # A recurrent operation is called by its layer's name, which a piece for several layers would hold fixed.
        compiles = None if self._config.model_config.is_hybrid else self._config
        self.gates = LayerGates(layers, axis, compiles, norm)
        projected = {layer for s in self._settings.schedules for layer in s.projected}
        given = given_keys(self._fit, self._settings.schedules)
        self.gates.projections = {i: KeyProjection(layers[i], given.get(i), _shard()) for i in projected & set(layers)}
        if self._fit is not None and self._fit.taps and given:
            self.gates.memory = TapMemory(self._fit.taps, stops_of(self._settings.schedules, list(given)))
        self.gates.bridges = layer_bridges(self._fit, layers, self._config.model_config.dtype, self._device)
        # Those that vLLM compiles.
        self._graphs = [module for module in model.modules() if "do_not_compile" in module.__dict__]

    def compile_layers(self, runner: Any) -> None:
        """Make the pieces that steps which skip will call, by steps without attention that call every layer."""
        if self.gates.pieces.eager:
            return
        rows, every = min(64, runner.max_num_tokens), range(self._settings.num_layers)
        all_run = StepRows((ALL,) * len(every), (NONE,) * len(every), (), rows)
        projected, bridged = self.gates.projections, self.gates.bridges
        nothing, texts = (NONE,) * len(every), (np.zeros(rows, np.int64), np.zeros(rows, np.bool_))
        across = tuple(ALL if i in bridged else NONE for i in every)
        keys = StepRows(nothing, tuple(ALL if i in projected else NONE for i in every), (), rows, across, *texts)
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

    def watch(self, groups: Any) -> None:
        """The KV cache is there, and with it the builders of attention metadata."""
        self._metadata = StepMetadata(groups, self._layer_names)

    def order(self, input_batch: Any, requests: Any, scheduler_output: Any) -> None:
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
            self._taps = tap_rows(batch, memory.taps, table.block_table.np, table.block_size)

    def begin(self, context: Any) -> bool:
        """Get ready for the forward to come; returns whether it calls layers by the gates."""
        (step, self.step), (taps, self._taps) = (self.step, None), (self._taps, None)
        # Without metadata it is a dummy run, of which `order` knows nothing.
        if step is None or not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            return False
        if context.cudagraph_runtime_mode != CUDAGraphMode.NONE:
            raise UnsupportedFeatureError(
                "this vLLM would replay a graph of every layer in a step that skips: start it with --enforce-eager"
            )
        slots = self._metadata.projected_slots(step, context.slot_mapping)
        self._metadata.fill(step, context.attn_metadata, context.slot_mapping)
        self.gates.begin(step, self._device, slots, taps)
        context.skip_compiled = True  # vLLM's own switch: the loop over the layers runs in Python.
        return True

    def _batch(self, input_batch: Any, requests: Any, scheduled: dict[str, int]) -> StepBatch:
        ids = input_batch.req_ids
        count = len(ids)
        return StepBatch(
            start=input_batch.num_computed_tokens_cpu[:count].astype(np.int64),
            rows=np.fromiter((scheduled[i] for i in ids), np.int64, count),
            prompt=input_batch.num_prompt_tokens[:count].astype(np.int64),
            schedule=np.array([self._settings.index_of(requests[i]) for i in ids], np.int64),
        )


def _shard() -> tuple[int, int]:
    """Number of this process among those that share a layer's heads, and how many these are."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def _permute(input_batch: Any, order: Any) -> None:
    """Bring the batch into an order by vLLM's own swaps."""
    place = list(range(len(order)))  # where each request is that was first here
    holds = list(range(len(order)))
    for target, wanted in enumerate(order.tolist()):
        source = place[wanted]
        if source != target:
            input_batch.swap_states(target, source)
            other = holds[target]
            holds[target], holds[source] = wanted, other
            place[wanted], place[other] = target, source
