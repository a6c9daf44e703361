"""The schedules that a server has loaded, and those that a request names. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from skipdecode.schedule import Schedule
from skipdecode.schedule import order as layer_order
from skipdecode.serving.errors import ApiError

__all__ = ["Catalog", "Plan"]


@dataclass(frozen=True)
class Plan:
    """The schedule of a request.

    Parameters
    ----------
    name : str
        As it is reported.
    label : str
        As it is counted: of loaded schedules the name, else "budget".
    schedule : Schedule
    """

    name: str
    label: str
    schedule: Schedule


class Catalog:
    """Schedules by name.

    Parameters
    ----------
    num_layers : int
        Of the model.
    carried : Schedule or None
        The checkpoint's own: the default. Without it, that is full depth.
    others : iterable of Schedule
        Further ones. Two of one name get a number.

    Raises
    ------
    ScheduleError
        A schedule is for another number of layers.
    """

    def __init__(self, num_layers: int, carried: Schedule | None, others: Iterable[Schedule] = ()) -> None:
        self.num_layers = num_layers
        self._plans: dict[str, Plan] = {}
        self._add(Schedule.full(num_layers))
        self.default = "full" if carried is None else self._add(carried)
        for schedule in others:
            self._add(schedule)
        orders = [s.drop_order for s in (self._plans[self.default].schedule, *self.schedules()) if s.drop_order]
        #: The order in which budgets of requests drop layers.
        self.budget_order = orders[0] if orders else layer_order.bottom_up(num_layers, min(1, num_layers))

    def schedules(self) -> list[Schedule]:
        """All loaded schedules."""
        return [plan.schedule for plan in self._plans.values()]

    def names(self) -> list[str]:
        """Of all loaded schedules."""
        return list(self._plans)

    def plan(self, name: str | None, budget: int | None) -> Plan:
        """The schedule that a request asks for; raises ApiError if there is none."""
        if budget is not None:
            return self._constant(min(budget, self.num_layers))
        if name is None:
            return self._plans[self.default]
        if name not in self._plans:
            known = ", ".join(self._plans)
            message = f"there is no schedule of this name: the server has {known}"
            raise ApiError(400, "invalid_value", message, "skipdecode.schedule")
        return self._plans[name]

    def budget_schedule(self) -> Schedule:
        """A schedule that stands for all budgets of requests: it drops as much as any of them."""
        return self._constant(self._least).schedule

    @property
    def _least(self) -> int:
        return max(1, self.num_layers - len(self.budget_order))

    def _constant(self, budget: int) -> Plan:
        if budget < self._least:
            message = f"a budget of {budget} layers is not accepted: give {self._least} to {self.num_layers}"
            raise ApiError(400, "invalid_value", message, "skipdecode.budget")
        schedule = Schedule(self.num_layers, self.budget_order, (budget,), warmup_layers=0, name=f"budget-{budget}")
        return Plan(schedule.name, "budget", schedule)

    def _add(self, schedule: Schedule) -> str:
        schedule.check_fits(self.num_layers)
        name, number = schedule.name, 1
        while name in self._plans:
            if self._plans[name].schedule == schedule:
                return name
            number += 1
            name = f"{schedule.name}-{number}"
        self._plans[name] = Plan(name, name, schedule)
        return name

    def to_dict(self) -> dict[str, Any]:
        """The extension of `/v1/models`."""
        return {
            "num_layers": self.num_layers,
            "default_schedule": self.default,
            "budget": {"least": self._least, "most": self.num_layers, "drop_order": list(self.budget_order)},
            "schedules": [_described(name, plan.schedule) for name, plan in self._plans.items()],
        }


def _described(name: str, schedule: Schedule) -> dict[str, Any]:
    return {
        "name": name,
        "nominal_speedup": round(schedule.nominal_speedup, 4),
        "mean_budget": round(schedule.mean_budget(), 4),
        "seq_len": schedule.seq_len,
        "warmup_layers": schedule.warmup_layers,
        "budgets": list(schedule.budgets),
        "drop_order": list(schedule.drop_order),
    }
