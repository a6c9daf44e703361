"""What `skipdecode calibrate` prints: the schedules at one cost, with predicted and measured losses."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from skipdecode.schedule import Schedule

__all__ = ["report"]

_SHOWN_ORDER = 12
_PROMPT = ("task", "prompt_template", "prompt_field", "response_field", "chat")


def report(document: dict[str, Any], schedule_file: Path) -> str:
    """Lines for people, from the document that is also written as JSON."""
    schedule = Schedule.from_dict(document["schedule"])
    verdicts = document["verdicts"]
    kind = "wall-clock" if document["options"]["target_speedup"] is not None else "layers"
    order = " ".join(map(str, schedule.drop_order[:_SHOWN_ORDER])) + (
        " …" if len(schedule.drop_order) > _SHOWN_ORDER else ""
    )
    depth = f"{schedule.budgets[0]}" if schedule.is_flat else f"{schedule.budgets[0]} falling to {schedule.budgets[-1]}"
    lines = [
        f"{schedule.name}: {depth} of {schedule.num_layers} layers; left out in the order {order}",
        f"loss per response token (teacher-forced cross-entropy) on {document['records']} records"
        + (f", and on {document['held_out_records']} held out" if document["held_out_records"] else ""),
        "",
        _row("schedule", f"speed-up ({kind})", "mean layers", "predicted", "measured", "held out"),
    ]
    for verdict in verdicts:
        held_out = "" if verdict["held_out"] is None else f"{verdict['held_out']:.4f}"
        lines.append(
            _row(
                verdict["name"],
                f"{verdict['speedup']:.2f}x",
                f"{verdict['mean_layers']:.1f}",
                f"{verdict['predicted']:.4f}",
                f"{verdict['measured']:.4f}",
                held_out,
            )
        )
    lines += ["", *_remarks(verdicts), f"next: {shlex.join(_next(document, schedule_file))}"]
    return "\n".join(lines)


def _next(document: dict[str, Any], schedule_file: Path) -> list[str]:
    """The call that tunes on, with the same prompts."""
    options = document["options"]
    given = [(f"--{name.replace('_', '-')}", options[name]) for name in _PROMPT if options[name] not in (None, False)]
    same = [word for flag, value in given for word in ([flag] if value is True else [flag, value])]
    command = ["skipdecode", "tune", document["model"], "--schedule", str(schedule_file), *same]
    return [*command, "--train", options["data"], "--dev", "dev.jsonl", "--out", "tuned"]


def _row(name: str, *cells: str) -> str:
    widths = (22, 12, 10, 10, 10)
    return f"{name:<28}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _remarks(verdicts: list[dict[str, Any]]) -> list[str]:
    """What the numbers do not say by themselves."""
    chosen = verdicts[-1]
    lines = [
        f"the prediction was off by {chosen['predicted'] - chosen['measured']:+.4f} for {chosen['name']}: it takes a "
        "token's loss to depend on its own depth, not on that of the tokens before it"
    ]
    key = "measured" if chosen["held_out"] is None else "held_out"
    better = [v["name"] for v in verdicts if v["name"] in ("paper", "even") and v[key] < chosen[key]]
    if better:
        where = "these records" if key == "measured" else "the records held out"
        lines.append(f"on {where} the calibrated schedule is no better than: {', '.join(better)}")
    return lines
