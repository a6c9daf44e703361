"""A schedule for a model and a speed target, as a picture, with the speed-ups to expect of it.

Give one target: a speed-up in wall-clock time (--target-speedup, of the whole request, or with --phase decode of the
steps behind the prompt), the paper's nominal one (--nominal-speedup), the exits themselves (--min-exit-layer and
--max-exit-layer), or a schedule that there is (--schedule). A fit beside that schedule, or in the checkpoint, counts.
Nothing is generated. Where the model's weights are at hand, a short calibration times its prompts and decode steps;
otherwise they are predicted from its config.

Three speed-ups are told. Request: time of prompt and steps together, full depth / schedule. Decode: the same of the
steps after the prompt. Nominal: all layers / layers that a new token runs. The first two are predicted for the work
that --batch, --prompt-len, --seq-len and --use describe; generate --compare measures them on yours.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skipdecode.cli.arguments import command_line
from skipdecode.cli.columns import speedups
from skipdecode.cli.options import MODEL, EngineOptions
from skipdecode.cli.paths import OVERWRITE
from skipdecode.common.files import write_whole
from skipdecode.common.options import Reads, Writes, option
from skipdecode.errors import UsageError
from skipdecode.models.carried import schedule_file
from skipdecode.models.loading.hub import choose_device
from skipdecode.models.loading.ref import model_files
from skipdecode.performance.cost import Phase, Use
from skipdecode.performance.solve import Assessment, Auto, assess, solve, why_flat
from skipdecode.schedule import Schedule
from skipdecode.schedule.draw import schedule_picture, shows_blocks
from skipdecode.schedule.order import PROMPT_SETS, Order, PromptDepth, prompt_set, top_down

if TYPE_CHECKING:
    from skipdecode.models.fit import Fit
    from skipdecode.performance.cost import CostModel
    from skipdecode.performance.cost_source import CostSource
    from skipdecode.performance.geometry import ModelGeometry

__all__ = ["Config", "run"]

_MOST_PROMPT_TOKENS = 2**20  # of a batch: its forwards are added up one by one


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions):
    """Options of `skipdecode plan`."""

    model: str = option(f"{MODEL}, or the file of a config (JSON)", positional=True, path=Reads(model_files))
    target_speedup: float | None = option(
        "speed-up in wall-clock time, of what --phase says; the layers that run are solved for it",
        default=None,
        least=1,
    )
    phase: Phase = option(
        "what --target-speedup is of; request: prompt and steps together; decode: the steps after the prompt",
        default="request",
    )
    nominal_speedup: float | None = option(
        "nominal speed-up, the paper's: all layers / mean layers run; the gain in time is lower", default=None, least=1
    )
    schedule: str | None = option(
        "file of a schedule, or the name of a bundled one, whose figures are told; a skipdecode.fit beside it counts",
        default=None,
        parse=schedule_file,
        path=Reads(),
    )
    min_exit_layer: int | None = option("layers that run at the last position", default=None, least=1)
    max_exit_layer: int | None = option("layers that run at the first position", default=None, least=1)
    seq_len: int = option(
        "generation positions over which the depth falls, and new tokens of a row but the first, which comes with the "
        "prompt; best near the real output length",
        default=64,
        least=1,
        most=2**15,
    )
    prompt_layers: str | None = option(
        f"layers that prompt tokens run: {PROMPT_SETS} (default: full; for a request's target as many as the line "
        "'prompts' says)",
        default=None,
    )
    warmup_layers: int = option("first layers that always run", default=1, least=0)
    spread: float = option(
        "decay: from mean * (1 + spread) to mean * (1 - spread) layers", default=1 / 3, least=0, below=1
    )
    order: Order = option("order in which layers are left out", default="bottom-up")
    use: Use = option(
        "lockstep: all rows of a batch start together; continuous: a stream of rows of mixed ages", default="lockstep"
    )
    batch: int = option("rows decoded together", default=1, least=1, most=1024)
    prompt_len: int = option("prompt tokens of a row", default=64, least=1, most=_MOST_PROMPT_TOKENS)
    measure: bool | None = option(
        "load the weights and time prompts and steps, or predict (default: measure if that fetches nothing)",
        default=None,
    )
    remeasure: bool = option("time prompts and steps again, whatever an earlier calibration found", default=False)
    json: bool = option("print one JSON document", default=False)
    png: str | None = option("file for the picture", default=None, path=Writes())
    out: str | None = option(
        "file for the schedule (JSON), which skipdecode generate --schedule takes", default=None, path=Writes()
    )
    overwrite: bool = option(OVERWRITE, default=False)

    @property
    def new_tokens(self) -> int:
        """Generated tokens of a row: as many as run each position once."""
        return self.seq_len + 1


def run(config: Config) -> int:
    """Plan, print, and write what was asked for."""
    _check(config)
    from skipdecode.performance.cost_source import find_cost, find_geometry

    geometry, _ = find_geometry(config.ref, config.dtype, choose_device(config.device))
    _schedule(config, geometry.num_layers)  # refuses what does not fit before weights are loaded
    fit = _fit(config, geometry)
    config.use_threads()
    source = find_cost(
        config.ref,
        batch=config.batch,
        prompt_len=config.prompt_len,
        dtype=config.dtype,
        device=config.device,
        measure=config.measure,
        engine=config.engine,
        quantization=config.quantization,
        remeasure=config.remeasure,
    )
    if fit is not None:
        source = replace(source, cost=source.cost.with_fit(source.geometry, fit.rank, fit.taps))
    schedule = _schedule(config, source.cost.num_layers, source.cost)
    figures = assess(
        schedule,
        source.cost,
        source.geometry,
        use=config.use,
        prompt_len=config.prompt_len,
        new_tokens=config.new_tokens,
    )
    reason, tuned = _reason(config, schedule, source.cost), _tuned(config, schedule)
    plan = _Plan(config, source, schedule, figures, reason, tuned, fit)
    if config.out is not None:
        schedule.save(config.out)
    if config.png is not None:
        from skipdecode.reporting.charts import png
        from skipdecode.reporting.plots import depth_figure

        title = f"{config.model}: predicted {figures.predicted_request_speedup:.2f}x request, "
        title += f"{figures.predicted_decode_speedup:.2f}x decode; nominal {figures.nominal_speedup:.2f}x"
        write_whole(config.png, png(depth_figure({title: schedule}, config.seq_len)))
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
    targets = (config.target_speedup, config.nominal_speedup, explicit[0], config.schedule)
    given = [target is not None for target in targets]
    if config.phase == "decode" and config.target_speedup is None:
        raise UsageError("--phase says what --target-speedup is of: give both, or neither")
    if sum(given) != 1:
        raise UsageError(
            f"{'no' if not any(given) else 'more than one'} target was given: give one of --target-speedup, "
            "--nominal-speedup, --min-exit-layer with --max-exit-layer, or --schedule"
        )
    if config.batch * config.prompt_len > _MOST_PROMPT_TOKENS:
        raise UsageError(
            f"--batch {config.batch} --prompt-len {config.prompt_len} are {config.batch * config.prompt_len} prompt "
            f"tokens a batch: give {_MOST_PROMPT_TOKENS} at most"
        )
    if config.png is not None:
        from skipdecode.reporting.charts import check_matplotlib

        check_matplotlib()


def _fit(config: Config, geometry: ModelGeometry) -> Fit | None:
    """The fit beside the schedule, else the checkpoint's; None where there is none. Its weights are not compared."""
    from skipdecode.models.fit import Fit

    file = None if Path(config.model).is_file() else config.ref.fit
    if file is None:
        return None
    fit = Fit.load(file)
    fit.check_sizes(geometry.num_layers, geometry.hidden_size, f"fit {file}")
    if config.schedule is not None:
        fit.check_prompts(Schedule.load(config.schedule), f"fit {file}")
    return fit


