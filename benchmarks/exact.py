"""Exact decoding against plain full depth: whether any token differs, and what it gains on this machine.

    python benchmarks/exact.py --data DATA --cnn-dm CHECKPOINT --out results/exact-smollm2-135m.json --minutes 4

DATA has e2e/test.jsonl and cnn_dm/test.jsonl. CHECKPOINT carries the schedule that drafts; at full depth drafts are
from the text alone (`benchmarks/ready.py` tunes WORK/cnn_dm-full-a).

Part `compared`: every sequence drafts `DRAFTS` tokens at every step, whether that pays or not, in batches of each size.
Each text is compared with the text of the same prompt alone at full depth. Part `rows`: times of the requests of a
batch, plain and exact in turn, where the planner chooses the number of drafts. `request_speedup` is the median over
rounds of the ratio of the seconds of whole requests. At batch 1, transformers decodes the first `FEW` too: plain, with
prompt lookup, and with drafts of its first third of the layers. `others` are our full depth's request time over theirs.

The result file is written after each piece of work, and pieces that it has are not repeated. After `--minutes` no new
piece starts, and the same command continues. Nothing else should run while times are taken.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared import TASKS as TASK_FILES
from shared import script_parser, write_result
from speed import opened

from skipdecode import LLM
from skipdecode.common.kinds import read_result
from skipdecode.engine.base import EngineStats
from skipdecode.engine.drafts import Drafter, Planner
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.requests import Request
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.hub import load_model
from skipdecode.schedule import Schedule

BATCHES = (1, 2, 4, 8, 32)
DRAFTS = 3
GROUP = 32  # prompts of a piece of the comparison
ROUNDS, REQUESTS, FEW = 3, 16, 4


class Task(NamedTuple):
    """A checkpoint, the one of its schedules that drafts, most new tokens, and number of prompts to compare."""

    checkpoint: str
    schedule: str | None
    new_tokens: int
    compared: int


TASKS = {
    "e2e": Task("e2e-smollm2-135m", "e2e-5x", 60, 160),
    "chat": Task("chat-smollm2-135m", "chat-1.5x", 128, 48),
    "cnn_dm": Task("", None, 96, 32),  # of --cnn-dm, under its own schedule
}
OTHERS = ("transformers", "prompt-lookup", "early-exit")


class Always(Planner):
    """Drafts at every step."""

    least_logprob = -math.inf

    def plan(self, rows: int, drafters: Sequence[Drafter]) -> list[int]:
        for drafter in drafters:
            drafter.runs = not drafter.found
        return [min(DRAFTS, drafter.room) for drafter in drafters]


class Side:
    """A task's checkpoint on the fast engine, and its prompts."""

    def __init__(self, name: str, quantization: str, options: Namespace) -> None:
        self.task = TASKS[name]
        checkpoint = self.task.checkpoint or str(options.cnn_dm)
        self.llm = LLM(checkpoint, schedule=self.task.schedule, dtype="bfloat16", quantization=quantization)
        if name == "chat":
            lines = (TASK_FILES / "chat_prompts.txt").read_text(encoding="utf-8").splitlines()
            prompts: list[Any] = [[{"role": "user", "content": line}] for line in lines]
        else:
            lines = (options.data / name / "test.jsonl").read_text(encoding="utf-8").splitlines()
            field = {"e2e": "mr", "cnn_dm": "article"}[name]
            prompts = [{field: text} for text in dict.fromkeys(json.loads(line)[field] for line in lines)]
            prompts = prompts[:: max(1, len(prompts) // self.task.compared)]  # E2E's are sorted by name and length
        self.prompts = [tuple(prompt.token_ids) for prompt in self.llm.encode(prompts)]

    @functools.cached_property
    def plain(self) -> Any:
        """The weights for transformers, an adapter merged into them."""
        return merge_adapter(load_model(self.llm.loaded.name, dtype="bfloat16").model)

    def requests(self, prompts: Sequence[tuple[int, ...]], *, exact: bool) -> list[Request]:
        """A request for each prompt."""
        return [Request(p, self.task.new_tokens, stop_ids=self.llm._ends, exact=exact) for p in prompts]

    def engine(self, batch: int) -> FastEngine:
        """Of all schedules that drop layers in the order of the one that drafts, full depth too."""
        return FastEngine(self.llm.backend.fast, self.llm.schedule_of(None), max_rows=batch)

    def decode(
        self, batch: int, prompts: Sequence[tuple[int, ...]], *, exact: bool, always: bool = False
    ) -> tuple[list[Any], EngineStats]:
        """Outputs and figures."""
        engine = self.engine(batch)
        if always:
            engine.planner = engine.model.planner = Always()
        schedule = None if exact else Schedule.full(engine.num_layers)
        return engine.decode(self.requests(prompts, exact=exact), schedule=schedule), engine.stats

    def seconds_of(self, name: str, prompts: Sequence[tuple[int, ...]]) -> float:
        """Of all requests, one after another, by one of `OTHERS`."""
        method, size = opened(name, self.plain), {"max_new_tokens": self.task.new_tokens, "eos": set(self.llm._ends)}
        return sum(
            done.prompt_seconds + done.decode_seconds for p in prompts for done in [method.generate([p], **size)]
        )


def compared(side: Side, document: dict[str, Any], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each missing group of prompts and size of batch: tokens, and how many differ from full depth alone."""
    done = {(row["first"], row["batch"]) for row in document["compared"] if about.items() <= row.items()}
    for first in range(0, side.task.compared, GROUP):
        prompts, plain = side.prompts[first : min(first + GROUP, side.task.compared)], None
        for batch in (size for size in BATCHES if (first, size) not in done):
            plain = plain or side.decode(1, prompts, exact=False)[0]
            outputs, stats = side.decode(batch, prompts, exact=True, always=True)
            pairs = [(ours.tokens, theirs.tokens) for ours, theirs in zip(outputs, plain, strict=True)]
            tokens = sum(len(theirs) for _, theirs in pairs)
            same = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False))
            yield about | {
                "first": first,
                "batch": batch,
                "tokens": tokens,
                "different": tokens - same,
                "drafted": stats.drafted_tokens,
                "accepted": stats.accepted_tokens,
            }


def timed(side: Side, document: dict[str, Any], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each size of batch that is missing: request speed-up, acceptance and mean number of drafts of a check."""
    done = {row["batch"] for row in document["rows"] if about.items() <= row.items()}
    for batch in sorted(set(BATCHES) - done):
        count = max(REQUESTS, 2 * batch)
        prompts = (side.prompts * 2)[:count]
        side.decode(batch, prompts, exact=True)  # the planner learns what forwards take
        rounds: list[dict[bool, EngineStats]] = []
        others: dict[str, float] = {}
        if batch == 1 and about["quantization"] == "none":
            few = prompts[:FEW]
            plain = side.decode(1, few, exact=False)[1].step_seconds
            others = {name: plain / side.seconds_of(name, few) for name in OTHERS}
        for turn in range(ROUNDS):
            stats = {exact: side.decode(batch, prompts, exact=exact)[1] for exact in (turn % 2 == 0, turn % 2 != 0)}
            rounds.append(stats)
        exacts = [stats[True] for stats in rounds]
        drafted = sum(s.drafted_tokens for s in exacts)
        accepted = sum(s.accepted_tokens for s in exacts)
        checks = sum(s.verified_tokens for s in exacts) - accepted
        yield about | {
            "batch": batch,
            "requests": count,
            "request_speedup": statistics.median(s[False].step_seconds / s[True].step_seconds for s in rounds),
            "decode_speedup": statistics.median(s[False].decode_seconds / s[True].decode_seconds for s in rounds),
            "others": others,
            "acceptance": accepted / drafted if drafted else None,
            "gamma": drafted / checks if checks else 0.0,
            "new_tokens": exacts[0].new_tokens,
            "drafted": drafted // ROUNDS,
            "full_tokens_per_s": rounds[0][False].new_tokens / rounds[0][False].step_seconds,
            "forward_ms": {
                str(rows): 1e3 * (side.engine(1).planner.checks(rows) or 0.0) for rows in (batch, 2 * batch)
            },
        }


PARTS = {"compared": compared, "rows": timed}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write; returns 0, or 1 where pieces are left."""
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory of e2e/ and cnn_dm/")
    parser.add_argument("--cnn-dm", type=Path, help="checkpoint of CNN/DailyMail; without it the task is left out")
    parser.add_argument("--minutes", type=float, default=60, help="after which no new piece is begun (default: 60)")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    empty: dict[str, Any] = {part: [] for part in PARTS}
    document = read_result(options.out, "benchmark") if options.out.exists() else empty
    for part, task, quantization in (
        (p, t, q) for p in options.parts for t in options.tasks for q in options.quantization
    ):
        about = {"task": task, "quantization": quantization}
        if task == "cnn_dm" and options.cnn_dm is None:
            continue
        for row in PARTS[part](Side(task, quantization, options), document, about):
            document[part].append(row)
            print(part, json.dumps(row), flush=True)
            write(options.out, document)
            if time.monotonic() > deadline:
                print("the time is up: the same command goes on", file=sys.stderr)
                return 1
    return 0


def write(path: Path, document: dict[str, Any]) -> None:
    """The result so far."""
    totals = {name: sum(row[name] for row in document["compared"]) for name in ("tokens", "different")}
    parts = {part: document[part] for part in PARTS}
    about = {"drafts_compared": DRAFTS, "tasks": {name: task._asdict() for name, task in TASKS.items()}}
    write_result(path, "exact", totals | about | parts)


if __name__ == "__main__":
    sys.exit(main())
