"""What `skipdecode plan` shows: the plan as text, and as a JSON document."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.arguments import command_line
from skipdecode.cli.columns import speedups
from skipdecode.performance.solve import Assessment
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.cli.plan import Config
    from skipdecode.performance.cost_source import CostSource

__all__ = ["Plan", "document", "report"]


@dataclass(frozen=True)
class Plan:
    """A schedule with what it was planned for and what it brings.

    `reason` says why it is flat, if it had to be; `tuned` whether the weights are ready for it.
    """

    config: Config
    source: CostSource
    schedule: Schedule
    figures: Assessment
    reason: str | None
    tuned: bool


def report(plan: Plan, width: int) -> str:
    """The plan in lines of at most `width` characters, commands apart."""
    figures = plan.figures
    gains = {
        "request": figures.predicted_request_speedup,
        "decode": figures.predicted_decode_speedup,
        "nominal": figures.nominal_speedup,
    }

    def filled(rows: dict[str, str]) -> list[str]:
        return [textwrap.fill(f"{name:<10}{text}", width, subsequent_indent=" " * 10) for name, text in rows.items()]

    table = speedups(["predicted"], {name: [f"{gain:.2f}x"] for name, gain in gains.items()})
    commands = [f"{name:<10}{command}" for name, command in _commands(plan).items()]
    return "\n".join([*filled(_subject(plan)), "", *table, "", *filled(_details(plan)), *commands])


def _subject(plan: Plan) -> dict[str, str]:
    config, schedule, geometry = plan.config, plan.schedule, plan.source.geometry
    first, last = schedule.budgets[0], schedule.budgets[-1]
    depth = f"{first}" if first == last else f"{first} falling to {last}"
    return {
        "model": f"{config.model}: {geometry.num_layers} layers, {_size(geometry.weight_bytes())} of weights in "
        f"{plan.source.dtype}",
        "for": f"{config.batch} x ({config.prompt_len} prompt + {config.new_tokens} new tokens), {config.use}: the "
        f"first new token comes with the prompt, each other from a step, one at each of {config.seq_len} positions; "
        "for other work give --batch, --prompt-len, --seq-len, --use",
        "schedule": f"{schedule.name}: {depth} of {schedule.num_layers} layers, left out {config.order}"
        + (f"; {plan.reason}" if plan.reason else ""),
        "prompts": _prompts(plan),
    }


def _prompts(plan: Plan) -> str:
    """What prompts run, and why."""
    schedule, config = plan.schedule, plan.config
    run, projected = len(schedule.prompt_layers()), len(schedule.projected)
    text = f"{run} of {schedule.num_layers} layers"
    if projected:
        text += f", and keys and values alone of {projected} above them that the first new token runs"
    if config.target_speedup is None or config.prompt_layers is not None or config.phase == "decode":
        return text
    return (
        f"{text}; by this rule: new tokens give up layers first, to half depth, then prompts, where that pays, to half "
        "depth, then both alike (--prompt-layers sets them; skipdecode calibrate learns them)"
    )


def _details(plan: Plan) -> dict[str, str]:
    figures = plan.figures
    other = (
        f"{figures.decode_speedup_continuous:.2f}x for a stream of rows of mixed ages"
        if plan.config.use == "lockstep"
        else f"{figures.decode_speedup_lockstep:.2f}x for rows in lockstep"
    )
    most = f"at most {figures.bound:.2f}x, with {figures.least_budget} layers, the fewest"
    kv_full = figures.kv_bytes_held + figures.kv_bytes_saved
    return {
        "limits": f"request at most {figures.request_bound:.2f}x behind these prompts, decode {most}; "
        f"{figures.bound_at_half:.2f}x with {figures.half_budget}" + (f"; {other}" if plan.config.batch > 1 else ""),
        "request": f"{_time(figures.request_seconds_full)} at full depth; {_time(figures.request_seconds)} so, "
        f"{figures.prompt_share:.0%} of it in prompts",
        "step": f"{_time(figures.step_seconds_full)} at full depth, of which {figures.fixed_share:.0%} cannot be "
        f"skipped; {_time(figures.step_seconds)} with {figures.layers_per_step:.1f} layers, the mean",
        "KV cache": f"{_size(figures.kv_bytes_held)} at the end; {_size(figures.kv_bytes_saved)} "
        f"({figures.kv_bytes_saved / kv_full:.0%}) saved",
        "times": plan.source.origin,
    }


def _commands(plan: Plan) -> dict[str, str]:
    """What to run next: keep the schedule; or tune under it, if the weights were not, and use what came of it."""
    config = plan.config
    if config.out is None:
        return {"next": command_line("plan", config) + " --out schedule.json"}
    # A file is a config without weights: whose they are is for the user to say.
    model = "MODEL" if Path(config.model).is_file() else shlex.quote(config.model)
    file, rest = shlex.quote(config.out), f"--max-new-tokens {config.new_tokens} 'Your prompt'"
    if plan.tuned:
        return {"next": f"skipdecode generate {model} --schedule {file} --compare {rest}"}
    merge = "" if config.ref.adapter is None else " --merge"
    data = "--train train.jsonl --dev dev.jsonl --prompt-field prompt --response-field response"
    tune = f"skipdecode tune {model} --schedule {file} {data} --out tuned{merge}"
    return {"next": tune, "then": f"skipdecode generate tuned --compare {rest}"}


def document(plan: Plan) -> dict[str, Any]:
    """The plan, JSON-ready."""
    config, source = plan.config, plan.source
    return {
        "model": config.model,
        "dtype": source.dtype,
        "weight_bytes": source.geometry.weight_bytes(),
        "batch": config.batch,
        "prompt_len": config.prompt_len,
        "new_tokens": config.new_tokens,
        "phase": config.phase,
        "schedule": plan.schedule.to_dict(),
        "figures": asdict(plan.figures),
        "reason": plan.reason,
        "tuned": plan.tuned,
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
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
