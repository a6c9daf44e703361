"""Depth by difficulty, learned from records under each of a few depths, and compared with static ones at equal time.

*Oracle*: each record at the depth of least loss + penalty x time, its losses known: what no router exceeds. *Router*:
the same from predicted losses, by ridge regression on what prompts leave, each record predicted without itself.
*Confident*: all begin at the deepest and go on as the moving log-probability rises; a token's loss is taken to depend
on its own depth alone. *Static*: the best depth, or mix of two, that takes as long.

A record's time is its share of a batch that is as deep; within a batch a step takes what its deepest row does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipdecode.calibration.meter import LossMeter
from skipdecode.engine.adaptive import MOVE
from skipdecode.errors import TargetError
from skipdecode.performance.cost import CostModel
from skipdecode.schedule import Schedule

__all__ = [
    "NEVER", "DepthTable", "find_router", "find_thresholds", "follow", "oracle", "penalties", "priced", "routed",
    "static_shares",
]  # fmt: skip

Numbers = NDArray[np.float64]
Choice = NDArray[np.intp]
"""The number of each record's depth."""
NEVER = 1.0
"""A log-probability that is not reached."""
_STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_FOLDS = 10
_TRIALS = 1500
_PRICES = 12
_DRAWS = 1000
_SLACK = 1 + 1e-9


class DepthTable:
    """Records, from a meter for each task, under each of several depths, the deepest first.

    Arrays by record: `losses` and `likely` (log-probability of the likeliest token), (records, depths, tokens), are 0
    beyond a record's end; `sums` of losses, `seconds` of the request and mean `layers`, (records, depths); seconds at
    `full` depth, tokens (`counts`) and `tasks`, (records,); `features`. `costs` are the depths' shares of full time.
    """

    def __init__(self, depths: Sequence[Schedule], meters: Mapping[str, LossMeter], cost: CostModel) -> None:
        self.depths, self.cost = tuple(depths), cost
        found = [(task, record) for task, meter in meters.items() for record in meter.records(depths)]
        self.tasks = np.array([task for task, _ in found])
        self.features: Numbers = np.array([record["features"] for _, record in found])
        lengths = [len(record["losses"][0]) for _, record in found]
        self.counts: Numbers = np.array(lengths, dtype=float)
        padded = np.zeros((2, len(found), len(depths), max(lengths)))
        for row, (_, record) in enumerate(found):
            padded[:, row, :, : lengths[row]] = record["losses"], record["likely"]
        padded[:, :, 1:, 0] = padded[:, :, :1, 0]  # the first token comes before the choice
        self.losses, self.likely = padded
        self.sums: Numbers = self.losses.sum(-1)
        every = [*depths, Schedule.full(cost.num_layers)]
        sizes = [(record["prompt"], max(2, length)) for (_, record), length in zip(found, lengths, strict=True)]
        self.prompts = np.array([prompt for prompt, _ in sizes])
        cached = range(max(map(sum, sizes)) + 1)  # tokens that a layer reads
        self.layer_seconds = np.array([cost.step_seconds(1, n) - cost.step_seconds(0, n) for n in cached])
        taken = np.array([[cost.request_seconds(each, *size) for each in every] for size in sizes]) / cost.batch
        self.seconds, self.full = taken[:, :-1], taken[:, -1]
        self.costs: Numbers = self.seconds.sum(0) / self.full.sum()
        self.layers: Numbers = np.array([[each.mean_budget(size[1] - 1) for each in depths] for size in sizes])

    def limit(self, speedup: float) -> float:
        """Seconds of all records at a speed-up; raises TargetError out of reach."""
        if speedup * self.costs.min() > _SLACK:
            raise TargetError(
                f"a speed-up of {speedup:g} is out of reach: the shallowest depth has {1 / self.costs.min():.2f}x here"
            )
        return float(self.full.sum() / speedup)

    def chosen(self, method: str, choice: Choice) -> list[dict[str, Any]]:
        """`compare` of a depth for each record."""
        rows = np.arange(len(choice))
        return self.compare(method, *(each[rows, choice] for each in (self.sums, self.seconds, self.layers)))

    def compare(self, method: str, losses: Numbers, seconds: Numbers, layers: Numbers) -> list[dict[str, Any]]:
        """Summed losses, seconds and mean layers of each record against static ones: of all, and of each task's.

        Losses are nats a token; `gain` is how much more static loses, `low` to `high` in 95% of bootstrap draws, static
        in each as fast as the method there.
        """
        tasks = sorted(set(self.tasks))
        parts = [("all", np.full(len(losses), True)), *((t, self.tasks == t) for t in tasks if len(tasks) > 1)]
        found = []
        for task, rows in parts:
            n, counts, fed = int(rows.sum()), self.counts[rows], np.maximum(1, self.counts[rows] - 1)
            drawn = np.vstack([np.ones(n), np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_DRAWS)])
            each = zip(*(drawn @ values[rows] for values in (self.sums, self.seconds, seconds)), strict=True)
            static = np.array([lost @ static_shares(lost, taken, at) for lost, taken, at in each])
            gains = (static - drawn @ losses[rows]) / (drawn @ counts)
            low, high = np.quantile(gains[1:], (0.025, 0.975))
            speedup, depth = self.full[rows].sum() / seconds[rows].sum(), layers[rows] @ fed / fed.sum()
            mean, still = losses[rows].sum() / counts.sum(), static[0] / counts.sum()
            names = ("request_speedup", "mean_layers", "loss", "static", "gain", "low", "high")
            values = map(float, (speedup, depth, mean, still, gains[0], low, high))
            found.append({"task": str(task), "method": method, "n": n, **dict(zip(names, values, strict=True))})
        return found


