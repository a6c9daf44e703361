"""vLLM's scheduler, with more: a prefix cache of prompts only, admission when few requests run, Prometheus metrics.

Blocks of generated tokens hold no keys and values in the layers that those tokens sat out. A text that had such a block
as part of its prompt would read what was never written; so they are neither published nor looked up.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import prometheus_client as prometheus
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.loggers import StatLoggerBase

from skipdecode.errors import ScheduleError
from skipdecode.vllm.settings import PluginSettings
from skipdecode.vllm.step_rows import LayerLimits, StepBatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

_PREFIX = "skipdecode:"  # of the names of counts on their way to the front end
# Followed by a number of layers: finished requests whose tokens ran that many layers on average, rounded.
_DEPTH = f"{_PREFIX}depth:"
_COUNTERS = {
    "steps": "Steps of the engine.",
    "layers": "Layers that steps ran for any of their tokens; divided by steps: layers per step.",
    "decode_tokens": "Generated tokens that were fed back.",
    "decode_token_layers": "Layers that these tokens ran; divided by tokens x layers of the model: the share that ran.",
}

# How many requests may run; the first name is newer.
_SLOTS = ("max_num_active_reqs", "max_num_running_reqs")


class DepthMeter:
    """The counts since the last report."""

    def __init__(self, settings: PluginSettings, limits: LayerLimits) -> None:
        self._settings, self._limits = settings, limits
        self._counts: Counter[str] = Counter()

    def batch(self, requests: list[Request], rows: list[int], already_counted: bool) -> StepBatch:
        """Requests as a `StepBatch`; `already_counted`: their computed tokens include `rows`."""
        width = np.array(rows, np.int64)
        start = np.array([r.num_computed_tokens for r in requests], np.int64)
        return StepBatch(
            start=start - width if already_counted else start,
            rows=width,
            prompt=np.array([r.num_prompt_tokens for r in requests], np.int64),
            schedule=np.array([self._settings.index_of(r) for r in requests], np.int64),
        )

    def count_step(self, requests: dict[str, Request], scheduled: dict[str, int]) -> None:
        """Count a scheduled step."""
        if not scheduled:
            return
        batch = self.batch([requests[i] for i in scheduled], list(scheduled.values()), already_counted=True)
        ran = self._limits.counts(batch)
        decodes = batch.start >= batch.prompt
        self._counts["steps"] += 1
        self._counts["layers"] += int(ran.any(0).sum())
        self._counts["decode_tokens"] += int(batch.rows[decodes].sum())
        self._counts["decode_token_layers"] += int(ran[decodes].sum())

    def count_finished(self, request: Request) -> None:
        """Count a finished request."""
        fed = request.num_tokens - request.num_prompt_tokens - 1
        if fed > 0:
            schedule = self._settings.schedules[self._settings.index_of(request)]
            self._counts[f"depth:{round(schedule.mean_budget(fed))}"] += 1

    def report(self) -> dict[str, int]:
        """The counts since the last report."""
        counts = {_PREFIX + name: count for name, count in self._counts.items()}
        self._counts.clear()
        return counts


class DepthMetrics(StatLoggerBase):  # type: ignore[misc]
    """Makes metrics of the counts in the front end; does nothing for an engine that skips no layers.

    vLLM loads this class by `vllm.stat_logger_plugins`.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        settings = PluginSettings.of_engine(vllm_config)
        metrics = {} if settings is None else _metrics(settings.num_layers)
        labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._metrics = {name: metric.labels(*labels) for name, metric in metrics.items()}

    def record(self, scheduler_stats: SchedulerStats | None, *args: object, **kwargs: object) -> None:
        """Called by vLLM after every step."""
        if self._metrics and scheduler_stats is not None:
            for name, count in scheduler_stats.running_lora_adapters.items():
                if name.startswith(_DEPTH):
                    for _ in range(count):
                        self._metrics["request_layers"].observe(int(name.removeprefix(_DEPTH)))
                elif name.startswith(_PREFIX):
                    self._metrics[name.removeprefix(_PREFIX)].inc(count)

    def log_engine_initialized(self) -> None:
        """Log nothing."""


