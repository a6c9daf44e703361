"""What `skipdecode plan` prints: a few lines for people, or one JSON document."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipdecode.cli.plan import Config
    from skipdecode.performance.cost_source import CostSource
    from skipdecode.performance.solve import Assessment
    from skipdecode.schedule import Schedule

__all__ = ["Plan", "document", "report"]

_MARGIN = 10


@dataclass(frozen=True)
class Plan:
    """A schedule with what it was planned for and what it brings; `reason` says why it is flat, if it had to be."""

    config: Config
    source: CostSource
    schedule: Schedule
    figures: Assessment
    reason: str | None
    prompt_len: int
    new_tokens: int


def report(plan: Plan, width: int) -> str:
    """The plan in lines of at most `width` characters, commands apart."""
    rows = _rows(plan) | {"cost": plan.source.origin}
    lines = [
        textwrap.fill(f"{name:<{_MARGIN}}{text}", width, subsequent_indent=" " * _MARGIN) for name, text in rows.items()
    ]
    return "\n".join([*lines, *(f"{name:<{_MARGIN}}{command}" for name, command in _commands(plan).items())])


def _rows(plan: Plan) -> dict[str, str]:
    config, schedule, figures, geometry = plan.config, plan.schedule, plan.figures, plan.source.geometry
    first, last = schedule.budgets[0], schedule.budgets[-1]
    depth = f"{first}" if first == last else f"{first} falling to {last}"
    other, other_speedup = (
        ("a stream of mixed ages", figures.speedup_continuous)
        if figures.use == "lockstep"
        else ("rows in lockstep", figures.speedup_lockstep)
    )
    kv_full = figures.kv_bytes_held + figures.kv_bytes_saved
    return {
        "model": f"{config.model}: {geometry.num_layers} layers, {_size(geometry.weight_bytes())} of weights in "
        f"{plan.source.dtype}",
        "for": f"{config.batch} x ({plan.prompt_len} prompt + {plan.new_tokens} new tokens), {figures.use}",
        "schedule": f"{schedule.name}: {depth} of {schedule.num_layers} layers, left out {config.order}"
        + (f"; {plan.reason}" if plan.reason else ""),
        "nominal": f"{figures.nominal_speedup:.2f}x (all layers / layers run by a token)",
        "real": f"{figures.speedup:.2f}x in decoding time ({other}: {other_speedup:.2f}x)",
        "bound": f"{figures.bound:.2f}x with {figures.least_budget} layers, the fewest; {figures.bound_at_half:.2f}x "
        f"with {figures.half_budget}",
        "step": f"{_time(figures.step_seconds_full)} at full depth, of which {figures.fixed_share:.0%} cannot be "
        f"skipped; {_time(figures.step_seconds)} with {figures.layers_per_step:.1f} layers, the mean",
        "KV cache": f"{_size(figures.kv_bytes_held)} at the end; {_size(figures.kv_bytes_saved)} "
        f"({figures.kv_bytes_saved / kv_full:.0%}) saved",
    }


def _commands(plan: Plan) -> dict[str, str]:
    """What to run next: keep the schedule, or use the file that holds it."""
    config = plan.config
    if config.out is None:
        return {"next": _plan_command(config) + " --out schedule.json"}
    model, file = shlex.quote(config.model), shlex.quote(config.out)
    generate = f"skipdecode generate {model} --schedule {file} --max-new-tokens {plan.new_tokens} 'Your prompt'"
    tune = f"skipdecode tune {model} --schedule {file} --train records.jsonl"
    return {"next": generate} if plan.schedule.is_full else {"next": generate, "tune": tune}


def _plan_command(config: Config) -> str:
    """The command line that made this plan."""
    words = ["skipdecode", "plan", config.model]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is MISSING or value == field.default:
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def document(plan: Plan) -> dict[str, Any]:
    """The plan, JSON-ready."""
    source = plan.source
    return {
        "model": plan.config.model,
        "dtype": source.dtype,
        "weight_bytes": source.geometry.weight_bytes(),
        "batch": plan.config.batch,
        "prompt_len": plan.prompt_len,
        "new_tokens": plan.new_tokens,
        "schedule": plan.schedule.to_dict(),
        "figures": plan.figures.to_dict(),
        "reason": plan.reason,
        "cost": source.cost.to_dict(),
        "cost_origin": source.origin,
        "next": _commands(plan)["next"],
    }


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
