"""The exact 8-bit head: that its tokens are the full head's, how often it does not suffice, and what it gains.

`same`: records of E2E with its bundled adapter and chat prompts with the other one are decoded at full depth and under
schedules; wherever the copy has decided, the full head computes all logits of the same state, and the tokens are
compared. With int8 weights the head has 8 bits anyway and there is no copy: rows_decided is 0.
`speed`: decoding alone, with and without the copy in turn, of E2E's records.

    python benchmarks/head.py --data e2e/test.jsonl --out results/head-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared import TASKS, e2e_prompts, script_parser, write_result
from tqdm import tqdm

from skipdecode import Schedule
from skipdecode.common.bootstrap import Stopwatch
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kernels.native import greedy
from skipdecode.engine.opening import end_tokens, open_fast
from skipdecode.models.loading.hub import load_model


class Compared:
    """Stands before a model's head; where the 8-bit copy has decided, the full head says what it would have."""

    def __init__(self, fast: Any) -> None:
        self._head = fast.head
        self.words: list[int] = []
        self.forwards = self.fallbacks = self.different = 0

    def __call__(self, hidden: Any, tops: list[int] | None = None) -> Any:
        found = self._head(hidden, tops)
        self.fell_back = self._head.fell_back
        if isinstance(found, Candidates):
            logits = self._head(hidden)
            self.different += sum(a != b for a, b in zip(greedy(logits)[0], found.best, strict=True))
            self.words += found.counts
        self.forwards += isinstance(found, Candidates) or self.fell_back
        self.fallbacks += self.fell_back
        return found


def chat_prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts of a chat."""
    texts = (TASKS / "chat_prompts.txt").read_text(encoding="utf-8").splitlines()
    turns = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]


def jobs(prompts: list[list[int]], chosen: list[Schedule], batch: int) -> Iterator[tuple[Schedule, list[list[int]]]]:
    """Batches of prompts under one schedule after the other, each prompt once under each."""
    starts = range(0, len(prompts), batch)
    for turn in range(len(chosen)):
        for number, start in enumerate(starts):
            yield chosen[(number + turn) % len(chosen)], prompts[start : start + batch]


def same(options: argparse.Namespace, name: str, quantization: str, steps: int) -> dict[str, Any]:
    """`steps` generated tokens, each the full head's."""
    loaded = load_model(f"{name}-smollm2-135m", dtype="bfloat16")
    fast: Any = open_fast(loaded.model, "fast", print, quantization)
    prompts = e2e_prompts(options.data, loaded.tokenizer) if name == "e2e" else chat_prompts(loaded.tokenizer)
    chosen = list(loaded.recipe.tuned_under)
    ends = end_tokens(loaded.model, loaded.tokenizer)
    fast.head = compared = Compared(fast)
    done, bar = 0, tqdm(total=steps, desc=f"{name}, {quantization}", unit="step")
    for schedule, texts in itertools.cycle(jobs(prompts, chosen, options.batch)):
        engine = FastEngine(fast, schedule, max_rows=options.batch)
        engine.decode([Request(tuple(text), options.new, stop_ids=ends) for text in texts])
        done += engine.stats.new_tokens
        bar.update(engine.stats.new_tokens)
        if done >= steps:
            break
    bar.close()
    counts = compared.words
    return {
        "data": name,
        "quantization": quantization,
        "steps": done,
        "rows_decided": len(counts),
        "different": compared.different,
        "forwards_asked": compared.forwards,
        "fallbacks": compared.fallbacks,
        "fallback_share": compared.fallbacks / compared.forwards if compared.forwards else None,
        "mean_candidates": statistics.fmean(counts) if counts else None,
        "max_candidates": max(counts, default=None),
    }


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decoding with and without the copy."""
    loaded = load_model("e2e-smollm2-135m", dtype="bfloat16")
    fast: Any = open_fast(loaded.model, "fast", print)
    prompts, rows = e2e_prompts(options.data, loaded.tokenizer), []
    for batch, nominal in itertools.product((1, 32), (1.0, 5.0)):
        schedule = loaded.schedule.with_speedup(nominal)
        requests = [Request(tuple(text), 41) for text in prompts[: options.speed_rows * (1 if batch == 1 else 8)]]
        watch, tokens = Stopwatch[bool, float]((False, True)), dict[bool, list[list[int]]]()

        def lap(
            on: bool, schedule: Any = schedule, batch: int = batch, asked: Any = requests, said: Any = tokens
        ) -> float:
            fast.head.short_from = 0 if on else math.inf
            engine = FastEngine(fast, schedule, max_rows=batch)
            said[on] = [row.tokens for row in engine.decode(asked)]
            return engine.stats.decode_seconds / engine.stats.steps

        lap(True), lap(False)
        for _ in range(options.rounds):
            watch.lap(lap)
        rows.append(
            {
                "batch": batch,
                "nominal_speedup": nominal,
                "full_head_ms": 1000 * watch.seconds(False, float),
                "ms": 1000 * watch.seconds(True, float),
                "gain": watch.ratio(False, True, float),
                "gains": [full / short for full, short in zip(watch.laps(False), watch.laps(True), strict=True)],
                "same_tokens": tokens[True] == tokens[False],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="E2E records (JSONL)")
    parser.add_argument("--steps", type=int, default=100_000, help="generated tokens that are compared")
    parser.add_argument("--new", type=int, default=128, help="most tokens of a text")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="of the timing; medians count")
    parser.add_argument(
        "--speed-rows", type=int, default=16, help="records that are timed (8 times as many in a batch)"
    )
    options = parser.parse_args()
    timed = speed(options)
    runs = [(name, kind) for name in ("e2e", "chat") for kind in ("none", "int8")]
    found = []
    for name, kind in runs:
        # Without a copy there is little to compare.
        found.append(same(options, name, kind, options.steps // 2 if kind == "none" else options.steps // 20))
        print(json.dumps(found[-1]), flush=True)
    write_result(options.out, "head", {"same": found, "speed": timed}, options)


if __name__ == "__main__":
    main()
