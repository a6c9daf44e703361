"""Depth by difficulty at equal measured time: static, random, router, confident and oracle, on a mixture and each task.

One model, one engine, one process. A job is all requests of a part, in batches of --batch, under one depth or method.
First every job runs to the texts' own ends: these texts are scored. Then all jobs are run once a round in turning
order, with outputs as long as the references, so that all do the same work; a job's time is the median over rounds. The
oracle is given the depth of each record's least loss + penalty x time on these very records, and its requests are
submitted as a job for each depth. *Static* at a method's measured time is the mix by lot of the two depths with the
least loss there, *random* the router's mix: their scores and times are those of the depths, mixed. Gains are method -
static, with 95% intervals over draws of records, static at the method's time in each.

    python benchmarks/adaptive.py --model CHECKPOINT --router router/router.json --targets 1.8 2.2 \
        --data e2e=e2e/test.jsonl benchmarks/tasks/tldr.yaml=tldr/test.jsonl \
        benchmarks/tasks/cnn_dm.yaml=cnn_dm/test.jsonl --out results/adaptive-smollm2-135m.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skipdecode.calibration.adaptive import priced, static_shares
from skipdecode.common.environment import environment
from skipdecode.common.kinds import heading
from skipdecode.data.prompts import encode_prompts, response_ids
from skipdecode.data.source import load_records
from skipdecode.data.tasks import load_task
from skipdecode.engine import Request
from skipdecode.engine.adaptive import Adaptive, Router
from skipdecode.engine.base import Engine
from skipdecode.engine.opening import EngineSource, end_tokens, open_engines
from skipdecode.evaluation.metrics import check_metrics, make_metrics
from skipdecode.evaluation.scores import scorer_of
from skipdecode.evaluation.settings import MetricOptions
from skipdecode.evaluation.teacher_forced import reference_loss
from skipdecode.models.loading.hub import load_model
from skipdecode.schedule import Schedule

Tables = dict[str, Any]
"""Rows of statistics of each record, by metric; `layers` are (layers of fed tokens, fed tokens)."""


class Row(NamedTuple):
    """A record."""

    task: str
    prompt: list[int]
    reference: list[int]
    references: tuple[str, ...]
    new: int


class Bench:
    """The records, and what decodes and scores them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        loaded = load_model(options.model, dtype=options.dtype)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.router = Router.load(Path(options.router))
        self.router.check(self.model)
        self.ends = frozenset(end_tokens(self.model, self.tokenizer))
        self.tasks = {Path(name).stem: load_task(name) for name, _ in options.data}
        self.rows = [row for name, path in options.data for row in self._rows(Path(name).stem, path)]
        self.examples: list[dict[str, Any]] = []
        metric = MetricOptions(bertscore_model=options.bertscore_model)
        self.metrics = make_metrics(check_metrics(options.metrics, metric, tell), metric)
        self.losses = [self._losses(depth) for depth in self.router.depths]  # before the engine fuses weights
        self.source: EngineSource = open_engines(self.model, "auto", tell)

    def _rows(self, name: str, path: str) -> list[Row]:
        task = self.tasks[name]
        found = load_records(task, path).limited(self.options.limit)
        records, prompts = encode_prompts(task.template(), found, self.tokenizer)
        first = response_ids([record.references[0] for record in records.items], self.tokenizer)
        rows = zip(records.items, prompts, first, strict=True)
        return [
            Row(name, p, ids[: task.max_new_tokens], tuple(r.references), task.max_new_tokens) for r, p, ids in rows
        ]

    def _losses(self, depth: Schedule) -> Any:
        size, found = 16, np.zeros((len(self.rows), 2))
        order = sorted(range(len(self.rows)), key=lambda i: len(self.rows[i].prompt))
        for part in (order[i : i + size] for i in range(0, len(order), size)):
            rows = [self.rows[i] for i in part]
            given = [row.prompt for row in rows], [row.reference for row in rows]
            found[part] = reference_loss(self.model, depth, *given)["loss"]
        return found

    def engine(self, schedule: Schedule) -> Engine:
        return self.source.engine(schedule, max_rows=self.options.batch)

    def job(self, jobs: list[tuple[Schedule, list[int]]], *, timed: bool) -> tuple[float, dict[int, Any]]:
        """Seconds of jobs one after the other, and of each record its tokens and the layers of those that were fed.

        Texts go on to their own ends; `timed`, to the lengths of the references.
        """
        seconds, found = 0.0, {}
        for schedule, part in jobs:
            if not part:
                continue
            engine = self.engine(schedule)
            rows = [self.rows[i] for i in part]
            ends = frozenset[int]() if timed else self.ends
            requests = [Request(tuple(r.prompt), len(r.reference) if timed else r.new, stop_ids=ends) for r in rows]
            numbers = engine.submit(requests)
            where, start = dict(zip(numbers, part, strict=True)), time.perf_counter()
            got: dict[int, tuple[list[int], list[int]]] = {i: ([], []) for i in part}
            while engine.has_work:
                for out in engine.step():
                    tokens, layers = got[where[out.request]]
                    tokens.append(out.token)
                    layers.append(out.layers)
            seconds += time.perf_counter() - start
            found |= {i: (tokens, layers[1:]) for i, (tokens, layers) in got.items()}
        return seconds, found

    def text(self, record: int, tokens: list[int]) -> str:
        """What is scored of a record's tokens."""
        return self.tasks[self.rows[record].task].cut(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def tables(self, part: list[int], found: dict[int, Any], losses: Any) -> Tables:
        """Statistics of a job's records; `losses` (records, 2) of the part, None where no depth is a record's."""
        texts = [self.text(i, found[i][0]) for i in part]
        references = [self.rows[i].references for i in part]
        tables = {metric.name: metric.statistics(texts, references) for metric in self.metrics}
        layers = np.array([[sum(found[i][1]), len(found[i][1])] for i in part], dtype=float)
        return tables | {"layers": layers} | ({} if losses is None else {"loss": losses})


def tell(line: str) -> None:
    """To the terminal, beside the result."""
    print(line, file=sys.stderr)


def mixed(tables: list[Tables], shares: Any) -> Tables:
    """Expected statistics of records under depths given out by lot."""
    return {name: sum(share * table[name] for share, table in zip(shares, tables, strict=True)) for name in tables[0]}


def entry(task: str, method: str, tables: Tables, seconds: float, full: float, **more: Any) -> dict[str, Any]:
    """A run of the result."""
    layers = tables["layers"].sum(0)
    scores = {n: float(scorer_of(n)(t.sum(0))) for n, t in tables.items() if n != "layers"}
    about = {"task": task, "method": method, "n": len(tables["layers"]), "seconds": seconds}
    return about | {"request_speedup": full / seconds, "mean_layers": layers[0] / layers[1]} | scores | more


class Static(NamedTuple):
    """What a method is compared with: of each depth statistics, and of each record and depth loss and seconds."""

    pure: list[Tables]
    losses: Any
    seconds: Any

    def gains(self, method: Tables, seconds: Any) -> dict[str, Any]:
        """Method - static, by metric: estimate and bounds; in each draw of records static takes the method's time."""
        n = len(seconds)
        drawn = np.vstack([np.ones(n), np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=1000)])
        each = zip(drawn @ self.losses, drawn @ self.seconds, drawn @ seconds, strict=True)
        shares = np.array([static_shares(*values) for values in each])
        found = {}
        for name in method.keys() - {"layers"}:
            score = scorer_of(name)
            static = sum(shares[:, [d]] * (drawn @ tables[name]) for d, tables in enumerate(self.pure))
            pairs = zip(drawn @ method[name], static, strict=True)
            values = [float(score(ours) - score(theirs)) for ours, theirs in pairs]
            found[name] = [values[0], *map(float, np.quantile(values[1:], (0.025, 0.975)))]
        return found


