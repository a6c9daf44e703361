"""Chooses one of several schedules for a request before the request starts, from the tokens of its prompt.

The features of a prompt need no forward of the model: its length, and a fixed random projection of the mean of its
token embeddings. A ridge regression predicts from these features the loss of each schedule above that of the first. The
router takes the schedule with the least predicted loss + price x time. The choice does not depend on the batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from skipdecode.common.files import write_whole
from skipdecode.common.kinds import read_json
from skipdecode.errors import DataError, ScheduleError, TargetError, UsageError
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.models.loading.base_weights import base_sample, is_other_model
from skipdecode.schedule import Schedule

__all__ = ["Measured", "Route", "Routed", "Router", "common_order", "fit_router", "prompt_features"]

Numbers = NDArray[np.float64]
Route = Callable[[Sequence[int]], Schedule]
"""From a prompt's token ids to its schedule."""
_HEADING = {"kind": "router", "format": 1}
_PROJECTIONS = 16
_PART = 8192  # rows of the embedding that are converted at once
_STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
_FOLDS = 5
_DRAWS = 1000
_SLACK = 1 + 1e-9


def prompt_features(model: Any) -> Callable[[Sequence[int]], Numbers]:
    """A function that gives a prompt's features (17,): the logarithm of its length, and its projected embeddings."""
    table = unwrap(model).get_input_embeddings().weight.detach()
    # numpy guarantees that this generator's numbers never change, which a stored router needs.
    signs = np.random.RandomState(0).randint(0, 2, (table.shape[1], _PROJECTIONS)) * 2 - 1
    projection = torch.from_numpy(signs / math.sqrt(table.shape[1])).float()
    words = torch.cat([part.float().cpu() @ projection for part in torch.split(table, _PART)]).numpy()

    def of_prompt(tokens: Sequence[int]) -> Numbers:
        return np.append(math.log(len(tokens)), words[list(tokens)].astype(np.float64).mean(0))

    return of_prompt


def common_order(schedules: Sequence[Schedule]) -> tuple[int, ...]:
    """The layers that any schedule drops, in the common order; raises ScheduleError if there is no common order."""
    order = max((schedule.dropped for schedule in schedules), key=len)
    for schedule in schedules:
        schedule.check_fits(schedules[0].num_layers)
        if schedule.dropped != order[: len(schedule.dropped)]:
            raise ScheduleError(f"schedule {schedule.name!r} drops layers in another order than the others")
    return order


@dataclass(frozen=True)
class Router:
    """Schedules of one drop order, with the weights of the choice among them.

    Parameters
    ----------
    schedules : tuple of Schedule
        The losses of the others are relative to the first.
    costs : tuple of float
        Time of a request under each schedule, as a share of the time at full depth.
    weights : tuple of tuple of float
        For each schedule but the first: weights of the features and of 1, which give its additional loss (nats per
        token).
    price : float
        Price of the time of full depth, in nats per token.
    base : tuple of float
        A sample of the model's weights (`base_sample`).

    Raises
    ------
    DataError, ScheduleError
        The parts do not fit together.
    """

    schedules: tuple[Schedule, ...]
    costs: tuple[float, ...]
    weights: tuple[tuple[float, ...], ...]
    price: float
    base: tuple[float, ...]

    def __post_init__(self) -> None:
        count, known = len(self.schedules), {len(row) for row in self.weights}
        if count < 2 or len(self.costs) != count or len(self.weights) != count - 1 or known != {_PROJECTIONS + 2}:
            raise DataError(f"two schedules or more are needed, each with a cost and {_PROJECTIONS + 2} weights")
        common_order(self.schedules)

    @property
    def order(self) -> tuple[int, ...]:
        """The layers that any of the schedules drops, in order."""
        return common_order(self.schedules)

    def bind(self, model: Any) -> Route:
        """The choice for prompts of a loaded model; raises UsageError or ScheduleError for another model."""
        self.schedules[0].check_fits(len(decoder_layers(unwrap(model))))
        if is_other_model(list(self.base), base_sample(unwrap(model))):
            raise UsageError("the router was made for other weights: skipdecode calibrate --router makes one for these")
        features, weights, times = prompt_features(model), np.array(self.weights), self.price * np.array(self.costs)

        def choose(tokens: Sequence[int]) -> Schedule:
            losses = np.append(0.0, weights @ np.append(features(tokens), 1.0))
            return self.schedules[int(np.argmin(losses + times))]

        return choose

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {**_HEADING, **asdict(self), "schedules": [schedule.to_dict() for schedule in self.schedules]}

    def save(self, path: Path) -> None:
        """Write the router as JSON."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """The router of a file; raises DataError with the file's name."""
        try:
            data = read_json(path)
            if not isinstance(data, dict) or any(data.get(name) != value for name, value in _HEADING.items()):
                raise DataError("this is no router")
            schedules = tuple(Schedule.from_dict(each) for each in data["schedules"])
            return cls(**{field.name: _tuple(data[field.name]) for field in fields(cls)} | {"schedules": schedules})
        except (DataError, ScheduleError, TypeError, KeyError) as e:
            what = f"the entry {e} is missing" if isinstance(e, KeyError) else str(e).removeprefix(f"{path}: ")
            raise DataError(f"router {path}: {what}; skipdecode calibrate --router makes one") from None


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


