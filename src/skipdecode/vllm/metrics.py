"""Prometheus metrics of skipped layers, next to those of vLLM, which loads this class by `vllm.stat_logger_plugins`."""

from __future__ import annotations

import functools
import sys
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.v1.metrics.loggers import StatLoggerBase

from skipdecode.vllm.scheduler import DEPTH_PREFIX, PREFIX
from skipdecode.vllm.settings import PluginSettings

_COUNTERS = {
    "steps": "Steps of the engine.",
    "layers": "Layers that steps ran for any of their tokens; divided by steps: layers per step.",
    "decode_tokens": "Generated tokens that were fed back.",
    "decode_token_layers": "Layers that these tokens ran; divided by tokens x layers of the model: the share that ran.",
}


class DepthMetrics(StatLoggerBase):  # type: ignore[misc]
    """Makes metrics of the scheduler's counts; does nothing for an engine that skips no layers."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        settings = PluginSettings.of_engine(vllm_config)
        made = {} if settings is None else _metrics(settings.num_layers)
        labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._metrics = {name: metric.labels(*labels) for name, metric in made.items()}

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM after every step."""
        if self._metrics and scheduler_stats is not None:
            for name, count in scheduler_stats.running_lora_adapters.items():
                if name.startswith(DEPTH_PREFIX):
                    for _ in range(count):
                        self._metrics["request_layers"].observe(int(name.removeprefix(DEPTH_PREFIX)))
                elif name.startswith(PREFIX):
                    self._metrics[name.removeprefix(PREFIX)].inc(count)

    def log_engine_initialized(self) -> None:
        """Log nothing."""


@functools.cache
def _metrics(layers: int) -> dict[str, Any]:
    """Made once per process: names are registered once. A replica of Ray Serve has only the /metrics of its node."""
    counter, histogram, labels = Counter, Histogram, ("model_name", "engine")
    if "ray.serve" in sys.modules:
        from vllm.v1.metrics import ray_wrappers as ray

        if ray._get_replica_id() is not None:
            counter, histogram = ray.RayCounterWrapper, ray.RayHistogramWrapper
    metrics = {name: counter(f"skipdecode_{name}", text, labels) for name, text in _COUNTERS.items()}
    text = "Layers that a finished request's tokens ran on average, rounded."
    depth = histogram("skipdecode_request_layers", text, labels, buckets=[*range(1, layers + 1)])
    return metrics | {"request_layers": depth}
