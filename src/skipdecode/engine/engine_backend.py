"""Batches through the package's own engine: one lockstep wave a batch, on the fast path's kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence

from skipdecode.engine.backend import BatchResult, FinishReason, GenerationSettings, StopCheck
from skipdecode.engine.fast import Engine
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.requests import Request, Sampling
from skipdecode.engine.row_seeds import row_seed
from skipdecode.schedule import Schedule

__all__ = ["EngineBackend"]


class EngineBackend:
    """`skipdecode.engine.backend.Backend` on `skipdecode.engine.Engine`.

    Greedy output is that of `TransformersBackend`, up to the rounding of the weights' type. Sampling draws other tokens
    than that backend from the same seed. Rows that end leave the batch, and their keys and values with them.

    Parameters
    ----------
    model : FastModel
        May be shared by backends with other schedules.
    schedule : Schedule or None
        None: full depth.
    end_tokens : sequence of int
        A row ends after any of them.

    Attributes
    ----------
    schedule : Schedule
        What runs: on some devices one of fewer budgets, see `FastModel.suited`.
    """

    def __init__(self, model: FastModel, schedule: Schedule | None, *, end_tokens: Sequence[int]) -> None:
        self._model = model
        asked = Schedule.full(model.num_layers) if schedule is None else schedule
        asked.check_fits(model.num_layers)
        self.schedule = model.suited(asked)
        self.end_tokens = tuple(end_tokens)
        self.num_layers = model.num_layers

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        row_keys: Sequence[int],
        should_stop: StopCheck | None = None,
    ) -> BatchResult:
        """See `Backend.generate`."""
        engine = Engine(self._model, self.schedule, max_rows=len(prompts), in_order=True)
        ends = frozenset() if settings.ignore_eos else frozenset(self.end_tokens)
        requests = [
            Request(tuple(prompt), settings.max_new_tokens, _sampling(settings, key), ends)
            for prompt, key in zip(prompts, row_keys, strict=True)
        ]
        tokens: list[list[int]] = [[] for _ in prompts]
        reasons: list[FinishReason] = ["length"] * len(prompts)
        start = time.perf_counter()
        for output in engine.run(requests):
            row = output.request
            if reasons[row] == "stop":
                continue
            tokens[row].append(output.token)
            if output.token in ends:
                reasons[row] = "eos"
            elif should_stop is not None and should_stop(tokens[row]):
                reasons[row] = "stop"
                engine.cancel(row)
        stats = engine.stats
        return BatchResult(
            tokens,
            reasons,
            stats.steps,
            stats.layer_reads,
            stats.prompt_seconds,
            time.perf_counter() - start - stats.prompt_seconds,
            stats.kv_bytes_peak,
            self._full_kv_bytes(engine, prompts, tokens),
        )

    def _full_kv_bytes(self, engine: Engine, prompts: Sequence[Sequence[int]], tokens: list[list[int]]) -> int:
        """Most bytes at a time if every token ran every layer: a row's pages after its prompt and after each step."""
        kv = engine.kv
        pages = [0] * max(map(len, tokens))
        for prompt, new in zip(prompts, tokens, strict=True):
            for step in range(len(new)):
                pages[step] += kv.pages_for(len(prompt) + step)
        # Where whole rows are kept at full depth, that is what is held.
        return max(max(pages) * self.num_layers * kv.page_bytes, engine.stats.kv_bytes_peak)


def _sampling(settings: GenerationSettings, key: int) -> Sampling:
    return Sampling(settings.temperature, settings.top_k, settings.top_p, seed=row_seed(settings.seed, key))
