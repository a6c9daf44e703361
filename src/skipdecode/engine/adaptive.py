"""Depth by difficulty: a request chooses among schedules when its prompt has run, and may go on to shallower ones.

The *depths* are schedules of one drop order and one prompt set, each contained in the one before, so going on to a
later one never raises a row's budget. The last prompt token runs what the deepest has there, since the choice is made
from its logits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from skipdecode.common.files import write_whole
from skipdecode.common.kinds import read_json
from skipdecode.engine.depth import WAYS, BudgetPolicy, RowView, SchedulePolicy
from skipdecode.errors import DataError, ScheduleError, UsageError
from skipdecode.models.carried import tuned_under
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.models.loading.base_weights import base_sample, is_other_model
from skipdecode.schedule import Schedule
from skipdecode.schedule.schedule import NestedLayers

__all__ = ["MOVE", "ROUTER_FILE", "Adaptive", "Router", "bounded", "carried_ways", "features", "identity", "policy_of"]

ROUTER_FILE = "router.json"
MOVE = 0.25
"""Of the moving mean of log-probabilities: what the newest token weighs."""
_HEADING = {"kind": "router", "format": 1}
_PROJECTIONS = 32
_PART = 256  # rows of a product that BLAS begins no threads for
_KNOWN = 4 + _PROJECTIONS


def features(logits: Tensor, prompt_tokens: int) -> tuple[float, ...]:
    """What a router knows of a request, from the logits (vocabulary,) behind its prompt.

    Entropy (nats), log-probability of the likeliest token and its lead over the second, logarithm of the prompt's
    length, and a fixed random projection of the logits: as these are linear in the last state, one of that state too.
    """
    values = logits.detach().float().cpu().numpy()
    values = values - values.max()
    chances = np.exp(values)
    total = chances.sum()
    second, first = (np.sort(np.partition(values, -2)[-2:]) - np.log(total)).tolist()
    entropy = float(np.log(total) - (chances * values).sum() / total)
    signs, centred = _signs(len(values)), values - values.mean()
    # One thread, as all of this: the engine's are still awake, and others would wait for theirs to have a core.
    projected = sum(centred[i : i + _PART] @ signs[i : i + _PART] for i in range(0, len(values), _PART))
    return (entropy, first, first - second, math.log(prompt_tokens), *np.asarray(projected).tolist())


@lru_cache(maxsize=2)
def _signs(vocabulary: int) -> Any:
    # numpy keeps this generator's numbers for all time, as a stored router needs.
    drawn = np.random.RandomState(0).randint(0, 2, (vocabulary, _PROJECTIONS)) * 2 - 1
    return (drawn / math.sqrt(vocabulary)).astype(np.float32)


def identity(model: Any, folder: Path | None = None) -> dict[str, Any]:
    """What a router keeps of its model; JSON-ready. `folder`: of `base_sample`."""
    plain = unwrap(model)
    vocabulary = plain.get_input_embeddings().weight.shape[0]
    return {"layers": len(decoder_layers(plain)), "vocabulary": vocabulary, "weights": base_sample(plain, folder)}


def check_depths(depths: Sequence[Schedule]) -> None:
    """Raise ScheduleError for depths, the deepest first, that rows cannot go through."""
    for deep, shallow in pairwise(depths):
        same = deep.drop_order == shallow.drop_order and deep.prompt_layers() == shallow.prompt_layers()
        if not same or not deep.contains(shallow):
            accepted = "schedules of one drop order and prompt set, none above the one before"
            raise ScheduleError(f"rows cannot choose between {deep.name!r} and {shallow.name!r}: give {accepted}")


@dataclass(frozen=True, kw_only=True)
class Router:
    """What chooses a request's depth, and when a row goes on to the next.

    Raises ScheduleError for depths that rows cannot go through, DataError for parts that do not go together.
    """

    depths: tuple[Schedule, ...]  # the deepest first
    costs: tuple[float, ...]  # a request's time at each, as shares of full depth's
    weights: tuple[tuple[float, ...], ...]  # of `features` and 1: what each depth but the first loses more
    penalties: tuple[tuple[float, float], ...]  # speed-up of requests, rising; nats a token that full time costs
    speedup: float  # that it was made for
    thresholds: tuple[float, ...]  # moving log-probability at which a row goes to each depth but the first, rising
    model: Mapping[str, Any] = field(hash=False)  # see `identity`

    def __post_init__(self) -> None:
        check_depths(self.depths)
        count = len(self.depths)
        sizes = {len(self.costs), len(self.weights) + 1, len(self.thresholds) + 1, count}
        if count < 2 or sizes != {count} or {*map(len, self.weights)} != {_KNOWN + 1} or not self.penalties:
            raise DataError(f"two depths or more are needed, with costs, thresholds and {_KNOWN} features' weights")

    def excess(self, known: Sequence[float]) -> list[float]:
        """Predicted loss (nats a token) of each depth beyond the deepest's, from `features`; UsageError if absent."""
        if len(known) != _KNOWN:
            raise UsageError(f"the router needs {_KNOWN} features of a prompt, but {len(known)} are known")
        return [0.0, *(sum(w * x for w, x in zip(each, (*known, 1.0), strict=True)) for each in self.weights)]

    def penalty(self, speedup: float | None = None) -> float:
        """The price of time for a speed-up of requests (default: its target), 0 where it is had for nothing.

        Raises UsageError where it is out of reach.
        """
        wanted, (speedups, prices) = self.speedup if speedup is None else speedup, zip(*self.penalties, strict=True)
        if wanted > speedups[-1]:
            raise UsageError(f"a speed-up of {wanted:g} is out of the router's reach: give up to {speedups[-1]:.2f}")
        return float(np.interp(wanted, speedups, prices))

    def check(self, model: Any, folder: Path | None = None) -> None:
        """Raise UsageError unless it was made for this model. `folder`: of `base_sample`."""
        now, known, order = identity(model, folder), self.model, self.depths[0].drop_order
        for name in ("layers", "vocabulary"):
            if now[name] != known.get(name):
                raise UsageError(f"the router is for a model with {name} {known.get(name)}, this one has {now[name]}")
        if other := next((s.name for s in tuned_under(model) if s.dropped != order[: len(s.dropped)]), None):
            raise UsageError(
                f"the router drops layers in another order than {other!r}, which the model was tuned under"
            )
        if is_other_model(known.get("weights"), now["weights"]):
            raise UsageError(
                "the router was made for other weights: skipdecode calibrate --adaptive makes one for these"
            )

    @property
    def digest(self) -> str:
        """Tells routers apart."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {**_HEADING, **asdict(self), "depths": [schedule.to_dict() for schedule in self.depths]}

    def save(self, path: Path, **about: Any) -> None:
        """Write it as JSON, with more entries for readers of the file."""
        write_whole(path, json.dumps({**self.to_dict(), **about}) + "\n")

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A router from `to_dict`'s dictionary; raises DataError, ScheduleError, or KeyError for what is missing."""
        if not isinstance(data, dict) or any(data.get(name) != value for name, value in _HEADING.items()):
            raise DataError(f"format {_HEADING['format']} of kind {_HEADING['kind']} is needed")
        depths = tuple(Schedule.from_dict(each) for each in data["depths"])
        return cls(**{f.name: _tuple(data[f.name]) for f in fields(cls)} | {"depths": depths})

    @classmethod
    def load(cls, path: Path) -> Self:
        """The router of a file; raises DataError naming it."""
        try:
            return cls.from_dict(read_json(path))
        except (DataError, ScheduleError, TypeError, KeyError) as e:
            what = f"the entry {e} is missing" if isinstance(e, KeyError) else str(e).removeprefix(f"{path}: ")
            raise DataError(f"router {path}: {what}; skipdecode calibrate --adaptive makes one") from None


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class Adaptive(Schedule):
    """Budgets that each row decides: as a schedule, the most that they may be. Made by `choosing`.

    `way` is one of `WAYS`, and the name; `penalty` is the `Router.penalty`. With `max_loss` a row takes the shallowest
    depth that is predicted to lose no more (nats a token) than the deepest, in place of least loss + penalty x cost.
    """

    router: Router
    way: str
    penalty: float
    max_loss: float | None
    chooses = True

    @classmethod
    def choosing(
        cls, router: Router, way: str = WAYS[0], *, speedup: float | None = None, max_loss: float | None = None
    ) -> Self:
        """By a router, for a speed-up of requests or a loss; raises UsageError if that is not accepted."""
        if way not in WAYS or (speedup is not None and max_loss is not None):
            raise UsageError(f"give one of {', '.join(WAYS)}, and a speed-up or a largest loss, not both")
        deepest = {f.name: getattr(router.depths[0], f.name) for f in fields(Schedule)}
        penalty = router.penalty(speedup)
        return cls(**deepest | {"name": way}, router=router, way=way, penalty=penalty, max_loss=max_loss)

    @property
    def dropped(self) -> tuple[int, ...]:
        return self.router.depths[-1].dropped

    @property
    def is_full(self) -> bool:
        return False

    def fits_weights(self, schedules: Iterable[NestedLayers]) -> bool:
        known = tuple(schedules)
        return all(depth.fits_weights(known) for depth in self.router.depths)

    def to_dict(self) -> dict[str, Any]:
        own = {"way": self.way, "penalty": self.penalty, "max_loss": self.max_loss, "router": self.router.digest}
        return super().to_dict() | own

    def first_depth(self, known: Sequence[float]) -> int:
        """The number of a request's first depth, from its `features`; the deeper one of equals."""
        if self.way == "confident":
            return 0
        excess = self.router.excess(known)
        if self.max_loss is not None:
            return max(i for i, loss in enumerate(excess) if loss <= max(0.0, self.max_loss))
        prices = [loss + self.penalty * cost for loss, cost in zip(excess, self.router.costs, strict=True)]
        return prices.index(min(prices))


