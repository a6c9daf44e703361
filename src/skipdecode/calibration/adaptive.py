"""Depth by difficulty, learned from records under each of a few depths, and compared with static ones at equal time.

*Oracle*: each record at the depth of least loss + price of time, its losses known: what no router exceeds. *Router*:
the same from predicted losses, by ridge regression on what prompts leave, each record predicted without itself.
*Confident*: all begin at the deepest and go on as the moving log-probability rises; a token's loss is taken to depend
on its own depth alone. *Static*: the best depth, or mix of two, that takes as long.

A record's time is its share of a batch that is as deep; within a batch a step takes what its deepest row does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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

__all__ = ["Compared", "DepthTable", "find_router", "find_thresholds", "follow", "oracle", "penalties"]

Numbers = NDArray[np.float64]
MIXTURE = "all"
NEVER = 1.0
"""A log-probability that is not reached."""
_STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_FOLDS = 10
_TRIALS = 1500
_PRICES = 12
_DRAWS = 1000


@dataclass(frozen=True)
class Compared:
    """Some records' depths against static ones that take as long: losses in nats a token, `gain` that of static beyond
    it, with the bounds of 95% of bootstrap draws.
    """

    task: str
    method: str
    n: int
    request_speedup: float
    mean_layers: float
    loss: float
    static: float
    gain: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


class DepthTable:
    """Records under each depth.

    Parameters
    ----------
    depths : sequence of Schedule
        The deepest first.
    meters : mapping of str to LossMeter
        By the name of their task.

    Attributes
    ----------
    losses, likely : ndarray (records, depths, tokens)
        Losses, and log-probabilities of the likeliest tokens; 0 beyond a record's end.
    counts, tasks : ndarray (records,)
    features : ndarray (records, features)
    seconds, layers : ndarray (records, depths)
        Of the request, and on average over the tokens that are fed.
    full : ndarray (records,)
        Seconds at full depth.
    """

    def __init__(self, depths: Sequence[Schedule], meters: Mapping[str, LossMeter], cost: CostModel) -> None:
        self.depths, self.cost = tuple(depths), cost
        found = [(task, record) for task, meter in meters.items() for record in meter.records(depths)]
        self.tasks = np.array([task for task, _ in found])
        self.features: Numbers = np.array([record["features"] for _, record in found])
        self.prompts = [record["prompt"] for _, record in found]
        lengths = [len(record["losses"][0]) for _, record in found]
        self.counts: Numbers = np.array(lengths, dtype=float)
        padded = np.zeros((2, len(found), len(depths), max(lengths)))
        for row, (_, record) in enumerate(found):
            padded[:, row, :, : lengths[row]] = record["losses"], record["likely"]
        self.losses, self.likely = padded
        whole = Schedule.full(cost.num_layers)
        taken = [
            [self._seconds(each, *sizes) for each in (*depths, whole)]
            for sizes in zip(self.prompts, lengths, strict=True)
        ]
        self.seconds, self.full = np.array(taken)[:, :-1], np.array(taken)[:, -1]
        self.layers: Numbers = np.array([[each.mean_budget(max(1, n - 1)) for each in depths] for n in lengths])

    def _seconds(self, schedule: Schedule, prompt: int, tokens: int) -> float:
        return self.cost.request_seconds(schedule, prompt, max(2, tokens)) / self.cost.batch

    @property
    def sums(self) -> Numbers:
        """Summed loss of each record at each depth, (records, depths)."""
        return self.losses.sum(-1)  # type: ignore[no-any-return]

    @property
    def costs(self) -> Numbers:
        """Share of full depth's time at each depth."""
        return self.seconds.sum(0) / self.full.sum()  # type: ignore[no-any-return]

    def limit(self, speedup: float) -> float:
        """Seconds of all records at a speed-up; raises TargetError out of reach."""
        limit, least = float(self.full.sum() / speedup), float(self.seconds.sum(0).min())
        if limit < least:
            bound = self.full.sum() / least
            raise TargetError(f"a speed-up of {speedup:g} is out of reach: the shallowest depth has {bound:.2f}x here")
        return limit

    def compare(self, method: str, losses: Numbers, seconds: Numbers, layers: Numbers) -> list[Compared]:
        """A method's summed losses, seconds and mean layers of each record, on all of them and on each task's."""
        tasks = sorted(set(self.tasks))
        parts = [(MIXTURE, np.full(len(losses), True)), *((t, self.tasks == t) for t in tasks if len(tasks) > 1)]
        return [self._compare(name, method, rows, losses, seconds, layers) for name, rows in parts]

    def _compare(
        self, task: str, method: str, rows: Any, losses: Numbers, seconds: Numbers, layers: Numbers
    ) -> Compared:
        counts, fed = self.counts[rows], np.maximum(1, self.counts[rows] - 1)
        static = _static(self.sums[rows], self.seconds[rows].sum(0), float(seconds[rows].sum()))
        gains = static - losses[rows]
        drawn = np.random.default_rng(0).multinomial(len(gains), np.full(len(gains), 1 / len(gains)), size=_DRAWS)
        low, high = np.quantile(drawn @ gains / (drawn @ counts), (0.025, 0.975))
        total, found = counts.sum(), (losses[rows].sum(), static.sum(), gains.sum())
        speedup, depth = self.full[rows].sum() / seconds[rows].sum(), (layers[rows] * fed).sum() / fed.sum()
        values = (speedup, depth, *(each / total for each in found), low, high)
        return Compared(task, method, len(gains), *map(float, values))

    def chosen(self, method: str, choice: NDArray[np.intp]) -> list[Compared]:
        """`compare` of a depth for each record."""
        rows = np.arange(len(choice))
        return self.compare(method, *(each[rows, choice] for each in (self.sums, self.seconds, self.layers)))


