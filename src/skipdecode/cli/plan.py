"""Find a schedule for a model and a speed target; shows it as a picture, with the speed-ups to expect.

Give one target: a wall-clock speed-up (--target-speedup, of whole requests, or with --phase decode of the steps after
the prompt), a nominal speed-up (--nominal-speedup), numbers of layers (--min-exit-layer and --max-exit-layer), or an
existing schedule (--schedule). A fit beside that schedule or in the checkpoint is counted. Nothing is generated. If the
model's weights are available, prompts and decode steps are timed; otherwise their times are predicted from the config.

Three speed-ups are shown. Request: time of prompt and steps, full depth / schedule. Decode: time of the steps after the
prompt. Nominal: all layers / layers that a new token runs. The first two are predicted for the workload of --batch,
--prompt-len, --seq-len and --use; generate --compare measures them on your prompts.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from skipdecode.cli.arguments import command_line
from skipdecode.cli.options import MODEL, EngineOptions, ScheduleOptions
from skipdecode.cli.paths import OVERWRITE
from skipdecode.common.columns import speedups
from skipdecode.common.files import write_whole
from skipdecode.common.options import Reads, Writes, option
from skipdecode.errors import UsageError
from skipdecode.models.loading.hub import choose_device
from skipdecode.models.loading.ref import model_files
from skipdecode.performance.cost import Phase, Use
from skipdecode.performance.solve import Assessment, Auto, assess, solve, why_flat
from skipdecode.schedule import Schedule
from skipdecode.schedule.draw import schedule_picture, shows_blocks
from skipdecode.schedule.order import Order, PromptDepth, prompt_set, top_down

if TYPE_CHECKING:
    from skipdecode.models.fit import Fit
    from skipdecode.performance.cost import CostModel
    from skipdecode.performance.cost_source import CostSource
    from skipdecode.performance.geometry import ModelGeometry

_MOST_PROMPT_TOKENS = 2**20  # in a batch: the cost of its forwards is added one by one
_TARGETS = ("target_speedup", "nominal_speedup", "min_exit_layer", "schedule")


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions, ScheduleOptions):
    """Options of `skipdecode plan`."""

    NEEDS: ClassVar = {
        "phase": ("target_speedup",),
        "min_exit_layer": ("max_exit_layer",),
        "max_exit_layer": ("min_exit_layer",),
    }
    EXCLUDES: ClassVar = {name: _TARGETS[place + 1 :] for place, name in enumerate(_TARGETS)}

    model: str = option(f"{MODEL}, or the file of a config (JSON)", positional=True, path=Reads(model_files))
    target_speedup: float | None = option(
        "wall-clock speed-up of the work that --phase names; the layers are solved for it", default=None, least=1
    )
    phase: Phase = option(
        "what --target-speedup is for; request: prompt and steps together; decode: the steps after the prompt",
        default="request",
    )
    min_exit_layer: int | None = option("layers that run at the last position", default=None, least=1)
    max_exit_layer: int | None = option("layers that run at the first position", default=None, least=1)
    seq_len: int = option(
        "positions over which the depth decreases; also the number of new tokens after the first, which comes with the "
        "prompt; best near the real output length",
        default=64,
        least=1,
        most=2**15,
    )
    warmup_layers: int = option("first layers that always run", default=1, least=0)
    spread: float = option(
        "decrease: from mean * (1 + spread) to mean * (1 - spread) layers", default=1 / 3, least=0, below=1
    )
    order: Order = option("order in which layers are skipped", default="bottom-up")
    use: Use = option(
        "lockstep: all sequences of a batch start together; continuous: continuous batching", default="lockstep"
    )
    batch: int = option("sequences decoded together", default=1, least=1, most=1024)
    prompt_len: int = option("prompt tokens of a sequence", default=64, least=1, most=_MOST_PROMPT_TOKENS)
    measure: bool | None = option(
        "load the weights and time prompts and steps (default: only if nothing has to be downloaded)", default=None
    )
    remeasure: bool = option("time prompts and steps again, and ignore earlier measurements", default=False)
    json: bool = option("print one JSON document", default=False)
    png: str | None = option("file for the picture", default=None, path=Writes())
    out: str | None = option(
        "file for the schedule (JSON), for skipdecode generate --schedule", default=None, path=Writes()
    )
    overwrite: bool = option(OVERWRITE, default=False)

    @property
    def new_tokens(self) -> int:
        """Generated tokens of a sequence: each position runs once."""
        return self.seq_len + 1

    @property
    def is_config(self) -> bool:
        """Whether the model is the file of a config, without weights."""
        return Path(self.model).is_file()


def run(config: Config) -> int:
    """Plan, print, and write the files that were asked for."""
    _check(config)
    from skipdecode.performance.cost_source import find_cost, find_geometry

    geometry, _ = find_geometry(config.ref, config.dtype, choose_device(config.device))
    _schedule(config, geometry.num_layers)  # refuses what does not fit before weights are loaded
    fit = _fit(config, geometry)
    config.use_threads()
    names = ("batch", "prompt_len", "dtype", "device", "measure", "engine", "quantization", "remeasure")
    source = find_cost(config.ref, **{name: getattr(config, name) for name in names})
    if fit is not None:
        source = replace(source, cost=source.cost.with_fit(source.geometry, fit.rank, fit.taps))
    schedule = _schedule(config, source.cost.num_layers, source.cost)
    figures = assess(schedule, source.cost, source.geometry, config.prompt_len, config.new_tokens, config.use)
    plan = _Plan(
        config, source, schedule, figures, _reason(config, schedule, source.cost), _tuned(config, schedule), fit
    )
    if config.out is not None:
        schedule.save(config.out)
    if config.png is not None:
        from skipdecode.reporting.charts import png
        from skipdecode.reporting.plots import depth_figure

        title = f"{config.model}: predicted {figures.predicted_request_speedup:.2f}x request, "
        title += f"{figures.predicted_decode_speedup:.2f}x decode; nominal {figures.nominal_speedup:.2f}x"
        write_whole(config.png, png(depth_figure(schedule, title, config.seq_len)))
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
    if all(getattr(config, name) is None for name in _TARGETS):
        raise UsageError(
            "no target was given: give one of --target-speedup, --nominal-speedup, --min-exit-layer with "
            "--max-exit-layer, or --schedule"
        )
    if (tokens := config.batch * config.prompt_len) > _MOST_PROMPT_TOKENS:
        raise UsageError(
            f"--batch {config.batch} --prompt-len {config.prompt_len} are {tokens} prompt tokens: give at most "
            f"{_MOST_PROMPT_TOKENS}"
        )
    if config.png is not None:
        from skipdecode.reporting.charts import check_matplotlib

        check_matplotlib()


def _fit(config: Config, geometry: ModelGeometry) -> Fit | None:
    """The fit beside the schedule, else the fit of the checkpoint, if there is one; it is not compared with weights."""
    from skipdecode.models.fit import Fit

    file = None if config.is_config else config.ref.fit
    if file is None:
        return None
    fit = Fit.load(file)
    keys = 2 * geometry.num_kv_heads * geometry.head_dim
    fit.check_sizes(geometry.hidden_size, [keys] * geometry.num_layers, f"fit {file}")
    if config.schedule is not None:
        fit.check_prompts(Schedule.load(config.schedule), f"fit {file}")
    return fit


def _schedule(config: Config, layers: int, cost: CostModel | None = None) -> Schedule:
    """The schedule for the target; without a cost, full depth stands for the schedule of a wall-clock target."""
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
    # The even order depends on the least budget, which is known only now. The order does not change the cost: prompts
    # that run the lowest layers have the most layers to project with bottom-up, where new tokens run the highest.
    return schedule.reordered("even") if config.order == "even" else schedule


def _solved(
    config: Config, cost: CostModel, use: Use, order: tuple[int, ...] | None, prompt: PromptDepth | Auto
) -> Schedule:
    target, names = cast("float", config.target_speedup), ("phase", "warmup_layers", "spread", "prompt_len")
    given: dict[str, Any] = {name: getattr(config, name) for name in names}
    return solve(cost, target, config.seq_len, prompt=prompt, use=use, drop_order=order, **given)


def _reason(config: Config, schedule: Schedule, cost: CostModel) -> str | None:
    """Why a schedule that was solved for continuous use is flat."""
    if config.target_speedup is None or config.use != "continuous":
        return None
    linear = _solved(config, cost, "lockstep", schedule.drop_order, schedule.prompt)
    return why_flat(cost, linear, config.prompt_len, config.new_tokens, config.phase)


def _tuned(config: Config, schedule: Schedule) -> bool:
    """Whether the weights were tuned for the schedule; nothing is downloaded to find out."""
    recipe = config.ref.recipe if not config.is_config and config.ref.has_weights() else None
    return schedule.fits_weights(() if recipe is None else recipe.tuned_under)


# ---------------------------------------------------------------------- report


@dataclass(frozen=True)
class _Plan:
    """A schedule with its figures.

    `reason` says why it is flat, if it had to be; `tuned` says whether the weights are tuned for it.
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
        """Bytes of the fit in memory, in the type of the weights."""
        numbers = () if self.fit is None else self.fit.parameters()
        return sum(p.numel() for p in numbers) * self.source.geometry.dtype_bytes


