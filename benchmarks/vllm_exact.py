"""Greedy fp32 tokens of the vLLM plugin next to those of transformers under the same schedule, on E2E test prompts.

The model is tuned (the bundled adapter, merged), so that its schedule is one that a user would run and its outputs end
by themselves. Rows of transformers' batches are left-padded and start together; in vLLM they come and go. A first
difference is given with the gap between transformers' two best logits there: rounding decides what is closer than about
1e-4. `metadata_build_s` is the median time of one cut and build of attention metadata.

    VLLM_ENV=~/.cache/skipdecode/vllm-env
    $VLLM_ENV/bin/python benchmarks/vllm_exact.py --data test.jsonl --out results/vllm-exact-smollm2-135m.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from shared import e2e_prompts, script_parser, write_result

from skipdecode import Schedule, attach
from skipdecode.engine import GatedEngine, Request
from skipdecode.engine.opening import end_tokens
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.hub import load_model

Tokens = list[list[int]]


def reference(model: Any, schedule: Schedule, texts: Tokens, ends: list[int], options: Any) -> Tokens:
    """What transformers says."""
    engine = GatedEngine(model, schedule, max_rows=options.batch)
    requests = [Request(tuple(text), options.new_tokens, stop_ids=frozenset(ends)) for text in texts]
    return [row.tokens for row in engine.decode(requests)]


def by_vllm(folder: str, texts: Tokens, ends: list[int], options: Any) -> tuple[Tokens, float]:
    """What vLLM says, and seconds of one build of metadata."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, dtype="float32", max_model_len=512, max_num_seqs=options.batch, block_size=32, skip_tokenizer_init=True
    )
    skipping = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.skipping
    seconds, fill = [], skipping._metadata.fill

    def timed(step: Any, *args: Any) -> None:
        began = time.perf_counter()
        fill(step, *args)
        if step.parts:
            seconds.append((time.perf_counter() - began) / (len(step.parts) * len(skipping._metadata._builders)))

    skipping._metadata.fill = timed
    sampling = SamplingParams(temperature=0, max_tokens=options.new_tokens, stop_token_ids=ends, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": t} for t in texts], sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], statistics.median(seconds)


@torch.inference_mode()
def differences(model: Any, schedule: Schedule, texts: Tokens, expected: Tokens, found: Tokens) -> list[dict[str, Any]]:
    """Prompts whose tokens differ: where first, and how close transformers' two best tokens are there."""
    rows = []
    for number, (text, one, two) in enumerate(zip(texts, expected, found, strict=True)):
        if one == two:
            continue
        at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        with attach(model, schedule):
            ids = torch.tensor([text + one[:at]])
            logits = model(input_ids=ids, use_cache=False, prompt_length=len(text)).logits[0, -1]
        best = logits.topk(2).values
        rows.append({"prompt": number, "position": at, "gap": float(best[0] - best[1])})
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    """What was found."""
    loaded = load_model(options.model, dtype="float32")
    model = merge_adapter(loaded.model)
    schedule = loaded.checkpoint.schedule.with_speedup(options.nominal)
    ends = sorted(end_tokens(model, loaded.tokenizer))
    texts = e2e_prompts(options.data, loaded.tokenizer, options.records)
    # First, because vLLM changes transformers' own classes where it runs a model through them.
    expected = reference(model, schedule, texts, ends, options)
    with tempfile.TemporaryDirectory() as folder:
        model.config.skipdecode = schedule.to_dict()
        model.save_pretrained(folder)
        found, build = by_vllm(folder, texts, ends, options)
    equal = sum(a == b for a, b in zip(expected, found, strict=True))
    differs = differences(model, schedule, texts, expected, found)
    counts = {"prompts": len(texts), "tokens": sum(map(len, expected)), "equal_prompts": equal}
    return counts | {"differences": differs, "metadata_build_s": build}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="e2e-smollm2-135m", help="a model or adapter that carries a schedule")
    parser.add_argument("--data", type=Path, required=True, help="E2E records (JSONL)")
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--nominal", type=float, default=2.0)
    options = parser.parse_args()
    found = run(options)
    write_result(options.out, "vllm-exact", found, options)
    print(f"of {found['prompts']} prompts, {found['tokens']} tokens, equal: {found['equal_prompts']}")
    # Rounding may decide a tie; anything else is an error.
    sys.exit(int(any(d["gap"] > 1e-4 for d in found["differences"])))


if __name__ == "__main__":
    main()