def _static(losses: Numbers, seconds: Numbers, at: float) -> Numbers:
    """Each record's loss under the best depth, or random mix of two, that takes `at` seconds in all."""
    best: tuple[float, Numbers] | None = None
    for a, b in combinations_with_replacement(np.argsort(seconds, kind="stable"), 2):
        if seconds[a] > at * (1 + 1e-9):
            continue
        share = 1.0 if seconds[b] <= at else (at - seconds[a]) / (seconds[b] - seconds[a])
        mixed = losses[:, a] + share * (losses[:, b] - losses[:, a])
        if best is None or mixed.sum() < best[0]:
            best = float(mixed.sum()), mixed
    return losses[:, int(seconds.argmin())] if best is None else best[1]


def _priced(losses: Numbers, prices: Numbers, seconds: Numbers, limit: float) -> tuple[NDArray[np.intp], float]:
    """The depth of least loss + penalty x price for each record, with the least penalty that keeps to the limit."""
    rows = np.arange(len(losses))

    def choice(penalty: float) -> NDArray[np.intp]:
        return np.asarray(np.argmin(losses + penalty * prices, axis=1))

    def within(penalty: float) -> bool:
        return bool(seconds[rows, choice(penalty)].sum() <= limit * (1 + 1e-9))

    low, high = 0.0, 1e-6
    if within(0.0):
        return choice(0.0), 0.0
    while not within(high) and high < 1e18:
        low, high = high, high * 4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return choice(high), high


def oracle(table: DepthTable, speedup: float) -> list[Compared]:
    """The oracle at a speed-up, and a random assignment of its mix of depths; raises TargetError out of reach."""
    choice, _ = _priced(table.sums, table.seconds, table.seconds, table.limit(speedup))
    mix = np.bincount(choice, minlength=len(table.depths)) / len(choice)
    random = table.compare("random", *(each @ mix for each in (table.sums, table.seconds, table.layers)))
    return [*table.chosen("oracle", choice), *random]


@dataclass(frozen=True)
class RouterFit:
    """Weights of a router (see `skipdecode.engine.adaptive.Router`), and losses predicted without the record itself."""

    centre: Numbers
    scale: Numbers
    weights: Numbers
    predicted: Numbers

    def choice(self, table: DepthTable, speedup: float) -> tuple[NDArray[np.intp], float]:
        """Each record's depth at a speed-up of all, and the penalty."""
        prices = np.tile(table.costs, (len(table.counts), 1))
        return _priced(self.predicted, prices, table.seconds, table.limit(speedup))


