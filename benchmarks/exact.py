"""Drafts against one token a forward: whether any token differs, and what they gain on this machine.

    python benchmarks/exact.py MODEL --tasks humaneval --out results/exact-qwen2.5-coder-0.5b.json --minutes 60

At full depth, or under `--schedule`. The requests of a task are decoded with and without drafts in turn, `ROUNDS`
times, in batches of each size, and all tokens are compared. Drafts come from the text and from earlier answers of the
same round. `request_speedup` is the median over rounds of the ratio of the seconds of whole requests. At batch 1 with
bf16 weights, transformers decodes the first `FEW` too, plain and with prompt lookup: `others` are our time without
drafts over theirs.

The result file is written after each row, and rows that it has are not measured again. After `--minutes` no new row
starts, and the same command continues. Nothing else should run while times are taken.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import humaneval
from shared import TASKS as TASK_FILES
from shared import script_parser, write_result
from speed import opened

from skipdecode import LLM
from skipdecode.common.jsonl import read_result
from skipdecode.engine.base import EngineStats
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.requests import Request
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.hub import load_model

BATCHES = (1, 4, 8, 32)
ROUNDS, FEW = 3, 4
NEW_TOKENS = {"e2e": 60, "chat": 128, "humaneval": 384}
REQUESTS = {1: 16, 4: 16, 8: 24, 32: 128}
OTHERS = ("transformers", "prompt-lookup")


def prompts_of(task: str, data: Path | None) -> list[Any]:
    """The prompts of a task, for `LLM.encode`."""
    if task == "humaneval":
        asked = [humaneval.ASK.format_map(one) for one in humaneval.problems()]
    elif task == "chat":
        asked = (TASK_FILES / "chat_prompts.txt").read_text(encoding="utf-8").splitlines()
    else:
        if data is None:
            raise SystemExit("exact: the task e2e needs --data, a directory of e2e/test.jsonl")
        lines = (data / "e2e" / "test.jsonl").read_text(encoding="utf-8").splitlines()
        found = list(dict.fromkeys(json.loads(line)["mr"] for line in lines))
        return [{"mr": text} for text in found[:: max(1, len(found) // REQUESTS[32])]]  # sorted by name and length
    return [[{"role": "user", "content": text}] for text in asked]


def measured(llm: LLM, prompts: Sequence[tuple[int, ...]], new_tokens: int, batch: int) -> dict[str, Any]:
    """Speed-up, acceptance, and tokens that differ, of the requests in batches of one size."""
    rounds: list[dict[bool, EngineStats]] = []
    tokens = different = 0
    schedule = llm.schedule_of(None)
    for turn in range(-1, ROUNDS):
        stats, texts = {}, {}
        for exact in (turn % 2 == 0, turn % 2 != 0):
            engine = FastEngine(llm.backend.fast, schedule, max_rows=batch)
            options: dict[str, Any] = {"stop_ids": llm._ends, "exact": exact, "cache_salt": f"{batch} {turn}"}
            most = new_tokens if turn >= 0 else 8  # the first turn warms up
            texts[exact] = engine.decode(
                [Request(prompt, most, **options) for prompt in prompts[: None if turn >= 0 else batch]]
            )
            stats[exact] = engine.stats
        if turn >= 0:
            rounds.append(stats)
            for ours, theirs in zip(texts[True], texts[False], strict=True):
                tokens += len(theirs.tokens)
                different += sum(a != b for a, b in zip(ours.tokens, theirs.tokens, strict=False))
                different += abs(len(ours.tokens) - len(theirs.tokens))
    drafts = [stats[True] for stats in rounds]
    drafted, accepted = (sum(getattr(s, f"{name}_tokens") for s in drafts) for name in ("drafted", "accepted"))
    steps = sum(s.fed_tokens for s in drafts) - accepted
    return {
        "requests": len(prompts),
        "tokens": tokens,
        "different": different,
        "request_speedup": statistics.median(s[False].step_seconds / s[True].step_seconds for s in rounds),
        "request_speedups": [s[False].step_seconds / s[True].step_seconds for s in rounds],
        "decode_speedup": statistics.median(s[False].decode_seconds / s[True].decode_seconds for s in rounds),
        "acceptance": accepted / drafted if drafted else None,
        "gamma": drafted / steps if steps else 0.0,
        "full_tokens_per_s": statistics.median(s[False].new_tokens / s[False].step_seconds for s in rounds),
        "others": {},
    }


def against_others(llm: LLM, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> dict[str, float]:
    """The time of our plain full depth over each of `OTHERS`, requests one after another."""
    engine = FastEngine(llm.backend.fast, llm.schedule_of(None), max_rows=1)
    engine.decode([Request(p, new_tokens, stop_ids=llm._ends, exact=False) for p in prompts])
    model, found = merge_adapter(load_model(llm.loaded.checkpoint.name, dtype="bfloat16").model), {}
    for name in OTHERS:
        method = opened(name, model)
        done = [method.generate([p], max_new_tokens=new_tokens, eos=set(llm._ends)) for p in prompts]
        found[name] = engine.stats.step_seconds / sum(each.prompt_seconds + each.decode_seconds for each in done)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write; returns 0, or 1 where rows are left."""
    parser = script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, help="directory of e2e/, for the task e2e")
    parser.add_argument("--schedule", default="full")
    parser.add_argument("--tasks", nargs="+", default=["chat"], choices=list(NEW_TOKENS))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, choices=BATCHES)
    parser.add_argument("--quantization", nargs="+", default=["none", "w8a8"])
    parser.add_argument("--minutes", type=float, default=60, help="after which no new row is begun (default: 60)")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = read_result(options.out, "benchmark")["rows"] if options.out.exists() else []
    for quantization in options.quantization:
        llm = LLM(options.model, schedule=options.schedule, dtype="bfloat16", quantization=quantization)
        for task in options.tasks:
            prompts = [tuple(prompt.token_ids) for prompt in llm.encode(prompts_of(task, options.data))]
            for batch in options.batches:
                about = {"model": Path(options.model).name, "schedule": options.schedule, "task": task}
                about |= {"quantization": quantization, "batch": batch}
                if any(about.items() <= row.items() for row in rows):
                    continue
                if time.monotonic() > deadline:
                    return 1
                some, most = prompts[: REQUESTS[batch]], NEW_TOKENS[task]  # none twice: its answer would be drafted
                row = about | measured(llm, some, most, batch)
                if batch == 1 and quantization == "none":
                    row["others"] = against_others(llm, some[:FEW], most)
                rows.append(row)
                print(json.dumps(row), flush=True)
                totals = {name: sum(row[name] for row in rows) for name in ("tokens", "different")}
                write_result(options.out, "exact", {**totals, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