@functools.cache
def _metrics(layers: int) -> dict[str, Any]:
    """Made once per process: names are registered once. A replica of Ray Serve has only the /metrics of its node."""
    counter, histogram, labels = prometheus.Counter, prometheus.Histogram, ("model_name", "engine")
    if "ray.serve" in sys.modules:
        from vllm.v1.metrics import ray_wrappers as ray

        if ray._get_replica_id() is not None:
            counter, histogram = ray.RayCounterWrapper, ray.RayHistogramWrapper
    metrics = {name: counter(f"skipdecode_{name}", text, labels) for name, text in _COUNTERS.items()}
    text = "Layers that a finished request's tokens ran on average, rounded."
    depth = histogram("skipdecode_request_layers", text, labels, buckets=[*range(1, layers + 1)])
    return metrics | {"request_layers": depth}


class _Skipping:
    """Mixed into vLLM's schedulers."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        settings = PluginSettings.of_engine(self.vllm_config)  # type: ignore[attr-defined]
        if settings is None:
            raise ScheduleError("skipdecode's scheduler needs a schedule: leave out --scheduler-cls")
        self._settings = settings
        self._limits = LayerLimits(settings.schedules)
        self._meter = DepthMeter(self._settings, self._limits)
        self._slots = next(name for name in _SLOTS if hasattr(self, name))
        _cache_prompts_only(self.kv_cache_manager, settings)  # type: ignore[attr-defined]

    def schedule(self, *args: object, **kwargs: object) -> Any:
        slots = getattr(self, self._slots)
        if self._settings.policy == "refill" and not self._may_join():
            setattr(self, self._slots, min(slots, len(self.running)))  # type: ignore[attr-defined]
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            setattr(self, self._slots, slots)
        if self.log_stats:  # type: ignore[attr-defined]
            self._meter.count_step(self.requests, output.num_scheduled_tokens)  # type: ignore[attr-defined]
        return output

    def make_stats(self, *args: object, **kwargs: object) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            # The only field that takes any names and numbers to the front end. LoRA, whose it is, is refused.
            stats.running_lora_adapters = stats.running_lora_adapters | self._meter.report()
        return stats

    def _free_request(self, request: Request, *args: object, **kwargs: object) -> Any:
        if self.log_stats:  # type: ignore[attr-defined]
            self._meter.count_finished(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _may_join(self) -> bool:
        """Whether requests may join: few run, a group is joining, or all that run are near their least depth."""
        running = self.running  # type: ignore[attr-defined]
        if len(running) <= self._settings.refill_below * (getattr(self, self._slots) - 1):
            return True
        batch = self._meter.batch(running, [1] * len(running), already_counted=False)
        if (batch.start < batch.prompt).any():
            return True
        least = sum(min(self._settings.schedules[n].budgets) for n in batch.schedule.tolist())
        return bool(int(self._limits.depth(batch).sum()) - least < len(running) / 2)


class SkipScheduler(_Skipping, Scheduler):  # type: ignore[misc]
    """Waits for each step's tokens."""


class SkipAsyncScheduler(_Skipping, AsyncScheduler):  # type: ignore[misc]
    """Schedules a step ahead."""


def _cache_prompts_only(manager: KVCacheManager, settings: PluginSettings) -> None:
    """Keep generated tokens out of the prefix cache, and out of what a request looks up there."""
    coordinator = manager.coordinator
    publish, find, look_up = coordinator.cache_blocks, coordinator.find_longest_cache_hit, manager.get_computed_blocks
    longest: list[int] = []

    def shared(request: Request) -> int:
        # Where prompts have layers of their own, the last token of one runs layers, or takes bridges, that the same
        # token of a longer one does not.
        explicit = not isinstance(settings.schedules[settings.index_of(request)].prompt, str)
        return int(request.num_prompt_tokens) - explicit

    def publish_prompt(request: Request, num_computed_tokens: int) -> None:
        publish(request, min(num_computed_tokens, shared(request)))

    def find_in_prompt(block_hashes: object, max_cache_hit_length: int, *args: object, **kwargs: object) -> Any:
        return find(block_hashes, min([max_cache_hit_length, *longest]), *args, **kwargs)

    def look_up_prompt(request: Request, *args: object, **kwargs: object) -> Any:
        # A text preempted in its answer may meet its own tokens as part of another's prompt, at another depth.
        longest.append(shared(request))
        try:
            return look_up(request, *args, **kwargs)
        finally:
            longest.pop()

    coordinator.cache_blocks = publish_prompt
    coordinator.find_longest_cache_hit = find_in_prompt
    manager.get_computed_blocks = look_up_prompt
