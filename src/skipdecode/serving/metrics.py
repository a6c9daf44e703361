"""What the server counts, for Prometheus. The names are listed in docs/serve.md."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """All counters of one server, in a registry of their own.

    Parameters
    ----------
    num_layers : int
        Of the model; the depth histogram has a bucket for each layer up to 64, else 64 buckets.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, num_layers: int) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Finished requests", "endpoint", "outcome")
        self.queue_length = self._gauge("queue_length", "Choices that wait")
        self.running_rows = self._gauge("running_rows", "Choices in the batch")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts", "schedule")
        self.generated_tokens = self._counter("generated_tokens", "New tokens", "schedule")
        self.layers_run = self._counter("layers_run", "Layers run for new tokens", "schedule")
        self.layers_full = self._counter("layers_full", "Layers that full depth would run for them", "schedule")
        self.first_token_seconds = self._histogram("first_token_seconds", "From arrival to first token", _SECONDS)
        self.inter_token_seconds = self._histogram("inter_token_seconds", "Between a choice's tokens", _SECONDS)
        self.request_seconds = self._histogram("request_seconds", "From arrival to end", (*_SECONDS, 120, 300, 600))
        self.steps = self._counter("steps", "Steps of the model")
        self.step_seconds = self._histogram("step_seconds", "Duration of a step", _SECONDS)
        self.step_depth = self._histogram("step_depth", "Mean layers of a step's rows", _depths(num_layers))
        self.kv_bytes_held = self._gauge("kv_bytes_held", "Keys and values now")
        self.kv_bytes_saved = self._gauge("kv_bytes_saved", "What full depth would hold beyond that")
        self.step_failures = self._counter("step_failures", "Steps that raised")

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return bytes(generate_latest(self.registry))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="skipdecode", registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, namespace="skipdecode", registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, namespace="skipdecode", registry=self.registry, buckets=buckets)


def _depths(num_layers: int) -> tuple[float, ...]:
    step = max(1.0, num_layers / 64)
    return tuple(round(step * (i + 1), 3) for i in range(round(num_layers / step)))
