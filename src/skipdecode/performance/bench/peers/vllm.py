"""vLLM as a peer, at full depth, where it is installed; its processor and thread settings are the user's."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from typing import Any

import torch

from skipdecode.errors import UsageError
from skipdecode.performance.bench.peers import Peer
from skipdecode.schedule import Schedule

__all__ = ["VllmPeer"]

_SHARE_OF_FREE = 0.6  # of a GPU's memory


class VllmPeer(Peer):
    """vLLM's offline `LLM`. Decode steps cannot be timed apart from prompts, so their time is a difference: that of a
    whole run less that of a run for one token a row. Raises UsageError where vLLM is not installed.
    """

    name = "vllm"

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

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self._prompts = [{"prompt_token_ids": [5] * prompt} for _ in range(batch)]
        self._new = new
        self._run(new)

    def decode_seconds(self, schedule: Schedule) -> float:
        return self._run(self._new) - self._run(1)

    def close(self) -> None:
        self._folder.cleanup()

    def _run(self, new: int) -> float:
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self._llm.generate(self._prompts, settings, use_tqdm=False)
        return time.perf_counter() - start
