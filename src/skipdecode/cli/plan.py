"""A schedule for a model and a speed target, as a picture, with the speed-ups to expect of it.

Give one target: a decode speed-up in wall-clock time (--target-speedup), the paper's nominal one (--nominal-speedup),
or the exits themselves (--min-exit-layer and --max-exit-layer). Nothing is generated. Where the model's weights are at
hand, a short calibration times its decode steps; otherwise they are predicted from its config.

Three speed-ups are told. Nominal: all layers / layers that a new token runs. Decode: time of the steps after the
prompt, full depth / schedule. Request: the same of prompt and steps together. The last two are predicted for the work
that --batch, --prompt-len, --seq-len and --use describe; generate --compare measures them on yours.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skipdecode.cli.arguments import command_line
from skipdecode.cli.columns import speedups
from skipdecode.cli.options import MODEL, EngineOptions, ModelOptions, check_files
from skipdecode.common.files import write_whole
from skipdecode.common.options import option
from skipdecode.errors import UsageError
from skipdecode.models.loading.locate import adapter_dir
from skipdecode.performance.cost import Use
from skipdecode.performance.solve import Assessment, assess, solve, why_flat
from skipdecode.schedule import Schedule
from skipdecode.schedule.draw import schedule_picture, shows_blocks
from skipdecode.schedule.order import Order, top_down

if TYPE_CHECKING:
    from skipdecode.performance.cost import CostModel
    from skipdecode.performance.cost_source import CostSource

__all__ = ["Config", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ModelOptions, EngineOptions):
    """Options of `skipdecode plan`."""

    model: str = option(f"{MODEL}, or the file of a config (JSON)", positional=True)
    target_speedup: float | None = option(
        "decode speed-up in wall-clock time; the layers that run are solved for it", default=None, least=1
    )
    nominal_speedup: float | None = option(
        "nominal speed-up, the paper's: all layers / mean layers run; the gain in time is lower", default=None, least=1
    )
    min_exit_layer: int | None = option("layers that run at the last position", default=None, least=1)
    max_exit_layer: int | None = option("layers that run at the first position", default=None, least=1)
    seq_len: int = option(
        "generation positions over which the depth falls, and new tokens of a row but the first, which comes with the "
        "prompt; best near the real output length",
        default=64,
        least=1,
    )
    warmup_layers: int = option("first layers that always run", default=1, least=0)
    spread: float = option(
        "decay: from mean * (1 + spread) to mean * (1 - spread) layers", default=1 / 3, least=0, below=1
    )
    order: Order = option("order in which layers are left out", default="bottom-up")
    use: Use = option(
        "lockstep: all rows of a batch start together; continuous: a stream of rows of mixed ages", default="lockstep"
    )
    batch: int = option("rows decoded together", default=1, least=1)
    prompt_len: int = option("prompt tokens of a row", default=64, least=1)
    measure: bool | None = option(
        "load the weights and time decode steps, or predict (default: measure if that fetches nothing)", default=None
    )
    remeasure: bool = option("time decode steps again, whatever an earlier calibration found", default=False)
    json: bool = option("print one JSON document", default=False)
    png: str | None = option("file for the picture", default=None)
    out: str | None = option("file for the schedule (JSON), which skipdecode generate --schedule takes", default=None)


def run(config: Config) -> int:
    """Plan, print, and write what was asked for."""
    _check(config)
    from skipdecode.models.loading.hub import choose_device
    from skipdecode.performance.cost_source import find_cost, find_geometry

    if config.target_speedup is None:
        geometry, _ = find_geometry(config.model, config.dtype, choose_device(config.device))
        _schedule(config, geometry.num_layers)  # refuses what does not fit before weights are loaded
    source = find_cost(
        config.model,
        batch=config.batch,
        prompt_len=config.prompt_len,
        dtype=config.dtype,
        device=config.device,
        measure=config.measure,
        engine=config.engine,
        weights=config.weights,
        remeasure=config.remeasure,
    )
    schedule = _schedule(config, source.cost.num_layers, source.cost)
    figures = assess(
        schedule,
        source.cost,
        source.geometry,
        use=config.use,
        prompt_len=config.prompt_len,
        new_tokens=_tokens(config),
    )
    plan = _Plan(config, source, schedule, figures, _reason(config, schedule, source.cost), _tuned(config, schedule))
    if config.out is not None:
        schedule.save(config.out)
    if config.png is not None:
        from skipdecode.reporting.plots import depth_figure, png

        title = f"{config.model}: {figures.nominal_speedup:.2f}x nominal, "
        title += f"{figures.predicted_decode_speedup:.2f}x decode predicted"
        write_whole(config.png, png(depth_figure(schedule, config.seq_len, title=title)))
    if config.json:
        print(json.dumps(_document(plan), indent=2))
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        blocks = shows_blocks(sys.stdout.encoding)
        print(schedule_picture(schedule, config.seq_len, width=min(80, columns), blocks=blocks))
        print(_report(plan, width=max(60, min(100, columns))))
    return 0


# ---------------------------------------------------------------------- the schedule


def _check(config: Config) -> None:
    explicit = (config.min_exit_layer, config.max_exit_layer)
    if (explicit[0] is None) != (explicit[1] is None):
        raise UsageError("--min-exit-layer and --max-exit-layer go together: give both")
    given = [config.target_speedup is not None, config.nominal_speedup is not None, explicit[0] is not None]
    if sum(given) != 1:
        raise UsageError(
            f"{'no' if not any(given) else 'more than one'} target was given: give one of --target-speedup, "
            "--nominal-speedup, or --min-exit-layer with --max-exit-layer"
        )
    check_files(config.out, picture=config.png)


def _tokens(config: Config) -> int:
    """Generated tokens of a row: as many as run each position once."""
    return config.seq_len + 1


def _schedule(config: Config, layers: int, cost: CostModel | None = None) -> Schedule:
    """The schedule asked for; a wall-clock target is solved for with the cost."""
    warmup = config.warmup_layers
    order = top_down(layers, warmup) if config.order == "top-down" else None
    shared: dict[str, Any] = {"seq_len": config.seq_len, "warmup_layers": warmup, "drop_order": order}
    if cost is not None and config.target_speedup is not None:
        schedule = _solved(config, cost, config.use, order)
    elif config.nominal_speedup is not None:
        schedule = Schedule.from_speedup(layers, config.nominal_speedup, spread=config.spread, **shared)
    else:
        shared |= {"min_exit_layer": config.min_exit_layer, "max_exit_layer": config.max_exit_layer}
        schedule = Schedule.paper(layers, **shared)
    if config.order == "even":
        # The order aims at the least budget, which is known only now; which layers run does not change the cost.
        return schedule.reordered("even")
    return schedule


def _solved(config: Config, cost: CostModel, use: Use, order: tuple[int, ...] | None) -> Schedule:
    return solve(
        cost,
        cast("float", config.target_speedup),
        config.seq_len,
        phase="decode",
        use=use,
        warmup_layers=config.warmup_layers,
        spread=config.spread,
        drop_order=order,
        prompt_len=config.prompt_len,
    )


def _reason(config: Config, schedule: Schedule, cost: CostModel) -> str | None:
    """Why a schedule solved for continuous use is flat."""
    if config.target_speedup is None or config.use != "continuous":
        return None
    linear = _solved(config, cost, "lockstep", schedule.drop_order)
    return why_flat(cost, linear, config.prompt_len, _tokens(config))


def _tuned(config: Config, schedule: Schedule) -> bool:
    from skipdecode.models.loading.hub import load_recipe
    from skipdecode.performance.cost_source import weights_at_hand

    # Nothing is fetched to find out; a config alone has no weights.
    known = not Path(config.model).is_file() and weights_at_hand(config.model)
    recipe = load_recipe(config.model) if known else None
    return schedule.fits_weights(() if recipe is None else recipe.tuned_under)


# ---------------------------------------------------------------------- what is shown


@dataclass(frozen=True)
class _Plan:
    """A schedule with what it was planned for and what it brings.

    `reason` says why it is flat, if it had to be; `tuned` whether the weights are ready for it.
    """

    config: Config
    source: CostSource
    schedule: Schedule
    figures: Assessment
    reason: str | None
    tuned: bool


def _report(plan: _Plan, width: int) -> str:
    """The plan in lines of at most `width` characters, commands apart."""
    figures = plan.figures
    gains = {
        "nominal": figures.nominal_speedup,
        "decode": figures.predicted_decode_speedup,
        "request": figures.predicted_request_speedup,
    }

    def filled(rows: dict[str, str]) -> list[str]:
        return [textwrap.fill(f"{name:<10}{text}", width, subsequent_indent=" " * 10) for name, text in rows.items()]

    table = speedups(["predicted"], {name: [f"{gain:.2f}x"] for name, gain in gains.items()})
    commands = [f"{name:<10}{command}" for name, command in _commands(plan).items()]
    return "\n".join([*filled(_subject(plan)), "", *table, "", *filled(_details(plan)), *commands])


def _subject(plan: _Plan) -> dict[str, str]:
    config, schedule, geometry = plan.config, plan.schedule, plan.source.geometry
    first, last = schedule.budgets[0], schedule.budgets[-1]
    depth = f"{first}" if first == last else f"{first} falling to {last}"
    return {
        "model": f"{config.model}: {geometry.num_layers} layers, {_size(geometry.weight_bytes())} of weights in "
        f"{plan.source.dtype}",
        "for": f"{config.batch} x ({config.prompt_len} prompt + {_tokens(config)} new tokens), {config.use}: the first "
        f"new token comes with the prompt, each other from a step, one at each of {config.seq_len} positions; for "
        "other work give --batch, --prompt-len, --seq-len, --use",
        "schedule": f"{schedule.name}: {depth} of {schedule.num_layers} layers, left out {config.order}"
        + (f"; {plan.reason}" if plan.reason else ""),
    }


def _details(plan: _Plan) -> dict[str, str]:
    figures = plan.figures
    other = (
        f"{figures.decode_speedup_continuous:.2f}x for a stream of rows of mixed ages"
        if plan.config.use == "lockstep"
        else f"{figures.decode_speedup_lockstep:.2f}x for rows in lockstep"
    )
    most = f"at most {figures.bound:.2f}x, with {figures.least_budget} layers, the fewest"
    kv_full = figures.kv_bytes_held + figures.kv_bytes_saved
    return {
        "limits": f"decode {most}; {figures.bound_at_half:.2f}x with {figures.half_budget}"
        + (f"; {other}" if plan.config.batch > 1 else ""),
        "step": f"{_time(figures.step_seconds_full)} at full depth, of which {figures.fixed_share:.0%} cannot be "
        f"skipped; {_time(figures.step_seconds)} with {figures.layers_per_step:.1f} layers, the mean",
        "KV cache": f"{_size(figures.kv_bytes_held)} at the end; {_size(figures.kv_bytes_saved)} "
        f"({figures.kv_bytes_saved / kv_full:.0%}) saved",
        "times": plan.source.origin,
    }


def _commands(plan: _Plan) -> dict[str, str]:
    """What to run next: keep the schedule; or tune under it, if the weights were not, and use what came of it."""
    config = plan.config
    if config.out is None:
        return {"next": command_line("plan", config) + " --out schedule.json"}
    # A file is a config without weights: whose they are is for the user to say.
    model = "MODEL" if Path(config.model).is_file() else shlex.quote(config.model)
    file, rest = shlex.quote(config.out), f"--max-new-tokens {_tokens(config)} 'Your prompt'"
    if plan.tuned:
        return {"next": f"skipdecode generate {model} --schedule {file} --compare {rest}"}
    merge = "" if adapter_dir(config.model) is None else " --merge"
    data = "--train train.jsonl --dev dev.jsonl --prompt-field prompt --response-field response"
    tune = f"skipdecode tune {model} --schedule {file} {data} --out tuned{merge}"
    return {"next": tune, "then": f"skipdecode generate tuned --compare {rest}"}


def _document(plan: _Plan) -> dict[str, Any]:
    """The plan, JSON-ready."""
    config, source = plan.config, plan.source
    return {
        "model": config.model,
        "dtype": source.dtype,
        "weight_bytes": source.geometry.weight_bytes(),
        "batch": config.batch,
        "prompt_len": config.prompt_len,
        "new_tokens": _tokens(config),
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
    return f"{seconds * 1e3:.3g} ms"
