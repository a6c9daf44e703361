"""Published methods that are nothing but a schedule, by name, each for a nominal speed-up. Pure Python.

All are built for the same budget, so that a table compares them at one cost: the mean number of layers over `seq_len`
positions is the number of layers / the nominal speed-up, as near as whole layers allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skipdecode.common.registry import Registry
from skipdecode.errors import ScheduleError
from skipdecode.schedule import PromptDepth, Schedule
from skipdecode.schedule import order as layer_order

__all__ = ["ORDER_OF_ITS_OWN", "SCHEDULES", "Budget", "build_schedule"]

ORDER_OF_ITS_OWN = ("full", "even", "unified", "early_termination")
_BUILDERS = ("full", "skipdecode", "even", "unified", "d3", "early_termination", "static_pruning")
SCHEDULES = Registry("schedule", {name: f"skipdecode.schedule.published:{name}" for name in _BUILDERS})


@dataclass(frozen=True)
class Budget:
    """What a schedule is wanted for; the parameters of `Schedule.from_speedup`.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    nominal_speedup : float
        Layers of the model / mean layers run over `seq_len`.
    seq_len : int
        Positions over which that mean holds.
    warmup_layers : int
        First layers that always run.
    prompt : {"full", "max_exit"}
        Depth of prompt tokens.
    drop_order : sequence of int, optional
        In place of bottom up; `static_pruning` needs one.
    """

    num_layers: int
    nominal_speedup: float
    seq_len: int
    warmup_layers: int = 1
    prompt: PromptDepth = "full"
    drop_order: Sequence[int] | None = None

    def linear(self, name: str) -> Schedule:
        """The paper's schedule for this budget."""
        return Schedule.from_speedup(
            self.num_layers,
            self.nominal_speedup,
            self.seq_len,
            warmup_layers=self.warmup_layers,
            prompt=self.prompt,
            drop_order=self.drop_order,
            name=name,
        )

    def level(self) -> int:
        """The number of layers that, run at every position, comes nearest."""
        # The paper's schedule over a single position is that number, with its checks and messages.
        flat = Schedule.from_speedup(
            self.num_layers, self.nominal_speedup, 1, warmup_layers=self.warmup_layers, spread=0.0
        )
        return flat.budgets[0]

    def label(self, method: str) -> str:
        """A schedule's name in tables."""
        return f"{method}-{self.nominal_speedup:g}x"


def build_schedule(name: str, budget: Budget) -> Schedule:
    """A schedule by the name of its method, one of `SCHEDULES`.

    Raises
    ------
    UsageError
        The name is not known; lists the choices.
    ScheduleError
        The speed-up is out of reach, or a drop order was given to a method that has its own.
    """
    builder: Callable[[Budget], Schedule] = SCHEDULES.get(name)
    if budget.drop_order is not None and name in ORDER_OF_ITS_OWN:
        raise ScheduleError(f"{name!r} has a drop order of its own: leave drop_order out, or choose another schedule")
    return builder(budget)


def full(budget: Budget) -> Schedule:
    """Every layer; the speed-up can only be 1."""
    if budget.nominal_speedup != 1:
        raise ScheduleError(
            f"'full' runs every layer: nominal_speedup={budget.nominal_speedup:g} needs another schedule"
        )
    return Schedule.full(budget.num_layers)


def skipdecode(budget: Budget) -> Schedule:
    """Linear decay, bottom up (SkipDecode, arXiv 2307.02628, section 3)."""
    return budget.linear(budget.label("skipdecode"))


def even(budget: Budget) -> Schedule:
    """The paper's linear decay with evenly spaced layers."""
    budgets = budget.linear("even").budgets
    return Schedule.even(
        budget.num_layers,
        budgets,
        warmup_layers=budget.warmup_layers,
        prompt=budget.prompt,
        name=budget.label("even"),
    )


def unified(budget: Budget) -> Schedule:
    """Evenly spaced, the same depth everywhere (Unified Layer Skipping, arXiv 2404.06954)."""
    return Schedule.even(
        budget.num_layers,
        budget.level(),
        warmup_layers=budget.warmup_layers,
        prompt=budget.prompt,
        name=budget.label("unified"),
    )


def d3(budget: Budget) -> Schedule:
    """Bottom up with a power law, whose base is solved for the budget (D3)."""
    wanted = budget.linear("d3").num_layers / budget.nominal_speedup
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _power_law(budget, middle).mean_budget() < wanted:
            low = middle
        else:
            high = middle
    return _power_law(budget, high)


def early_termination(budget: Budget) -> Schedule:
    """The paper's linear decay, dropping from the top: later tokens stop early (the paper's own contrast)."""
    return Schedule.top_down(
        budget.num_layers,
        budget.linear("early-termination").budgets,
        warmup_layers=budget.warmup_layers,
        prompt=budget.prompt,
        name=budget.label("early-termination"),
    )


def static_pruning(budget: Budget) -> Schedule:
    """The same layers gone at every position, the least influential first (ShortGPT, arXiv 2403.03853)."""
    if budget.drop_order is None:
        raise ScheduleError(
            "static_pruning drops layers by their influence, which is measured: give a drop_order, such as "
            "a calibrated schedule's"
        )
    return Schedule.constant(
        budget.num_layers,
        budget.level(),
        drop_order=budget.drop_order,
        warmup_layers=budget.warmup_layers,
        prompt=budget.prompt,
        name=budget.label("static-pruning"),
    )


def _power_law(budget: Budget, alpha: float) -> Schedule:
    order = budget.drop_order or layer_order.bottom_up(budget.num_layers, budget.warmup_layers)
    return Schedule.power_law(
        budget.num_layers,
        max(alpha, 1e-9),
        budget.seq_len,
        warmup_layers=budget.warmup_layers,
        prompt=budget.prompt,
        drop_order=order,
        name=budget.label("d3"),
    )