def part_runs(bench: Bench, task: str, part: list[int]) -> list[dict[str, Any]]:
    """All methods on the records of one part."""
    depths, rounds = bench.router.depths, bench.options.rounds
    full = Schedule.full(depths[0].num_layers)
    jobs: dict[str, list[tuple[Schedule, list[int]]]] = {"full": [(full, part)]}
    jobs |= {f"depth {n}": [(depth, part)] for n, depth in enumerate(depths)}
    jobs["confident"] = [(Adaptive.choosing(bench.router, "confident"), part)]
    for target in bench.options.targets:
        jobs[f"adaptive {target:g}"] = [(Adaptive.choosing(bench.router, "adaptive", speedup=target), part)]
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    outputs: dict[str, dict[int, Any]] = {}
    measure(bench, jobs, taken, outputs, rounds)
    losses = np.stack([bench.losses[d][part] for d in range(len(depths))])
    pure = [bench.tables(part, outputs[f"depth {n}"], losses[n]) for n in range(len(depths))]
    seconds = np.array([statistics.median(taken[f"depth {n}"]) for n in range(len(depths))])
    # A record's share of a depth's time: what it takes beyond the shallowest goes by its tokens.
    sums, tokens = losses[:, :, 0].T, losses[0, :, 1:]
    prices = (seconds.min() + (seconds - seconds.min()) * tokens / tokens.mean()) / len(part)
    static, whole = Static(pure, sums, prices), statistics.median(taken["full"])
    runs = [entry(task, "static", t, s, whole, depth=d.name) for t, s, d in zip(pure, seconds, depths, strict=True)]
    oracles = {}
    for target in bench.options.targets:
        limit = max(seconds.min(), statistics.median(taken[f"adaptive {target:g}"]))
        choice, _ = priced(sums, prices, prices, limit)
        oracles[f"oracle {target:g}"] = [
            (depth, [i for i, c in zip(part, choice, strict=True) if c == n]) for n, depth in enumerate(depths)
        ]
    taken |= {name: [] for name in oracles}
    measure(bench, oracles, taken, outputs, rounds)
    for name in (*(n for n in jobs if n.split()[0] in ("adaptive", "confident")), *oracles):
        took, found = statistics.median(taken[name]), outputs[name]
        depth_of = [_depth(bench, outputs, i, found[i]) for i in part]
        known = None if name == "confident" else np.stack([losses[d, r] for r, d in enumerate(depth_of)])
        tables = bench.tables(part, found, known)
        shares = static_shares(sums.sum(0), seconds, took)
        own = prices[np.arange(len(part)), depth_of]  # a confident row's as if it had stayed at its first depth
        chosen = Counter(depths[d].name for d in depth_of)
        more = {"target": float(name.split()[1]) if " " in name else bench.router.speedup, "chosen": chosen}
        runs.append(entry(task, "router" if name[0] == "a" else name.split()[0], tables, took, whole, **more))
        ran = Counter(round(statistics.mean(found[i][1])) for i in part if found[i][1])
        against = static.gains(tables, own * took / own.sum())
        runs[-1] |= {"against_static": against, "static_at_its_time": shares.tolist(), "depths": ran}
        if name[0] == "a" and not bench.examples:
            deep_first = sorted(part, key=lambda i: -statistics.mean(found[i][1] or [0]))
            bench.examples = [example(bench, i, found[i]) for i in (*deep_first[:4], *deep_first[-4:])]
        if name[0] == "a":
            lot = np.array([chosen[d.name] for d in depths]) / len(part)
            drawn, takes = mixed(pure, lot), float(np.dot(lot, seconds))
            runs.append(entry(task, "random", drawn, takes, whole, target=more["target"]))
            runs[-1]["against_static"] = static.gains(drawn, prices @ lot)
    return runs


