"""Tiny checkpoints for vLLM, engines on them, and the transformers path that they must equal token for token."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from skipdecode import Schedule, attach
from tiny import LAYERS, VOCAB, tiny_model

# vLLM's attention on a CPU takes heads of 32 and more.
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# What a type needs beyond these, or in their place.
MORE: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "gpt_oss": {"intermediate_size": 64},
    "granitemoehybrid": {"mamba_d_head": 32, "mamba_n_heads": 8, "mamba_expand": 2},
    "opt": {"word_embed_proj_dim": 128},
    "qwen3_moe": {"head_dim": 32},
    "qwen2": {"use_sliding_window": False},  # vLLM runs none whose layers differ in their window
}


def sizes_of(model_type: str) -> dict[str, Any]:
    config = AutoConfig.for_model(model_type)
    return {name: value for name, value in SIZES.items() if hasattr(config, name)} | MORE.get(model_type, {})


def save_tiny(folder: Path, schedule: Schedule | None, model_type: str = "llama", **changes: Any) -> Any:
    """A tiny checkpoint on disk that carries a schedule; returns the transformers model."""
    model = tiny_model(model_type, **(sizes_of(model_type) | changes))
    if schedule is not None:
        model.config.skipdecode = schedule.to_dict()
    model.save_pretrained(folder)
    return model


def stock_environment() -> dict[str, str]:
    """The environment without what engines of this process have set."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_PP", "VLLM_DIST", "VLLM_USE"))}


def prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def reference(model: Any, schedule: Schedule, texts: list[list[int]], new_tokens: Sequence[int]) -> list[list[int]]:
    """Greedy continuations by transformers with the schedule attached, each text alone."""
    found = []
    with attach(model, schedule), torch.no_grad():
        for text, count in zip(texts, new_tokens, strict=True):
            ids = torch.tensor([text])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
            found.append(out[0, len(text) :].tolist())
    return found


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """An LLM in this process, in fp32; eager unless told otherwise, because compilation takes 10 to 30 s a start."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "block_size": 32,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    llm = LLM(str(folder), **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def generate(llm: Any, texts: list[list[int]], new_tokens: Sequence[int], names: Sequence[str | None] = ()) -> Any:
    """Greedy continuations by vLLM; `names` asks for schedules."""
    from vllm import SamplingParams

    asked = names or [None] * len(texts)
    parameters = [
        SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if name is None else {"skipdecode": name},
        )
        for count, name in zip(new_tokens, asked, strict=True)
    ]
    outputs = llm.generate([{"prompt_token_ids": t} for t in texts], parameters, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def paper(name: str = "skipdecode", **changes: Any) -> Schedule:
    """The paper's schedule for tiny models."""
    values = {"min_exit_layer": 3, "max_exit_layer": 6, "seq_len": 12} | changes
    return Schedule.paper(LAYERS, name=name, **values)


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def pieces_of(llm: Any) -> Any:
    return runner_of(llm).skipping.gates.pieces


def compiled_graphs() -> int:
    """Graphs that Dynamo has traced in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def count_preemptions(llm: Any) -> list[str]:
    """The requests that an engine preempts from here on."""
    scheduler, seen = scheduler_of(llm), []
    preempt = type(scheduler)._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.request_id)
        return preempt(scheduler, request, *args, **kwargs)

    scheduler._preempt_request = counted
    return seen