# ---------------------------------------------------------------------- how one is made


class Measured(NamedTuple):
    """Measurements of records under several schedules.

    Shapes: `features` (records, features); `losses`, summed over the response, and `seconds` of the request (records,
    schedules); `tokens` of the response and `full_seconds` of the request at full depth (records,).
    """

    features: Numbers
    losses: Numbers
    seconds: Numbers
    tokens: Numbers
    full_seconds: Numbers


class Routed(NamedTuple):
    """The cross-validated result of a router on its own records: a record is predicted by a fit without it.

    `loss` and `static` are nats per token: of the router, and of the best schedule, or random mix of two, that takes
    the same time. `gain` is the difference, and `low` to `high` its 95% interval over draws of the records.
    """

    speedup: float
    shares: tuple[float, ...]  # share of the records by schedule
    loss: float
    static: float
    gain: float
    low: float
    high: float


def fit_router(
    schedules: Sequence[Schedule], records: Measured, speedup: float, base: Sequence[float]
) -> tuple[Router, Routed]:
    """A router from records for a speed-up over all of them; raises TargetError if no schedule is fast enough."""
    features, losses, seconds, tokens, full_seconds = records
    limit = full_seconds.sum() / speedup
    if seconds.sum(0).min() > limit * _SLACK:
        fastest = full_seconds.sum() / seconds.sum(0).min()
        raise TargetError(f"a speed-up of {speedup:g} is out of reach: the fastest of the schedules has {fastest:.2f}x")
    wanted = (losses[:, 1:] - losses[:, :1]) / tokens[:, None]
    folds = np.random.default_rng(0).permutation(len(tokens)) % min(_FOLDS, len(tokens))
    tried = []
    for strength in _STRENGTHS:
        predicted = np.zeros_like(wanted)
        for fold in set(folds):
            learn, left = folds != fold, folds == fold
            weights = _ridge(features[learn], wanted[learn], tokens[learn], strength)
            predicted[left] = features[left] @ weights[:-1] + weights[-1]
        tried.append((float((tokens @ (predicted - wanted) ** 2).sum()), strength, predicted))
    _, strength, predicted = min(tried, key=lambda each: each[:2])
    costs = seconds.sum(0) / full_seconds.sum()
    beyond = np.column_stack([np.zeros(len(tokens)), predicted])
    price, choice = _priced(beyond, costs, seconds, limit)
    weights = _ridge(features, wanted, tokens, strength).T
    found = Router(tuple(schedules), tuple(costs.tolist()), _tuple(weights.tolist()), price, tuple(base))
    return found, _routed(choice, records)


def _ridge(features: Numbers, wanted: Numbers, tokens: Numbers, strength: float) -> Numbers:
    """Weights (features and constant, schedules); the penalty of a feature is its spread, the constant has none."""
    centre, spread = np.average(features, axis=0, weights=tokens), features.var(0)
    known, mean = features - centre, np.average(wanted, axis=0, weights=tokens)
    gram = (known.T * tokens) @ known + strength * tokens.sum() * np.diag(np.where(spread > 1e-12, spread, 1.0))
    weights = np.linalg.solve(gram, (known.T * tokens) @ (wanted - mean))
    return np.vstack([weights, mean - centre @ weights])


def _priced(beyond: Numbers, costs: Numbers, seconds: Numbers, limit: float) -> tuple[float, NDArray[np.intp]]:
    """The least price of time at which the choices meet the limit, and the choices."""

    def choices(price: float) -> NDArray[np.intp]:
        return np.asarray(np.argmin(beyond + price * costs, axis=1))

    def within(price: float) -> bool:
        return bool(np.take_along_axis(seconds, choices(price)[:, None], 1).sum() <= limit * _SLACK)

    low, high = 0.0, 0.0
    while not within(high) and high < 1e12:
        low, high = high, max(1e-6, 4 * high)
    for _ in range(60 if high else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return high, choices(high)


def _routed(choice: NDArray[np.intp], records: Measured) -> Routed:
    _, losses, seconds, tokens, full_seconds = records
    rows, count = np.arange(len(choice)), losses.shape[1]
    own, taken, times = losses[rows, choice], seconds[rows, choice].sum(), seconds.sum(0)
    mixes = [np.eye(count)[int(times.argmin())]]
    for slow, fast in combinations_with_replacement(np.argsort(-times, kind="stable"), 2):
        if times[fast] <= taken * _SLACK:
            share = 0.0 if times[slow] <= taken * _SLACK else (times[slow] - taken) / (times[slow] - times[fast])
            mixes.append((1 - share) * np.eye(count)[slow] + share * np.eye(count)[fast])
    static = losses @ min(mixes, key=lambda mix: float(losses.sum(0) @ mix))
    drawn = np.random.default_rng(0).multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), size=_DRAWS)
    low, high = np.quantile(drawn @ (static - own) / (drawn @ tokens), (0.025, 0.975))
    mean, still = own.sum() / tokens.sum(), static.sum() / tokens.sum()
    figures = map(float, (mean, still, still - mean, low, high))
    shares = np.bincount(choice, minlength=count) / len(choice)
    return Routed(float(full_seconds.sum() / taken), tuple(shares.tolist()), *figures)