def find_router(table: DepthTable) -> RouterFit:
    """Ridge regression from features to each depth's loss beyond the deepest's, of the strength that predicts best."""
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
        tried.append((float((counts[:, None] * (predicted - wanted) ** 2).sum()), strength, predicted))
    _, strength, predicted = min(tried, key=lambda each: each[:2])
    predicted = np.column_stack([np.zeros(len(known)), predicted])
    return RouterFit(centre, scale, _ridge(given, wanted, counts, strength).T, predicted)


def _ridge(given: Numbers, wanted: Numbers, weights: Numbers, strength: float) -> Numbers:
    """Weights (features and constant, depths); the constant is free."""
    kept = np.full(given.shape[1], strength * weights.sum())
    kept[-1] = 1e-9
    weighted = given.T * weights
    return np.asarray(np.linalg.solve(weighted @ given + np.diag(kept), weighted @ wanted), dtype=float)


def penalties(table: DepthTable, fit: RouterFit) -> list[tuple[float, float]]:
    """Speed-ups within reach, rising, and the router's penalty for each."""
    free, _ = _priced(fit.predicted, np.zeros_like(fit.predicted), table.seconds, np.inf)
    first = float(table.full.sum() / table.seconds[np.arange(len(free)), free].sum())
    last = float(table.full.sum() / table.seconds.sum(0).min()) * (1 - 1e-6)
    return [(each, fit.choice(table, each)[1]) for each in np.linspace(first, last, _PRICES).tolist()]


# ---------------------------------------------------------------------- within a request


def follow(table: DepthTable, thresholds: Sequence[float], begun: NDArray[np.intp]) -> tuple[Numbers, Numbers, Numbers]:
    """Summed losses, seconds and mean layers of records that begin at these depths and go on by thresholds."""
    rows, steps = np.arange(len(begun)), table.losses.shape[2] - 1
    depth, mean = begun.copy(), table.likely[:, 0, 0].copy()
    budgets = np.array([[each.budget(p) for p in range(max(1, steps))] for each in table.depths])
    losses, seconds = table.losses[:, 0, 0].copy(), table.seconds[rows, begun]
    layers = np.zeros(len(begun))
    for position in range(steps):
        if position:
            mean += MOVE * (table.likely[rows, depth, position] - mean)
        depth = np.maximum(depth, np.searchsorted(thresholds, mean, side="right"))
        losses += table.losses[rows, depth, position + 1]
        run, live = budgets[depth, position], table.counts > position + 1
        layers += run * live
        for start in set(begun[live]):
            together = live & (begun == start)
            kept = float(budgets[start, position]) - _deepest(run[together], table.cost.batch)
            seconds[together] -= kept * _layer_seconds(table.cost, position) / table.cost.batch
    return losses, seconds, layers / np.maximum(1, table.counts - 1)


def _deepest(budgets: NDArray[Any], batch: int) -> float:
    """The most of `batch` budgets drawn from these, on average."""
    shares = (np.arange(len(budgets) + 1) / len(budgets)) ** batch
    return float(np.sort(budgets) @ np.diff(shares))


def _layer_seconds(cost: CostModel, kv_tokens: int) -> float:
    return cost.step_seconds(1, kv_tokens) - cost.step_seconds(0, kv_tokens)


def find_thresholds(table: DepthTable, speedup: float) -> tuple[float, ...] | None:
    """Of the least loss at a speed-up, rising, one for each depth behind the first; None where none is that fast."""
    wanted, limit = len(table.depths) - 1, table.limit(speedup)
    points = next(n for n in range(20, 1, -1) if comb(n + wanted, wanted) <= _TRIALS or n == 2)
    there = np.arange(table.losses.shape[2]) < table.counts[:, None, None]
    seen = table.likely[np.broadcast_to(there, table.likely.shape)]
    grid = [*np.quantile(seen, np.linspace(0, 0.95, points)).tolist(), NEVER]
    begun = np.zeros(len(table.counts), dtype=np.intp)
    best: tuple[float, tuple[float, ...]] | None = None
    for tried in combinations_with_replacement(grid, wanted):
        losses, seconds, _ = follow(table, tried, begun)
        if seconds.sum() <= limit and (best is None or losses.sum() < best[0]):
            best = float(losses.sum()), tried
    return None if best is None else best[1]