def static_shares(losses: Numbers, seconds: Numbers, at: float) -> Numbers:
    """Shares of the best depth, or mix of two, that takes `at` seconds; `losses` and `seconds` are of each depth."""
    pure = np.eye(len(seconds))
    tried = [pure[int(seconds.argmin())]]
    for a, b in combinations_with_replacement(np.argsort(seconds, kind="stable"), 2):
        if seconds[a] <= at * _SLACK:
            share = 1.0 if seconds[b] <= at * _SLACK else (at - seconds[a]) / (seconds[b] - seconds[a])
            tried.append((1 - share) * pure[a] + share * pure[b])
    return min(tried, key=lambda each: float(each @ losses))


def priced(losses: Numbers, prices: Numbers, seconds: Numbers, limit: float) -> tuple[Choice, float]:
    """The depth of least loss + penalty x price for each record, with the least penalty that keeps to all's limit."""

    def choice(penalty: float) -> Choice:
        return np.asarray(np.argmin(losses + penalty * prices, axis=1))

    def within(penalty: float) -> bool:
        return bool(np.take_along_axis(seconds, choice(penalty)[:, None], 1).sum() <= limit * _SLACK)

    low, high = 0.0, 0.0
    while not within(high) and high < 1e18:
        low, high = high, max(1e-6, high * 4)
    for _ in range(60 if high else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return choice(high), high


def oracle(table: DepthTable, speedup: float) -> list[dict[str, Any]]:
    """The oracle at a speed-up, and a random assignment of its mix of depths; raises TargetError out of reach."""
    choice, _ = priced(table.sums, table.seconds, table.seconds, table.limit(speedup))
    mix = np.bincount(choice, minlength=len(table.depths)) / len(choice)
    random = table.compare("random", *(each @ mix for each in (table.sums, table.seconds, table.layers)))
    return [*table.chosen("oracle", choice), *random]


def routed(table: DepthTable, predicted: Numbers, speedup: float) -> tuple[Choice, float]:
    """Each record's depth by predicted losses at a speed-up of all, and the penalty; TargetError out of reach."""
    prices = np.tile(table.costs, (len(table.counts), 1))
    return priced(predicted, prices, table.seconds, table.limit(speedup))


def penalties(table: DepthTable, predicted: Numbers) -> list[tuple[float, float]]:
    """Speed-ups within reach, rising, and the penalty for each."""
    free, _ = routed(table, predicted, 1e-9)
    first = table.full.sum() / np.take_along_axis(table.seconds, free[:, None], 1).sum()
    return [(s, routed(table, predicted, s)[1]) for s in np.linspace(first, 1 / table.costs.min(), _PRICES).tolist()]


def find_router(table: DepthTable) -> tuple[Numbers, Numbers]:
    """Ridge regression from features to each depth's loss beyond the deepest's, of the strength that predicts best.

    Weights as of `skipdecode.engine.adaptive.Router`, and losses predicted for each record from a fit without it.
    """
    known, counts = table.features, table.counts
    centre, scale = known.mean(0), np.where(known.std(0) > 1e-9, known.std(0), 1.0)
    given = np.column_stack([(known - centre) / scale, np.ones(len(known))])
    wanted = (table.sums[:, 1:] - table.sums[:, :1]) / counts[:, None]
    folds = np.random.default_rng(0).permutation(len(known)) % min(_FOLDS, len(known))
    tried = []
    for strength in _STRENGTHS:
        predicted = np.zeros_like(wanted)
        for fold in set(folds):
            learn, left = folds != fold, folds == fold
            predicted[left] = given[left] @ _ridge(given[learn], wanted[learn], counts[learn], strength)
        tried.append((float(counts @ (predicted - wanted) ** 2 @ np.ones(wanted.shape[1])), strength, predicted))
    _, strength, predicted = min(tried, key=lambda each: each[:2])
    weights = _ridge(given, wanted, counts, strength).T / np.append(scale, 1.0)
    weights[:, -1] -= weights[:, :-1] @ centre
    return weights, np.column_stack([np.zeros(len(known)), predicted])


def _ridge(given: Numbers, wanted: Numbers, counts: Numbers, strength: float) -> Numbers:
    """Weights (features and constant, depths); the constant is free, and records count by their tokens."""
    kept = np.full(given.shape[1], strength * counts.sum())
    kept[-1] = 1e-9
    return np.asarray(np.linalg.solve((given.T * counts) @ given + np.diag(kept), (given.T * counts) @ wanted))


def follow(table: DepthTable, thresholds: Sequence[float], begun: Choice) -> tuple[Numbers, Numbers, Numbers]:
    """Summed losses, seconds and mean layers of records that begin at these depths and go on by thresholds."""
    rows, steps = np.arange(len(begun)), table.losses.shape[2] - 1
    depth, mean, batch = begun.copy(), table.likely[:, 0, 0].copy(), table.cost.batch
    budgets = np.array([[each.budget(p) for p in range(max(1, steps))] for each in table.depths])
    losses, seconds, layers = table.losses[:, 0, 0].copy(), table.seconds[rows, begun], np.zeros(len(begun))
    for position in range(steps):
        if position:
            mean += MOVE * (table.likely[rows, depth, position] - mean)
        depth = np.maximum(depth, np.searchsorted(thresholds, mean, side="right"))
        losses += table.losses[rows, depth, position + 1]
        live, run = table.counts > position + 1, budgets[depth, position]
        layers += run * live
        for start in set(begun[live]):
            together = live & (begun == start)
            # The most of a batch's budgets, drawn from these rows', on average.
            shares = (np.arange(together.sum() + 1) / together.sum()) ** batch
            saved = budgets[start, position] - np.sort(run[together]) @ np.diff(shares)
            seconds[together] -= saved * table.layer_seconds[table.prompts[together] + position + 1] / batch
    return losses, seconds, layers / np.maximum(1, table.counts - 1)


def find_thresholds(table: DepthTable, speedup: float) -> tuple[float, ...] | None:
    """Of the least loss at a speed-up, rising, one for each depth behind the first; None where none is that fast."""
    wanted, limit = len(table.depths) - 1, table.limit(speedup)
    points = max(n for n in range(2, 21) if n == 2 or comb(n + wanted, wanted) <= _TRIALS)
    there = np.arange(table.losses.shape[2]) < table.counts[:, None, None]
    seen = table.likely[np.broadcast_to(there, table.likely.shape)]
    grid = [*np.quantile(seen, np.linspace(0, 0.95, points)).tolist(), NEVER]
    found: list[tuple[float, tuple[Any, ...]]] = []
    for tried in combinations_with_replacement(grid, wanted):
        losses, seconds, _ = follow(table, tried, np.zeros(len(table.counts), dtype=np.intp))
        if seconds.sum() <= limit * _SLACK:
            found.append((float(losses.sum()), tried))
    return min(found)[1] if found else None
