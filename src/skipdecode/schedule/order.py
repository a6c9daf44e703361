"""Drop orders and budgets, the parts of a schedule, with the checks of both. Pure Python.

Every order keeps the warm-up layers. Every order except `top_down` keeps the last layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import groupby
from typing import Literal

from skipdecode.common.plain import unwrapped
from skipdecode.common.spread import spread_over
from skipdecode.errors import ScheduleError

PromptDepth = Literal["full", "max_exit"] | tuple[int, ...]
_MOST_POSITIONS = 1_000_000


def require_int(field: str, value: object) -> None:
    """Raise ScheduleError unless `value` is a whole number."""
    if type(unwrapped(value)) is not int:
        raise ScheduleError(f"{field}={value!r} is not accepted: give a whole number")


def require_positive(field: str, value: int) -> None:
    """Raise ScheduleError unless `value` is a whole number of 1 or more."""
    require_int(field, value)
    if value < 1:
        raise ScheduleError(f"{field}={value} is not accepted: give 1 or more")


def require_speedup(value: float) -> None:
    """Raise ScheduleError unless `value` is a number of 1 or more."""
    if type(unwrapped(value)) not in (int, float) or not 1 <= value < math.inf:
        raise ScheduleError(f"a nominal speed-up of {value!r} is not accepted: give 1 or more, such as 2")


def int_tuple(field: str, values: object, *, ordered: bool = True) -> tuple[int, ...]:
    """The values of an iterable as a tuple; raises ScheduleError unless all are whole numbers."""
    unsuitable = str | bytes | Set if ordered else str | bytes
    if isinstance(values, unsuitable) or not isinstance(values, Iterable):
        raise ScheduleError(f"{field}={values!r} is not accepted: give a list of whole numbers")
    result = tuple(map(unwrapped, values))
    for value in result:
        require_int(field, value)
    return result


def bottom_up(num_layers: int, warmup_layers: int) -> tuple[int, ...]:
    """warm-up, warm-up + 1, … (SkipDecode, arXiv 2307.02628, section 3)."""
    _require_ints(num_layers, warmup_layers)
    return tuple(range(warmup_layers, num_layers - 1))


def top_down(num_layers: int, warmup_layers: int) -> tuple[int, ...]:
    """Last, last - 1, … (early termination). With no warm-up layers, layer 0 stays: one layer must run."""
    _require_ints(num_layers, warmup_layers)
    return tuple(range(num_layers - 1, max(warmup_layers, 1) - 1, -1))


def _require_ints(num_layers: int, warmup_layers: int) -> None:
    require_int("num_layers", num_layers)
    require_int("warmup_layers", warmup_layers)


def evenly_spaced(num_layers: int, least_budget: int, warmup_layers: int) -> tuple[int, ...]:
    """An order that leaves evenly spaced layers at `least_budget`; every prefix of the order is spread out.

    The order continues below `least_budget` with the remaining layers. Source: Unified Layer Skipping, arXiv
    2404.06954.
    """
    _require_ints(num_layers, warmup_layers)
    free = least_budget - warmup_layers
    running = set(range(warmup_layers)) | {num_layers - 1}
    if free > 0:
        start = warmup_layers - 1 if warmup_layers else 0
        steps = free if warmup_layers else max(free - 1, 1)
        running |= {
            start + round(j * (num_layers - 1 - start) / steps) for j in range(0 if free > 1 else steps, steps + 1)
        }
    inner = range(warmup_layers, num_layers - 1)
    early = [layer for layer in inner if layer not in running]
    late = [layer for layer in inner if layer in running]
    return tuple(group[i] for group in (early, late) for i in spread_over(len(group), len(group)))


def lent_order(order: Sequence[int], shared: Mapping[int, int]) -> tuple[int, ...]:
    """A drop order in which layers that lend come after all their readers; those whose reader never goes stay.

    `shared`: the layers that read another's keys and values, each with that layer.
    """
    ordered, left = list[int](), list(order)
    while True:
        read = {lender for reader, lender in shared.items() if reader not in ordered}
        free = next((layer for layer in left if layer not in read), None)
        if free is None:
            return tuple(ordered)
        ordered.append(free)
        left.remove(free)


def check_order(drop_order: tuple[int, ...], num_layers: int, warmup_layers: int) -> None:
    """Raise ScheduleError if a layer is named twice, is out of range or must always run."""
    seen: set[int] = set()
    last = num_layers - 1
    for layer in drop_order:
        if not 0 <= layer <= last:
            raise ScheduleError(f"drop_order names layer {layer}: accepted are 0 to {last}")
        if layer in seen:
            raise ScheduleError(f"drop_order names layer {layer} twice: a layer is dropped once")
        seen.add(layer)
        if layer < warmup_layers:
            raise ScheduleError(
                f"drop_order drops warm-up layer {layer}: with warmup_layers={warmup_layers} accepted are "
                f"{warmup_layers} to {last - 1}"
            )
    if last in seen and drop_order != tuple(range(last, last - len(drop_order), -1)):
        raise ScheduleError(
            f"drop_order drops the last layer {last}: it must always run (only a pure top-down order, early "
            "termination, may drop it)"
        )


def check_layers(layers: object, num_layers: int, warmup_layers: int) -> tuple[int, ...]:
    """A prompt set, ascending; raises ScheduleError if a layer is out of range, or one that must run is not in it."""
    chosen = set(int_tuple("prompt", layers, ordered=False))
    if outside := sorted(chosen - set(range(num_layers))):
        raise ScheduleError(f"prompt names layer {outside[0]}: accepted are 0 to {num_layers - 1}")
    if missing := sorted(set(range(max(warmup_layers, 1))) - chosen):
        raise ScheduleError(
            f"prompt leaves out layer {missing[0]}: the first {max(warmup_layers, 1)} must run (warmup_layers="
            f"{warmup_layers}); give them too, or 'full' or 'max_exit'"
        )
    return tuple(sorted(chosen))


def prompt_set(text: str, num_layers: int) -> PromptDepth:
    """The `prompt` of a `Schedule` from text: "full", "max_exit", a number n (the lower n layers), or "0-14,20".

    A text that names every layer gives "full". Raises ScheduleError for other texts and for layers out of range.
    """
    if text == "full":
        return "full"
    if text == "max_exit":
        return "max_exit"
    ends = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip()) for part in text.split(",")]
    ranges = [(int(match[1]), int(match[2] or match[1])) for match in ends if match is not None]
    if text.strip().isdecimal() and ranges:
        ranges = [(0, ranges[0][0] - 1)]
    if len(ranges) < len(ends) or any(not first <= last < num_layers for first, last in ranges):
        raise ScheduleError(
            f"prompt layers {text!r} are not accepted: give full, max_exit (those of position 0), a number from 1 to "
            f"{num_layers} (that many of the lowest), or a list of layers from 0 to {num_layers - 1} such as 0-14,20"
        )
    layers = {layer for first, last in ranges for layer in range(first, last + 1)}
    return "full" if len(layers) == num_layers else tuple(sorted(layers))


def linear(most: float, least: float, seq_len: int) -> tuple[int, ...]:
    """Budgets from `most` at position 0 to `least` at position seq_len - 1, rounded half up."""
    if seq_len == 1:
        return tuple(math.floor(value + 0.5) for value in dict.fromkeys((most, least)))
    return tuple(math.floor(most - (most - least) * i / (seq_len - 1) + 0.5) for i in range(seq_len))


def paper_budgets(
    num_layers: int, nominal_speedup: float, seq_len: int, warmup_layers: int, spread: float = 1 / 3
) -> tuple[int, ...]:
    """Linear budgets whose mean is `num_layers` / `nominal_speedup`; see `Schedule.from_speedup`."""
    require_speedup(nominal_speedup)
    _require_ints(num_layers, warmup_layers)
    require_positive("seq_len", seq_len)
    if not 0 <= spread < 1:
        raise ScheduleError(f"spread={spread!r} is not accepted: give a number in [0, 1)")
    mean = num_layers / nominal_speedup
    fewest = min(num_layers, warmup_layers + 1)  # with the last layer
    if mean < fewest:
        raise ScheduleError(
            f"a nominal speed-up of {nominal_speedup:g} leaves {mean:.2f} of {num_layers} layers, but at least "
            f"{fewest} must run (the first {warmup_layers} and the last): at most {num_layers / fewest:.2f} is possible"
        )
    most = min(num_layers, round(mean * (1 + spread)))
    least = max(fewest, min(most, round(2 * mean) - most))
    return linear(max(most, least), least, seq_len)


def run_lengths(budgets: Sequence[int]) -> str:
    """Budgets as text: each value with the number of positions that have it, such as "20*4, 19*4, 18"."""
    runs = ((value, len(list(same))) for value, same in groupby(budgets))
    return ", ".join(f"{value}*{count}" if count > 1 else str(value) for value, count in runs)


def from_run_lengths(text: str) -> tuple[int, ...]:
    """Budgets from the text of `run_lengths`; raises ScheduleError for other texts and for more than a million."""
    runs = [re.fullmatch(r"(\d{1,7})(?:\*(\d{1,7}))?", part.strip()) for part in text.split(",")]
    counted = [(int(match[1]), int(match[2] or 1)) for match in runs if match is not None]
    if len(counted) < len(runs) or sum(count for _, count in counted) > _MOST_POSITIONS:
        raise ScheduleError(
            f"budgets {text[:80]!r} are not accepted: give a list of numbers, or runs such as '20*4, 19*4, 18', of at "
            f"most {_MOST_POSITIONS:,} positions"
        )
    return tuple(value for value, count in counted for _ in range(count))


def check_budgets(budgets: tuple[int, ...], num_layers: int, droppable: int) -> None:
    """Raise ScheduleError unless budgets never rise and skip at most `droppable` of `num_layers` layers."""
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
