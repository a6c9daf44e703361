"""A schedule as text: layers × prompt and generation positions, top layer first. Pure Python."""

from __future__ import annotations

from itertools import pairwise

from skipdecode.schedule import Schedule

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
