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

from skipdecode.errors import MissingExtraError, SkipDecodeError, UsageError
from skipdecode.performance.bench.gguf_file import write_gguf
from skipdecode.performance.bench.peers import Peer
from skipdecode.performance.cost import CostModel
from skipdecode.schedule import Schedule

__all__ = ["LlamaCppPeer"]

_CACHE_BYTES = 2  # of an element: its cache is f16


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

    def __init__(self, model: Any, kind: str) -> None:
        if importlib.util.find_spec("llama_cpp") is None:
            raise MissingExtraError("the engine 'llama.cpp'", "llama-cpp")
        if model.device.type != "cpu":
            raise UsageError("llama.cpp is measured on CPUs only: give --device cpu, or leave it out of --engines")
        import llama_cpp

        super().__init__(model)
        self.name, self.weights = f"llama.cpp-{kind}", kind
        self._vocabulary = model.config.vocab_size
        self._library: Any = llama_cpp
        self._context: Any = None
        self._batch: Any = None
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
            raise SkipDecodeError(f"llama.cpp cannot load the {kind} file that was written for it")

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self.close()
        library = self._library
        settings = library.llama_context_default_params()
        # Each sequence gets an equal share of the context, which is cut to a multiple of 256.
        settings.n_ctx = batch * -(-(prompt + new) // 256) * 256
        settings.n_seq_max, settings.n_batch = batch, max(batch, 512)
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = library.llama_init_from_model(self._weights, settings)
        if not self._context:
            raise SkipDecodeError(f"llama.cpp has no room for {batch} rows of {prompt + new} tokens")
        self._batch = library.llama_batch_init(batch, 0, 1)
        self._rows, self._prompt, self._new = batch, prompt, new
        for position in range(prompt):
            self.feed([5] * batch, position)

    def decode_seconds(self, schedule: Schedule) -> float:
        library, memory = self._library, self._library.llama_get_memory(self._context)
        for row in range(self._rows):
            library.llama_memory_seq_rm(memory, row, self._prompt, -1)
        tokens = [5] * self._rows
        start = time.perf_counter()
        for step in range(self._new - 1):
            tokens = self.feed(tokens, self._prompt + step)
        return time.perf_counter() - start

    def reads(self, batch: int) -> CostModel:
        geometry = self._geometry
        cache = geometry.kv_bytes_per_token() / geometry.dtype_bytes * _CACHE_BYTES
        return CostModel.of_step(geometry.num_layers, batch, self._sizes.head, self._sizes.layer, cache)

    def close(self) -> None:
        if self._batch is not None:
            self._library.llama_batch_free(self._batch)
        if self._context is not None:
            self._library.llama_free(self._context)
        self._batch = self._context = None

    def feed(self, tokens: list[int], position: int) -> list[int]:
        """Decode one token of each row at `position`; returns the most likely next ones."""
        batch = self._batch
        batch.n_tokens = self._rows
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, row, 1
        if status := self._library.llama_decode(self._context, batch):
            raise SkipDecodeError(f"llama.cpp's decode step failed with status {status}")
        logits = self._library.llama_get_logits(self._context)
        found = np.ctypeslib.as_array(logits, (self._rows, self._vocabulary)).argmax(1)
        return [int(token) for token in found]
