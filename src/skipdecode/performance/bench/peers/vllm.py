"""vLLM as a peer, at full depth, where it is installed; its processor and thread settings are the user's."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from typing import Any

import torch

from skipdecode.engine.generate import BatchEngine, TimedToken
from skipdecode.engine.requests import Request
from skipdecode.errors import UsageError
from skipdecode.performance.bench.peers import Peer, Rows
from skipdecode.schedule import Schedule

__all__ = ["VllmPeer"]

_SHARE_OF_FREE = 0.6  # of a GPU's memory


class _VllmEngine(BatchEngine):
    """vLLM's offline `LLM`. Decode steps cannot be timed apart from prompts, so their time is a difference: that of a
    whole run less that of a run for one token a row; the tokens between are spread evenly.
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


class VllmPeer(Peer):
    """vLLM. Raises UsageError where it is not installed."""

    name = "vllm"
    warms = True
    times_prompts = False

    def __init__(self, model: Any) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UsageError("the engine 'vllm' needs vLLM, which is not installed: leave it out of --engines")
        from vllm import LLM

        super().__init__(model)
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        options: dict[str, Any] = {"dtype": self.weights, "enable_prefix_caching": False, "seed": 0}
        if model.device.type == "cuda":
            # Its share is of all memory, and must be free: the other engines have their weights there already.
            free, total = torch.cuda.mem_get_info(model.device)
            options["gpu_memory_utilization"] = _SHARE_OF_FREE * free / total
        self._llm = LLM(self._folder.name, skip_tokenizer_init=True, **options)

    def engine(self, schedule: Schedule, rows: Rows) -> BatchEngine:
        return _VllmEngine(self._llm, self._geometry.num_layers, rows.batch)

    def close(self) -> None:
        self._folder.cleanup()
