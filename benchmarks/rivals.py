"""`skipdecode bench` with other engines beside the package's own: llama.cpp, vLLM, and transformers with drafts.

llama.cpp-TYPE (bf16, f16, q8_0, q4_0, q4_1): on the CPU, with as many threads as torch has, on the same weights in that
type. vllm: at full depth, where it is installed; its processor and thread settings are the user's. prompt-lookup:
transformers' drafts from the prompt; early-exit: transformers' drafts from the first third of the layers. Drafts take
batches of one, and their speed depends on the text. All options are those of `skipdecode bench`.

    python benchmarks/rivals.py smollm2-135m --engines fast llama.cpp-q8_0 --out result.json
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skipdecode.cli import bench
from skipdecode.cli.arguments import Parser, add_options, config_from
from skipdecode.cli.paths import claimed
from skipdecode.common.options import option
from skipdecode.common.progress import quiet
from skipdecode.engine.base import Engine
from skipdecode.engine.fast_model import StepBytes
from skipdecode.engine.generate import BatchEngine, TimedToken
from skipdecode.engine.opening import Backend, GenerateBackend
from skipdecode.engine.requests import Request
from skipdecode.errors import MissingExtraError, SkipDecodeError, UsageError, WorkError
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.models.loading.gguf_file import KINDS, write_gguf
from skipdecode.performance.bench.measure import open_backend
from skipdecode.performance.bench.workload import ENGINES
from skipdecode.schedule import Schedule

RIVALS = (*(f"llama.cpp-{kind}" for kind in KINDS), "vllm", "prompt-lookup", "early-exit")
_DRAFT_TOKENS = 10  # transformers' own example


def open_rival(name: str, model: Any) -> Backend:
    """A backend by one of the names in `RIVALS`, or of the package's own."""
    if name.startswith("llama.cpp-"):
        return LlamaCppBackend(model, name.removeprefix("llama.cpp-"))
    if name == "vllm":
        return VllmBackend(model)
    if name == "prompt-lookup":
        return DraftingBackend(model, name, prompt_lookup_num_tokens=_DRAFT_TOKENS)
    if name == "early-exit":
        return DraftingBackend(model, name, assistant_early_exit=max(1, len(decoder_layers(unwrap(model))) // 3))
    return open_backend(name, model)


# ---------------------------------------------------------------------- transformers with drafts


class LayerCount:
    """Counts layers x tokens that run within it, by a hook on each layer (microseconds a call)."""

    def __init__(self, model: Any) -> None:
        self._modules = list(decoder_layers(unwrap(model)))
        self._total = 0

    def __enter__(self) -> LayerCount:
        self._handles = [layer.register_forward_pre_hook(self._add, with_kwargs=True) for layer in self._modules]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def layers_of(self, rows: list[list[int]], prompt_tokens: int) -> int:
        """All that ran, less the prompt's one pass: drafts and their checks are included."""
        return self._total - len(self._modules) * prompt_tokens

    def _add(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._total += hidden.shape[0] * hidden.shape[1]


class DraftingBackend(GenerateBackend):
    """transformers' `generate` that drafts tokens and checks them with the whole model, one sequence at a time.

    Sources: prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding; early exit, LayerSkip (2404.16710).
    """

    def __init__(self, model: Any, name: str, **options: Any) -> None:
        super().__init__(model, name, lambda ends: LayerCount(model), **options)

    def engine(self, schedule: Schedule | None = None, *, max_rows: int = 1, **ignored: Any) -> Engine:
        if max_rows > 1:
            raise UsageError(f"{self.name} decodes one sequence at a time: give batches of 1")
        return super().engine(schedule, max_rows=1)


# ---------------------------------------------------------------------- llama.cpp


class _LlamaCppEngine(BatchEngine):
    """llama.cpp's steps, a token of each sequence at a time: its keys and values are real.

    The next tokens are chosen by an argmax over the logits, as in the other engines. A batch with the prompts of the
    batch before it continues behind what the cache holds of them.
    """

    name = "llama.cpp"

    def __init__(self, library: Any, weights: Any, vocabulary: int, num_layers: int, max_rows: int) -> None:
        super().__init__(num_layers, max_rows)
        self._library, self._weights, self._vocabulary = library, weights, vocabulary
        self._held: list[tuple[int, ...]] = []
        self._context, self._tokens = None, 0
        self._batch = library.llama_batch_init(max_rows, 0, 1)

    def close(self) -> None:
        """See `Engine`; the engine is of no use afterwards."""
        super().close()
        self._library.llama_batch_free(self._batch)
        self._free()

    def _free(self) -> None:
        if self._context is not None:
            self._library.llama_free(self._context)

    def _make_room(self, tokens: int) -> None:
        """A context for sequences of so many tokens."""
        if self._context is not None and tokens <= self._tokens:
            return
        self._free()
        library, self._held = self._library, []
        self._tokens = -(-tokens // 256) * 256  # each sequence has an equal share of the context, cut to this multiple
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = self._max_rows * self._tokens, self._max_rows
        settings.n_batch = max(self._max_rows, 512)
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self._context = library.llama_init_from_model(self._weights, settings)
        if not self._context:
            raise WorkError(f"llama.cpp has no room for {self._max_rows} sequences of {tokens} tokens")

    def _generate(self, requests: list[Request]) -> list[list[TimedToken]]:
        prompts = [request.prompt for request in requests]
        self._make_room(max(len(request.prompt) + request.max_new_tokens for request in requests))
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
        """Decode one token of each sequence at `position`; returns the most likely next ones."""
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


class LlamaCppBackend(Backend):
    """llama.cpp's C API through llama-cpp-python, on weights that `write_gguf` writes in the type `kind`."""

    runs_schedules = False
    times_prompts = False  # they are fed a token at a time

    def __init__(self, model: Any, kind: str) -> None:
        if importlib.util.find_spec("llama_cpp") is None:
            raise MissingExtraError("the engine 'llama.cpp'", "llama-cpp")
        if model.device.type != "cpu":
            raise UsageError("llama.cpp is measured on CPUs only: give --device cpu, or leave it out of --engines")
        import llama_cpp

        super().__init__(model, name=f"llama.cpp-{kind}")
        self.weights = kind
        self.arithmetic = "w8a8" if kind.startswith("q") else self.arithmetic
        self._library: Any = llama_cpp
        self._engine: tuple[int, _LlamaCppEngine] | None = None
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

    def engine(self, schedule: Schedule | None = None, *, max_rows: int = 8, **ignored: Any) -> Engine:
        """One engine for all runs of so many sequences, whose prompts are computed once."""
        if self._engine is None or self._engine[0] != max_rows:
            self.close()
            sizes = self.model.config.vocab_size, self.num_layers
            self._engine = max_rows, _LlamaCppEngine(self._library, self._weights, *sizes, max_rows)
        return self._engine[1]

    def step_bytes(self, rows: int) -> StepBytes:
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return StepBytes(self._sizes.head, self._sizes.layer, 2 * 2 * config.num_key_value_heads * head_dim)  # f16

    def close(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
        self._engine = None


# ---------------------------------------------------------------------- vLLM


class _VllmEngine(BatchEngine):
    """vLLM's offline `LLM`. Its decode steps cannot be timed apart from prompts, so their time is a difference: that of
    a whole run less that of a run for one token a sequence; the tokens between are spread evenly.
    """

    name = "vllm"

    def __init__(self, llm: Any, num_layers: int, max_rows: int) -> None:
        super().__init__(num_layers, max_rows)
        self._llm = llm

    def _generate(self, requests: list[Request]) -> list[list[TimedToken]]:
        start = time.perf_counter()
        self._tokens(requests, 1)
        first = time.perf_counter()
        rows = self._tokens(requests, max(request.max_new_tokens for request in requests))
        step = (time.perf_counter() - first - (first - start)) / max(1, max(map(len, rows)) - 1)
        return [[(token, first + place * step) for place, token in enumerate(row)] for row in rows]

    def _tokens(self, requests: list[Request], new: int) -> list[list[int]]:
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        return [list(each.outputs[0].token_ids) for each in self._llm.generate(prompts, settings, use_tqdm=False)]


class VllmBackend(Backend):
    """vLLM. Raises UsageError where it is not installed."""

    runs_schedules = False
    times_prompts = False
    warms_up = True

    def __init__(self, model: Any) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UsageError("the engine 'vllm' needs vLLM, which is not installed: leave it out of --engines")
        from vllm import LLM

        super().__init__(model, name="vllm")
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        options: dict[str, Any] = {"dtype": self.weights, "enable_prefix_caching": False, "seed": 0}
        if model.device.type == "cuda":
            # Its share is of all memory, and must be free: the other engines have their weights there already.
            free, total = torch.cuda.mem_get_info(model.device)
            options["gpu_memory_utilization"] = 0.6 * free / total
        self._llm = LLM(self._folder.name, skip_tokenizer_init=True, **options)

    def engine(self, schedule: Schedule | None = None, *, max_rows: int = 8, **ignored: Any) -> Engine:
        return _VllmEngine(self._llm, self.num_layers, max_rows)

    def close(self) -> None:
        self._folder.cleanup()


# ---------------------------------------------------------------------- the command


@dataclass(frozen=True, kw_only=True)
class Config(bench.Config):
    """The options of `skipdecode bench`, with more engines."""

    engines: tuple[str, ...] = option(
        "the package's own and the ones above", default=("fast", "transformers"), choices=(*ENGINES, *RIVALS)
    )


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, Config)
    try:
        config = config_from(Config, parser.read(sys.argv[1:]))
        with quiet(), claimed(config):
            return bench.run(config, open_rival)
    except SkipDecodeError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
