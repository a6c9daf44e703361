"""`skipdecode bench` with other engines beside the package's own: vLLM, and transformers with drafts.

vllm: at full depth, where it is installed; its processor and thread settings are the user's. prompt-lookup:
transformers' drafts from the prompt; early-exit: transformers' drafts from the first third of the layers. Drafts take
batches of one, and their speed depends on the text. All options are those of `skipdecode bench`. llama.cpp: see
`quantized.py`.

    python benchmarks/rivals.py smollm2-135m --engines fast prompt-lookup --out result.json
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

import torch

from skipdecode.cli import bench
from skipdecode.cli.arguments import Parser, add_options, config_from
from skipdecode.cli.paths import claimed
from skipdecode.common.options import option
from skipdecode.common.progress import quiet
from skipdecode.engine.base import Engine
from skipdecode.engine.generate import BatchEngine, TimedToken
from skipdecode.engine.opening import Backend, GenerateBackend
from skipdecode.engine.requests import Request
from skipdecode.errors import SkipDecodeError, UsageError
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.performance.bench.measure import open_backend
from skipdecode.performance.bench.workload import ENGINES
from skipdecode.schedule import Schedule

RIVALS = ("vllm", "prompt-lookup", "early-exit")
_DRAFT_TOKENS = 10  # transformers' own example


def open_rival(name: str, model: Any) -> Backend:
    """A backend by one of the names in `RIVALS`, or of the package's own."""
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
