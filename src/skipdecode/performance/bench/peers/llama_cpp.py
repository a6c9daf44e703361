"""llama.cpp as a peer, through llama-cpp-python's low-level interface: the same weights, one sequence a row.

Rows of a batch are sequences of one `llama_batch`, so a step reads the weights once for all of them. The next tokens
are chosen by an argmax over the logits, as in the other peers.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skipdecode.engine.generate import BatchEngine, TimedToken
from skipdecode.engine.requests import Request
from skipdecode.errors import MissingExtraError, UsageError, WorkError
from skipdecode.performance.bench.gguf_file import write_gguf
from skipdecode.performance.bench.peers import Peer, Rows
from skipdecode.performance.cost import CostModel
from skipdecode.schedule import Schedule

__all__ = ["LlamaCppPeer"]

_CACHE_BYTES = 2  # of an element: its cache is f16


class _LlamaCppEngine(BatchEngine):
    """llama.cpp's steps. A batch with the prompts of the one before goes on behind what the cache holds of them."""

    name = "llama.cpp"

    def __init__(self, library: Any, weights: Any, vocabulary: int, num_layers: int, rows: Rows) -> None:
        super().__init__(num_layers, rows.batch)
        self._library, self._vocabulary = library, vocabulary
        self._held: list[tuple[int, ...]] = []
        settings = library.llama_context_default_params()
        # Each sequence gets an equal share of the context, which is cut to a multiple of 256.
        settings.n_ctx = rows.batch * -(-(rows.prompt + rows.new) // 256) * 256
        settings.n_seq_max, settings.n_batch = rows.batch, max(rows.batch, 512)
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = library.llama_init_from_model(weights, settings)
        if not self._context:
            raise WorkError(f"llama.cpp has no room for {rows.batch} rows of {rows.prompt + rows.new} tokens")
        self._batch = library.llama_batch_init(rows.batch, 0, 1)

    def close(self) -> None:
        """See `Engine`; the engine is of no use afterwards."""
        super().close()
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)

    def _generate(self, requests: list[Request]) -> list[list[TimedToken]]:
        """Each row feeds its prompt and then its own tokens, one a step."""
        prompts = [request.prompt for request in requests]
        begin = min(map(len, prompts)) - 1 if prompts == self._held else 0
        memory = self._library.llama_get_memory(self._context)
        for number in range(self._max_rows):
            self._library.llama_memory_seq_rm(memory, number, begin, -1)
        self._held = prompts
        rows: list[list[TimedToken]] = [[] for _ in requests]
        position = begin
        while any(len(row) < request.max_new_tokens for row, request in zip(rows, requests, strict=True)):
            fed = [
                prompt[position] if position < len(prompt) else row[-1][0]
                for prompt, row in zip(prompts, rows, strict=True)
            ]
            found, now = self._step(fed, position), time.perf_counter()
            position += 1
            for row, request, token in zip(rows, requests, found, strict=True):
                if position >= len(request.prompt) and len(row) < request.max_new_tokens:
                    row.append((token, now))
        return rows

    def _step(self, tokens: list[int], position: int) -> list[int]:
        """Decode one token of each row at `position`; returns the most likely next ones."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, row, 1
        if status := self._library.llama_decode(self._context, batch):
            raise WorkError(f"llama.cpp's decode step failed with status {status}")
        logits = self._library.llama_get_logits(self._context)
        found = np.ctypeslib.as_array(logits, (len(tokens), self._vocabulary)).argmax(1)
        return [int(token) for token in found]


class LlamaCppPeer(Peer):
    """llama.cpp on the CPU with as many threads as torch has, on a model of a type that `write_gguf` takes.

    `kind` is the type of the weights, one of `skipdecode.performance.bench.gguf_file.KINDS`.

    Raises
    ------
    MissingExtraError
        If llama-cpp-python is absent.
    UsageError
        If the model has no GGUF form, or is not on the CPU.
    """

    times_prompts = False  # They are fed a token at a time.

    def __init__(self, model: Any, kind: str) -> None:
        if importlib.util.find_spec("llama_cpp") is None:
            raise MissingExtraError("the engine 'llama.cpp'", "llama-cpp")
        if model.device.type != "cpu":
            raise UsageError("llama.cpp is measured on CPUs only: give --device cpu, or leave it out of --engines")
        import llama_cpp

        super().__init__(model)
        self.name, self.weights = f"llama.cpp-{kind}", kind
        self.arithmetic = "w8a8" if kind.startswith("q") else self.arithmetic
        self._library: Any = llama_cpp
        self._engine: tuple[Rows, _LlamaCppEngine] | None = None
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            self._sizes = write_gguf(model, path, kind)
            settings = llama_cpp.llama_model_default_params()
            # Into memory at once, so that the file can go, and llama.cpp may order the weights as it likes.
            settings.use_mmap, settings.n_gpu_layers = False, 0
            self._weights = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self._weights:
            raise WorkError(f"llama.cpp cannot load the {kind} file that was written for it")

    def engine(self, schedule: Schedule, rows: Rows) -> BatchEngine:
        """See `Peer`; one engine for all runs of such rows, whose prompts are computed once."""
        if self._engine is None or self._engine[0] != rows:
            self.close()
            sizes = self.model.config.vocab_size, self._geometry.num_layers
            self._engine = rows, _LlamaCppEngine(self._library, self._weights, *sizes, rows)
        return self._engine[1]

    def reads(self, batch: int) -> CostModel:
        geometry = self._geometry
        cache = geometry.kv_bytes_per_token() / geometry.dtype_bytes * _CACHE_BYTES
        return CostModel.of_step(geometry.num_layers, batch, self._sizes.head, self._sizes.layer, cache)

    def close(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
        self._engine = None
