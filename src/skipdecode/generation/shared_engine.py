"""The engine that calls of a model share one after the other, with their prompts in its prefix cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from skipdecode.engine.base import Engine
from skipdecode.engine.opening import Backend
from skipdecode.errors import WorkError
from skipdecode.generation.stats import RunStats


class SharedEngine:
    """Lends an engine of `max_rows` rows to one call at a time; another call in between gets a new one.

    `lock` is the model's: see `LLM`.
    """

    def __init__(self, backend: Backend, max_rows: int, lock: threading.RLock) -> None:
        self._backend, self._max_rows, self._lock = backend, max_rows, lock
        self._idle: Engine | None = None

    def take(self, rows: int | None = None) -> tuple[Engine, RunStats]:
        """Take the engine, or for other `rows` a new one, with the statistics of the call."""
        with self._lock:
            engine = None
            if rows is None:
                engine, self._idle = self._idle, None
            if engine is None:
                engine = self._backend.engine(max_rows=rows or self._max_rows, prefix_cache=True)
            engine.stats = stats = RunStats(num_layers=self._backend.num_layers)
            return engine, stats

    def give_back(self, engine: Engine) -> None:
        """Return the engine for later calls, after a call without an error."""
        self._idle = engine

    @contextmanager
    def lend(self, rows: int | None, max_new_tokens: int) -> Iterator[tuple[Engine, RunStats]]:
        """Lend the engine to a call, as `take`; it is closed if the call fails or is left early.

        Raises WorkError: the accelerator is out of memory.
        """
        engine, stats = self.take(rows)
        start = time.perf_counter()
        try:
            yield engine, stats
        except torch.OutOfMemoryError:
            engine.close()
            batch = f"{rows or self._max_rows} rows of up to {max_new_tokens} new tokens"
            raise WorkError(
                f"out of memory with {batch}: give a smaller batch size (finished rows of a file output are kept)"
            ) from None
        except BaseException:
            engine.close()  # its prefix cache may be incomplete
            raise
        stats.seconds = time.perf_counter() - start
        if rows is None:
            self.give_back(engine)
