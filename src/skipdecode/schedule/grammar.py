"""Schedules as text (see `SCHEDULES`), the same in Python, on the command line and in requests; and as a picture."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType

from skipdecode.errors import ScheduleError
from skipdecode.schedule import order as layer_order
from skipdecode.schedule.schedule import Schedule

SCHEDULES = """schedules:
  full         every layer of every token
  2x           nominal speed-up (all layers / mean layers of a token; the measured one is lower), in the drop order of
               the checkpoint's schedule, else the paper's, from the bottom up
  NAME         a schedule of the checkpoint, or a bundled one with a fit: smollm2-135m-1.2x, smollm2-135m-1.4x
  FILE         written by plan and prepare (JSON); a skipdecode.fit beside it is used too
  ...:p15      prompt tokens run the lower 15 layers (also :pfull, :pmax_exit, :p0-14,20)
  ...:flat     the same number of layers at every position
"""
FORMS = (
    "a nominal speed-up such as 2x, a schedule file; then :p15 for prompts through 15 layers (also :pfull, :pmax_exit, "
    ":p0-14,20), :flat"
)
_SPEEDUP = re.compile(r"(\d+(?:\.\d+)?)x")
_ENDING = re.compile(r"(.*):(flat|p(?:full|max_exit|[\d,-]+))")


def base_of(text: str) -> str:
    """A text without its endings: a name, a file or a nominal speed-up."""
    return text if os.path.isfile(text) else _parts(text)[0]


def is_speedup(text: str) -> bool:
    """Whether a text is a nominal speed-up, with or without endings."""
    return _SPEEDUP.fullmatch(base_of(text)) is not None


def parse_schedule(
    text: str,
    num_layers: int,
    *,
    seq_len: int,
    checkpoint_schedule: Schedule | None = None,
    named: Mapping[str, Schedule] = MappingProxyType({}),
) -> Schedule:
    """The schedule of a text (see the module) for a model of `num_layers` layers.

    `seq_len`: positions over which the budgets of a speed-up fall, unless `checkpoint_schedule` has a drop order.
    `checkpoint_schedule`: the schedule of the checkpoint. `named`: schedules that the text can name.

    Raises ScheduleError if the text has no such form, if the file cannot be read, or if the schedule does not fit the
    model.
    """
    known = {"full": Schedule.full(num_layers)} | dict(named)
    base, endings = (text, []) if text in known or os.path.isfile(text) else _parts(text)
    speedup = _SPEEDUP.fullmatch(base)
    if endings and not base:
        schedule = checkpoint_schedule or known["full"]
    elif base in known:
        schedule = known[base]
    elif speedup is not None and checkpoint_schedule is not None and checkpoint_schedule.drop_order:
        schedule = checkpoint_schedule.with_speedup(float(speedup[1]))
    elif speedup is not None:
        schedule = Schedule.from_speedup(num_layers, float(speedup[1]), seq_len)
    elif base.endswith(".json") or os.path.exists(base):
        schedule = Schedule.load(base)
    else:
        raise ScheduleError(f"unknown schedule {base[:80]!r}: accepted are {', '.join(known)} by name; {FORMS}")
    schedule.check_fits(num_layers)
    for ending in endings:
        if ending != "flat":
            schedule = schedule.with_prompt(layer_order.prompt_set(ending[1:], num_layers))
        elif not schedule.is_flat:
            schedule = schedule.flattened()
    return schedule


def _parts(text: str) -> tuple[str, list[str]]:
    """A text without its endings, and these from left to right."""
    endings: list[str] = []
    while (match := _ENDING.fullmatch(text)) is not None:
        text, ending = match[1], match[2]
        endings.insert(0, ending)
    return text, endings


_WIDEST_POSITION = 8
_PROMPT = "prompt"


def schedule_picture(schedule: Schedule, positions: int | None = None, *, width: int = 80) -> str:
    """Layers × positions as text: a cell is filled where the layer runs. The prompt is left of the axis.

    A half-filled cell means that the layer only stores keys and values of prompt tokens. If there are more positions
    than columns, a column stands for several positions and is filled if the layer runs at half of them or more. If
    there are few positions, each takes several columns. The picture shows `positions` positions (default: the
    schedule's `seq_len`). It has a heading, one line per layer, an axis and its numbers. Lines have at most `width`
    characters. The last line has no line end.
    """
    shown = schedule.seq_len if positions is None else max(1, positions)
    margin = max(len(str(schedule.num_layers - 1)), len("layer")) + len(_PROMPT) + 3
    columns = max(1, min(shown, width - margin))
    stretch = max(1, min((width - margin) // columns, _WIDEST_POSITION))
    runs, left_out, stored, corner, side, floor = "█·▒└│─"
    prompt = dict.fromkeys(schedule.projected, stored) | dict.fromkeys(schedule.prompt_layers(), runs)
    edges = [shown * column // columns for column in range(columns + 1)]
    lines = ["layer, by generation position" + (f"; {stored} keys and values alone" if schedule.projected else "")]
    for layer in reversed(range(schedule.num_layers)):
        end = schedule.drop_position(layer)
        middles = (left + right for left, right in pairwise(edges))
        cells = (runs if end is None or 2 * end >= twice else left_out for twice in middles)
        before = f"{layer:>{margin - len(_PROMPT) - 3}} {prompt.get(layer, left_out) * len(_PROMPT)} {side}"
        lines.append(before + "".join(cell * stretch for cell in cells))
    lines.append(" " * (margin - 1) + corner + floor * (columns * stretch))
    lines.append(_numbers(edges[:-1], margin, stretch))
    return "\n".join(lines)


def _numbers(starts: list[int], margin: int, stretch: int) -> str:
    """The numbers of the axis: the position at which a column begins, about every quarter."""
    columns = len(starts)
    line = f"{_PROMPT} ".rjust(margin - 1) + " "
    for column in sorted({columns * quarter // 4 for quarter in range(4)}):
        at = margin + column * stretch
        if at == margin or at > len(line):
            line = line.ljust(at) + str(starts[column])
    return line