class _AdaptivePolicy(SchedulePolicy):
    """The budgets of one row (`of_row`); to be asked once for every token."""

    def __init__(self, schedule: Adaptive) -> None:
        super().__init__(schedule)
        self.depths, self._adaptive = schedule.router.depths, schedule
        self._thresholds = () if schedule.way == "adaptive" else schedule.router.thresholds
        self.reads_logprob = bool(self._thresholds)
        self._depth, self._confidence = 0, 0.0

    def of_row(self) -> _AdaptivePolicy:
        return _AdaptivePolicy(self._adaptive)

    def next_budget(self, row: RowView) -> int:
        if row.position == 0:
            self._depth, self._confidence = self._adaptive.first_depth(row.first), row.logprob
        else:
            self._confidence += MOVE * (row.logprob - self._confidence)
        while self._depth < len(self._thresholds) and self._confidence >= self._thresholds[self._depth]:
            self._depth += 1
        return self.depths[self._depth].budget(row.position)


def bounded(schedule: Schedule, speedup: float | None, max_loss: float | None) -> Adaptive:
    """A schedule that chooses, with other bounds; raises UsageError if they are not accepted, or it does not choose."""
    if not isinstance(schedule, Adaptive):
        raise UsageError(f"speedup and max_loss are of {', '.join(WAYS)}, not of {schedule.name!r}: leave them out")
    return Adaptive.choosing(schedule.router, schedule.way, speedup=speedup, max_loss=max_loss)


def carried_ways(folder: Path, model: Any) -> dict[str, Adaptive]:
    """The `WAYS` of the router in a checkpoint's folder; none without one. Raises as `Router.load` and `check` do."""
    if not (folder / ROUTER_FILE).is_file():
        return {}
    router = Router.load(folder / ROUTER_FILE)
    router.check(model)
    return {way: Adaptive.choosing(router, way) for way in WAYS}


def policy_of(schedule: Schedule | BudgetPolicy) -> BudgetPolicy:
    """A policy as it is, or a schedule's."""
    if isinstance(schedule, Adaptive):
        return _AdaptivePolicy(schedule)
    return SchedulePolicy(schedule) if isinstance(schedule, Schedule) else schedule
