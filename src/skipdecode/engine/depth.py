"""Who decides how many layers a row's next token runs. Pure Python.

The engine asks for every row and token, so nothing may assume that a budget follows from the position alone. A policy
may only lower a row's budget: a layer that was skipped holds no keys and values for the tokens that skipped it.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import neg
from typing import NamedTuple, Protocol

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Schedule

__all__ = ["WAYS", "BudgetPolicy", "DepthOrder", "PromptLayers", "RowView", "SchedulePolicy", "granted"]


WAYS = ("adaptive", "confident", "adaptive+confident")
"""Of choosing a depth: by a router, by confidence from the deepest on, and both (see `skipdecode.engine.adaptive`)."""


class RowView(NamedTuple):
    """What a policy sees of a row: the request's number, and of the token about to be fed the generation position
    (0: the first new token) and log-probability. `budget` are the layers of the token before (at position 0, of the
    prompt, or what position 0 may run beyond it). `first` are the request's `skipdecode.engine.adaptive.features`,
    where its policy chooses among depths.
    """

    request: int
    position: int
    budget: int
    logprob: float
    first: tuple[float, ...] = ()


class BudgetPolicy(Protocol):
    """Grants layers. `depths` are the schedules that rows may follow, the deepest first.

    `schedule` is that one: it says what prompts run, and the most that a position may be granted. Where `reads_logprob`
    is False, the log-probabilities that it is shown may be NaN; else they are the full head's.
    """

    schedule: Schedule
    depths: tuple[Schedule, ...]
    reads_logprob: bool

    def of_row(self) -> BudgetPolicy:
        """What grants the layers of one row; itself, where rows share what they ask."""

    def next_budget(self, row: RowView) -> int:
        """Layers of the row's next token; never above its budget before."""


def granted(policy: BudgetPolicy, row: RowView) -> int:
    """Layers of the row's next token; raises ScheduleError if the policy raises them."""
    budget = policy.next_budget(row)
    if budget > row.budget:
        raise ScheduleError(
            f"the policy raised request {row.request} from {row.budget} to {budget} layers at position {row.position}: "
            "a budget may only fall"
        )
    return budget


class PromptLayers(NamedTuple):
    """Layers that a prompt's tokens run, and those that store their keys and values alone; the last token runs both.

    `own`: the prompt's layers are no budget of the drop order, and may be fewer than those of position 0.
    """

    run: tuple[int, ...]
    projected: tuple[int, ...] = ()
    own: bool = False

    @property
    def held(self) -> tuple[int, ...]:
        """Layers that store keys and values, ascending."""
        return tuple(sorted(self.run + self.projected))


class SchedulePolicy:
    """Budgets from a schedule's positions."""

    reads_logprob: bool = False

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.depths: tuple[Schedule, ...] = (schedule,)

    def of_row(self) -> SchedulePolicy:
        return self

    def next_budget(self, row: RowView) -> int:
        return self.schedule.budget(row.position)


class DepthOrder:
    """Which layers a budget means, and how many of a step's rows each layer has.

    Layers fall away in one order for all rows, so with rows sorted by falling budget a layer's rows are the first ones.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_layers = schedule.num_layers
        self._drop_order = schedule.drop_order
        # The least budget with which a layer runs; layers never dropped run with any.
        self._least = [0] * self.num_layers
        for rank, layer in enumerate(schedule.drop_order):
            self._least[layer] = self.num_layers - rank
        self._layers: dict[int, tuple[int, ...]] = {}

    def takes(self, schedule: Schedule) -> bool:
        """Whether the layers that a schedule ever drops are the first of this order."""
        dropped = schedule.dropped
        return schedule.num_layers == self.num_layers and dropped == self._drop_order[: len(dropped)]

    def check(self, schedule: Schedule) -> None:
        """Raise ScheduleError unless rows under a schedule can run beside those of this order."""
        schedule.check_fits(self.num_layers)
        if not self.takes(schedule):
            raise ScheduleError(f"schedule {schedule.name!r} drops layers in another order than this engine")

    def prompt(self, policy: BudgetPolicy) -> PromptLayers:
        """What the prompts of a policy's rows do."""
        schedule = policy.schedule
        if isinstance(schedule.prompt, str):
            return PromptLayers(schedule.prompt_layers())
        return PromptLayers(schedule.prompt_layers(), schedule.projected, own=True)

    def layers(self, budget: int) -> tuple[int, ...]:
        """Layers of a budget, ascending."""
        if budget not in self._layers:
            chosen = tuple(i for i, least in enumerate(self._least) if budget >= least)
            if len(chosen) != budget:
                raise ScheduleError(f"budget {budget} is not accepted: the drop order allows {len(chosen)} at least")
            self._layers[budget] = chosen
        return self._layers[budget]

    def counts(self, budgets: list[int]) -> list[int]:
        """For each layer the number of rows that run it; `budgets` must not rise from row to row."""
        if budgets[0] == budgets[-1]:
            counts = [0] * self.num_layers
            for layer in self.layers(budgets[0]):
                counts[layer] = len(budgets)
            return counts
        return [bisect_right(budgets, -least, key=neg) for least in self._least]