def _report(plan: _Plan, width: int) -> str:
    """The plan in lines of at most `width` characters, except for commands."""
    figures = plan.figures
    gains = {
        "request": figures.predicted_request_speedup,
        "decode": figures.predicted_decode_speedup,
        "nominal": figures.nominal_speedup,
    }

    def filled(entries: dict[str, str]) -> list[str]:
        return [textwrap.fill(f"{name:<10}{text}", width, subsequent_indent=" " * 10) for name, text in entries.items()]

    table = speedups(["predicted"], {name: [f"{gain:.2f}x"] for name, gain in gains.items()})
    commands = [f"{name:<10}{command}" for name, command in _commands(plan).items()]
    return "\n".join([*filled(_subject(plan)), "", *table, "", *filled(_details(plan)), *commands])


def _subject(plan: _Plan) -> dict[str, str]:
    config, schedule, geometry = plan.config, plan.schedule, plan.source.geometry
    first, last = schedule.budgets[0], schedule.budgets[-1]
    depth = f"{first}" if first == last else f"{first} decreasing to {last}"
    prompts = f"{len(schedule.prompt_layers())} of {schedule.num_layers} layers"
    if schedule.projected:
        prompts += f", and only keys and values of {len(schedule.projected)} more that the first new token runs"
    if config.target_speedup is not None and config.prompt_layers is None and config.phase == "request":
        prompts += (
            "; rule: new tokens skip layers first, down to half depth, then prompts, if that pays, down to half depth, "
            "then both (--prompt-layers sets them; skipdecode calibrate learns them)"
        )
    return {
        "model": f"{config.model}: {geometry.num_layers} layers, {_size(geometry.weight_bytes())} of weights in "
        f"{plan.source.dtype}",
        "for": f"{config.batch} x ({config.prompt_len} prompt + {config.new_tokens} new tokens), {config.use}; the "
        f"first new token comes with the prompt, the others from {config.seq_len} decode steps; options: --batch, "
        "--prompt-len, --seq-len, --use",
        "schedule": f"{schedule.name}: {depth} of {schedule.num_layers} layers, "
        + (f"skipped {config.order}" if config.schedule is None else f"from {config.schedule}")
        + (f"; {plan.reason}" if plan.reason else ""),
        "prompts": prompts,
    }