def _schedule(config: Config, layers: int, cost: CostModel | None = None) -> Schedule:
    """The schedule asked for; a wall-clock target is solved for with the cost, without it full depth is checked."""
    warmup = config.warmup_layers
    order = top_down(layers, warmup) if config.order == "top-down" else None
    asked = None if config.prompt_layers is None else prompt_set(config.prompt_layers, layers)
    shared: dict[str, Any] = {"seq_len": config.seq_len, "warmup_layers": warmup, "drop_order": order}
    shared["prompt"] = asked or "full"
    if config.schedule is not None:
        schedule = Schedule.load(config.schedule)
        schedule.check_fits(layers)
        return schedule if asked is None else schedule.with_prompt(asked)
    if cost is not None and config.target_speedup is not None:
        schedule = _solved(config, cost, config.use, order, asked or "auto")
    elif config.nominal_speedup is not None:
        schedule = Schedule.from_speedup(layers, config.nominal_speedup, spread=config.spread, **shared)
    elif config.target_speedup is not None:
        return Schedule.constant(layers, layers, warmup_layers=warmup, prompt=asked or "full")
    else:
        shared |= {"min_exit_layer": config.min_exit_layer, "max_exit_layer": config.max_exit_layer}
        schedule = Schedule.paper(layers, **shared)
    if config.order == "even":
        # The order aims at the least budget, which is known only now. No step costs another time for it, and prompts
        # that run the lowest layers have no more to project: bottom up, new tokens run the highest.
        return schedule.reordered("even")
    return schedule


