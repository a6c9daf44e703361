"""What the server counts, for Prometheus. The names are listed in docs/serve.md."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """All counters of one server, in a registry of their own.

    `num_layers`: of the model; the depth histogram has a bucket for each layer up to 64, else 64 buckets.
    """

    def __init__(self, num_layers: int) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="skipdecode", registry=self.registry)
        gauge = partial(Gauge, namespace="skipdecode", registry=self.registry)
        histogram = partial(Histogram, namespace="skipdecode", registry=self.registry)
        self.requests = counter("requests", "Finished requests", ("endpoint", "outcome"))
        self.queue_length = gauge("queue_length", "Choices that wait")
        self.running_rows = gauge("running_rows", "Choices in the batch")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts", ("schedule",))
        self.prefix_hit_tokens = counter("prefix_hit_tokens", "Those that the prefix cache had", ("schedule",))
        self.generated_tokens = counter("generated_tokens", "New tokens", ("schedule",))
        self.drafted_tokens = counter("drafted_tokens", "Tokens drafted from texts and earlier answers")
        self.accepted_tokens = counter("accepted_tokens", "Those that full depth took")
        self.layers_run = counter("layers_run", "Layers run for new tokens", ("schedule",))
        self.layers_full = counter("layers_full", "Layers that full depth would run for them", ("schedule",))
        self.first_token_seconds = histogram(
            "first_token_seconds", "From arrival to first text on its way", buckets=_SECONDS
        )
        self.inter_token_seconds = histogram(
            "inter_token_seconds", "Between a choice's tokens on their way", buckets=_SECONDS
        )
        self.request_seconds = histogram("request_seconds", "From arrival to end", buckets=(*_SECONDS, 120, 300, 600))
        self.steps = counter("steps", "Steps of the model")
        self.step_seconds = histogram("step_seconds", "Duration of a step", buckets=_SECONDS)
        self.step_depth = histogram("step_depth", "Mean layers of a step's rows", buckets=_depths(num_layers))
        self.kv_bytes_held = gauge("kv_bytes_held", "Keys and values now")
        self.kv_bytes_saved = gauge("kv_bytes_saved", "What full depth would hold beyond that")
        self.prefix_cache_bytes = gauge("prefix_cache_bytes", "Keys and values kept of prompts that no row uses")
        self.step_failures = counter("step_failures", "Steps that raised")


def _depths(num_layers: int) -> tuple[float, ...]:
    step = max(1.0, num_layers / 64)
    return tuple(round(step * (i + 1), 3) for i in range(round(num_layers / step)))