def _details(plan: _Plan) -> dict[str, str]:
    figures = plan.figures
    other = ""
    if plan.config.batch > 1 and plan.config.use == "lockstep":
        other = f"; {figures.decode_speedup_continuous:.2f}x with continuous batching"
    elif plan.config.batch > 1:
        other = f"; {figures.decode_speedup_lockstep:.2f}x in lockstep"
    kv_full = figures.kv_bytes_held + figures.kv_bytes_saved
    return {
        "limits": f"request at most {figures.request_bound:.2f}x with these prompts; decode at most "
        f"{figures.bound:.2f}x with {figures.least_budget} layers, the fewest, and {figures.bound_at_half:.2f}x with "
        f"{figures.half_budget}{other}",
        "request": f"{_time(figures.request_seconds_full)} at full depth, {_time(figures.request_seconds)} with the "
        f"schedule, of which prompts take {figures.prompt_share:.0%}",
        "step": f"{_time(figures.step_seconds_full)} at full depth, of which {figures.fixed_share:.0%} cannot be "
        f"skipped; {_time(figures.step_seconds)} with {figures.layers_per_step:.1f} layers, the mean",
        "KV cache": f"{_size(figures.kv_bytes_held)} at the end; {_size(figures.kv_bytes_saved)} "
        f"({figures.kv_bytes_saved / kv_full:.0%}) saved",
        **({} if plan.fit is None else {"fit": _fitted(plan, plan.fit)}),
        "times": plan.source.origin,
    }


def _fitted(plan: _Plan, fit: Fit) -> str:
    """The memory and time of the fit."""
    cost = plan.source.cost
    text = f"{_size(plan.fit_bytes)} in memory; {len(fit.bridges)} bridges of rank {fit.rank:.0f}, each "
    text += f"{cost.bridge_share:.1%} of the layer that a token skips"
    if plan.schedule.projected:
        text += f"; keys and values of prompts take {1 + cost.taps} projection{'s' if cost.taps else ''} a layer"
    return text + "; all figures include it"


def _commands(plan: _Plan) -> dict[str, str]:
    """The next commands: save the schedule; or use it, after tuning if the weights are not tuned for it."""
    config, rest = plan.config, f"--max-new-tokens {plan.config.new_tokens} 'Your prompt'"
    file = config.schedule or config.out
    if file is None:
        return {"next": command_line("plan", config) + " --out schedule.json"}
    model, file = "MODEL" if config.is_config else shlex.join(config.words), shlex.quote(file)
    if config.schedule is not None:
        return {"next": f"skipdecode generate {model} --schedule {file} {rest}"}
    if plan.tuned:
        return {"next": f"skipdecode generate {model} --schedule {file} --compare {rest}"}
    data = "--train train.jsonl --dev dev.jsonl --prompt-field prompt --response-field response"
    tune = f"skipdecode tune {model} --schedule {file} {data} --out tuned"
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
        **{name: getattr(config, name) for name in ("model", "batch", "prompt_len", "new_tokens", "phase")},
        "dtype": source.dtype,
        "weight_bytes": source.geometry.weight_bytes(),
        "fit_bytes": plan.fit_bytes,
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