def example(bench: Bench, record: int, found: Any) -> dict[str, Any]:
    """A record and its text, for readers."""
    row, (tokens, layers) = bench.rows[record], found
    named = f"{row.task}, {statistics.mean(layers or [0]):.0f} layers"
    texts = {"reference": row.references[0], named: bench.text(record, tokens)}
    return {"prompt": bench.tokenizer.decode(row.prompt), "texts": texts}


def _depth(bench: Bench, outputs: dict[str, dict[int, Any]], record: int, found: Any) -> int:
    """The depth that a record's layers are those of; of a confident row its first."""
    first = found[1][0] if found[1] else bench.router.depths[-1].budget(0)
    return next(n for n, depth in enumerate(bench.router.depths) if depth.budget(0) == first)


def measure(bench: Bench, jobs: Any, taken: Any, outputs: Any, rounds: int) -> None:
    """Each job once for its texts, which warms up too; then once a round by the references' lengths, in turn."""
    names = list(jobs)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds, found = bench.job(jobs[name], timed=number > 0)
            tell(f"round {number}: {name}: {seconds:.2f} s")
            if number:
                taken[name].append(seconds)
            else:
                outputs[name] = found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--router", required=True)
    parser.add_argument(
        "--data", nargs="+", required=True, type=lambda text: tuple(text.split("=", 1)), metavar="TASK=FILE"
    )
    parser.add_argument(
        "--targets", nargs="+", type=float, required=True, help="speed-ups of requests, in the router's reach"
    )
    parser.add_argument("--limit", type=int, default=100, help="records of each task")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--metrics", nargs="+", default=["rougeL", "bertscore_f1"])
    parser.add_argument("--bertscore-model", default="minilm")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    bench = Bench(options)
    parts = {"mixture": list(range(len(bench.rows)))} if len(bench.tasks) > 1 else {}
    parts |= {task: [i for i, row in enumerate(bench.rows) if row.task == task] for task in bench.tasks}
    runs = [run for task, part in parts.items() for run in part_runs(bench, task, part)]
    figures = json.loads(Path(options.router).read_text())["figures"]
    document = {
        **heading("adaptive"),
        "options": vars(options),
        "environment": environment(),
        "oracle": figures["oracle"],
        "calibration": figures["runs"],
        "runs": runs,
        "examples": bench.examples,
    }
    Path(options.out).write_text(json.dumps(document, indent=1) + "\n")
    for run in runs:
        tell(json.dumps({name: run.get(name) for name in ("task", "method", "request_speedup", "loss", "rougeL", "n")}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
