"""Budget curves: how many layers run at position 0, 1, …, and what makes a list of them valid. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from skipdecode.errors import ScheduleError
from skipdecode.schedule.checks import int_tuple, require_int

__all__ = ["check_budgets", "least_budget", "linear", "one_or_more"]


def linear(most: int, least: int, seq_len: int) -> tuple[int, ...]:
    """Integers from `most` at position 0 to `least` at position seq_len - 1, halves up; `least` holds after it."""
    if seq_len == 1:
        return (most,) if most == least else (most, least)
    steps = seq_len - 1
    return tuple((2 * (most * steps - (most - least) * i) + steps) // (2 * steps) for i in range(seq_len))


def least_budget(num_layers: int, warmup_layers: int) -> int:
    """The fewest layers that keep the warm-up layers and the last one."""
    require_int("warmup_layers", warmup_layers)
    return min(num_layers, warmup_layers + 1)


def one_or_more(budgets: int | Sequence[int]) -> tuple[int, ...]:
    """A list of budgets from one number or several."""
    values = (budgets,) if isinstance(budgets, int) else int_tuple("budgets", budgets)
    if not values:
        raise ScheduleError("budgets is empty: give the number of layers of at least one position")
    return values


def check_budgets(budgets: tuple[int, ...], num_layers: int, droppable: int) -> None:
    """Raise ScheduleError unless budgets never rise and leave out at most `droppable` of `num_layers` layers."""
    if not budgets:
        raise ScheduleError("budgets is empty: give the number of layers of at least one position")
    floor = max(1, num_layers - droppable)
    for position, value in enumerate(budgets):
        if not floor <= value <= num_layers:
            raise ScheduleError(
                f"budget {value} at position {position} is not accepted: give {floor} to {num_layers} "
                f"({num_layers} layers, of which drop_order lists {droppable})"
            )
        if position and value > budgets[position - 1]:
            raise ScheduleError(
                f"budgets are not nested: {value} at position {position} is above {budgets[position - 1]} at position "
                f"{position - 1}; budgets may only fall"
            )