def _solved(
    config: Config, cost: CostModel, use: Use, order: tuple[int, ...] | None, prompt: PromptDepth | Auto
) -> Schedule:
    return solve(
        cost,
        cast("float", config.target_speedup),
        config.seq_len,
        phase=config.phase,
        prompt=prompt,
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
    linear = _solved(config, cost, "lockstep", schedule.drop_order, schedule.prompt)
    return why_flat(cost, linear, config.prompt_len, config.new_tokens, config.phase)


def _tuned(config: Config, schedule: Schedule) -> bool:
    # Nothing is fetched to find out; a config alone has no weights.
    known = not Path(config.model).is_file() and config.ref.has_weights()
    recipe = config.ref.recipe if known else None
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
    fit: Fit | None = None

    @property
    def fit_bytes(self) -> float:
        """Bytes of the fit in memory, in the weights' type."""
        numbers = () if self.fit is None else self.fit.parameters()
        return sum(p.numel() for p in numbers) * self.source.geometry.dtype_bytes


def _report(plan: _Plan, width: int) -> str:
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


def _subject(plan: _Plan) -> dict[str, str]:
    config, schedule, geometry = plan.config, plan.schedule, plan.source.geometry
    first, last = schedule.budgets[0], schedule.budgets[-1]
    depth = f"{first}" if first == last else f"{first} falling to {last}"
    return {
        "model": f"{config.model}: {geometry.num_layers} layers, {_size(geometry.weight_bytes())} of weights in "
        f"{plan.source.dtype}",
        "for": f"{config.batch} x ({config.prompt_len} prompt + {config.new_tokens} new tokens), {config.use}: the "
        f"first new token comes with the prompt, each other from a step, one at each of {config.seq_len} positions; "
        "for other work give --batch, --prompt-len, --seq-len, --use",
        "schedule": f"{schedule.name}: {depth} of {schedule.num_layers} layers, "
        + (f"left out {config.order}" if config.schedule is None else f"from {config.schedule}")
        + (f"; {plan.reason}" if plan.reason else ""),
        "prompts": _prompts(plan),
    }


def _prompts(plan: _Plan) -> str:
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
        "limits": f"request at most {figures.request_bound:.2f}x behind these prompts, decode {most}; "
        f"{figures.bound_at_half:.2f}x with {figures.half_budget}" + (f"; {other}" if plan.config.batch > 1 else ""),
        "request": f"{_time(figures.request_seconds_full)} at full depth; {_time(figures.request_seconds)} so, "
        f"{figures.prompt_share:.0%} of it in prompts",
        "step": f"{_time(figures.step_seconds_full)} at full depth, of which {figures.fixed_share:.0%} cannot be "
        f"skipped; {_time(figures.step_seconds)} with {figures.layers_per_step:.1f} layers, the mean",
        "KV cache": f"{_size(figures.kv_bytes_held)} at the end; {_size(figures.kv_bytes_saved)} "
        f"({figures.kv_bytes_saved / kv_full:.0%}) saved",
        **({} if plan.fit is None else {"fit": _fitted(plan)}),
        "times": plan.source.origin,
    }


def _fitted(plan: _Plan) -> str:
    """What the fit takes, in memory and of a layer's time."""
    fit, cost = plan.fit, plan.source.cost
    bridges = f"{len(fit.bridges)} bridges of rank {fit.rank:.0f}" if fit is not None else ""
    text = f"{_size(plan.fit_bytes)} in memory; {bridges}, each {cost.bridge_share:.1%} of the layer that a token skips"
    if plan.schedule.projected:
        text += f"; keys and values of prompts take {1 + cost.taps} projection{'s' if cost.taps else ''} a layer"
    return text + "; counted above"


def _commands(plan: _Plan) -> dict[str, str]:
    """What to run next: keep the schedule; or prepare or tune the model, and use what came of it."""
    config = plan.config
    if config.schedule is not None:
        model, file = shlex.quote(config.model), shlex.quote(config.schedule)
        rest = f"--max-new-tokens {config.new_tokens} 'Your prompt'"
        return {"next": f"skipdecode generate {model} --schedule {file} {rest}"}
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
    found = {"next": tune, "then": f"skipdecode generate tuned --compare {rest}"}
    if config.target_speedup is None or config.phase == "decode":
        return found
    # With few records an order of layers that is learned on them loses less than the plan's.
    target = f"--target-speedup {config.target_speedup:g} --batch {config.batch}"
    return {"next": f"skipdecode prepare {model} {target} {data} --out ready", "or": tune, "then": found["then"]}


def _document(plan: _Plan) -> dict[str, Any]:
    """The plan, JSON-ready."""
    config, source = plan.config, plan.source
    return {
        "model": config.model,
        "dtype": source.dtype,
        "weight_bytes": source.geometry.weight_bytes(),
        "fit_bytes": plan.fit_bytes,
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
