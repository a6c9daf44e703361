"""A schedule for a model and a speed target, as a picture, with the speed-ups to expect of it.

Give one target: a speed-up in wall-clock time (--target-speedup, of the whole request, or with --phase decode of the
steps behind the prompt), the paper's nominal one (--nominal-speedup), or the exits themselves (--min-exit-layer and
--max-exit-layer). Nothing is generated. Where the model's weights are at hand, a short calibration times its prompts
and decode steps; otherwise they are predicted from its config.

Three speed-ups are told. Request: time of prompt and steps together, full depth / schedule. Decode: the same of the
steps after the prompt. Nominal: all layers / layers that a new token runs. The first two are predicted for the work
that --batch, --prompt-len, --seq-len and --use describe; generate --compare measures them on yours.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skipdecode.cli.options import MODEL, EngineOptions, ModelOptions
from skipdecode.cli.paths import OVERWRITE
from skipdecode.cli.planned import Plan, document, report
from skipdecode.common.files import write_whole
from skipdecode.common.options import Reads, Writes, option
from skipdecode.errors import UsageError
from skipdecode.models.loading.ref import model_files
from skipdecode.performance.cost import Phase, Use
from skipdecode.performance.solve import Auto, assess, solve, why_flat
from skipdecode.schedule import Schedule
from skipdecode.schedule.draw import schedule_picture, shows_blocks
from skipdecode.schedule.order import PROMPT_SETS, Order, PromptDepth, prompt_set, top_down

if TYPE_CHECKING:
    from skipdecode.performance.cost import CostModel

__all__ = ["Config", "run"]

_MOST_PROMPT_TOKENS = 2**20  # of a batch: its forwards are added up one by one


@dataclass(frozen=True, kw_only=True)
class Config(ModelOptions, EngineOptions):
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
    from skipdecode.models.loading.hub import choose_device
    from skipdecode.performance.cost_source import find_cost, find_geometry

    geometry, _ = find_geometry(config.ref, config.dtype, choose_device(config.device))
    _schedule(config, geometry.num_layers)  # refuses what does not fit before weights are loaded
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
    schedule = _schedule(config, source.cost.num_layers, source.cost)
    figures = assess(
        schedule,
        source.cost,
        source.geometry,
        use=config.use,
        prompt_len=config.prompt_len,
        new_tokens=config.new_tokens,
    )
    plan = Plan(config, source, schedule, figures, _reason(config, schedule, source.cost), _tuned(config, schedule))
    if config.out is not None:
        schedule.save(config.out)
    if config.png is not None:
        from skipdecode.reporting.plots import depth_figure, png

        title = f"{config.model}: predicted {figures.predicted_request_speedup:.2f}x request, "
        title += f"{figures.predicted_decode_speedup:.2f}x decode; nominal {figures.nominal_speedup:.2f}x"
        write_whole(config.png, png(depth_figure(schedule, config.seq_len, title=title)))
    if config.json:
        print(json.dumps(document(plan), indent=2))
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        blocks = shows_blocks(sys.stdout.encoding)
        print(schedule_picture(schedule, config.seq_len, width=min(80, columns), blocks=blocks))
        print(report(plan, width=max(60, min(100, columns))))
    return 0


# ---------------------------------------------------------------------- the schedule


def _check(config: Config) -> None:
    explicit = (config.min_exit_layer, config.max_exit_layer)
    if (explicit[0] is None) != (explicit[1] is None):
        raise UsageError("--min-exit-layer and --max-exit-layer go together: give both")
    given = [config.target_speedup is not None, config.nominal_speedup is not None, explicit[0] is not None]
    if config.phase == "decode" and config.target_speedup is None:
        raise UsageError("--phase says what --target-speedup is of: give both, or neither")
    if sum(given) != 1:
        raise UsageError(
            f"{'no' if not any(given) else 'more than one'} target was given: give one of --target-speedup, "
            "--nominal-speedup, or --min-exit-layer with --max-exit-layer"
        )
    if config.batch * config.prompt_len > _MOST_PROMPT_TOKENS:
        raise UsageError(
            f"--batch {config.batch} --prompt-len {config.prompt_len} are {config.batch * config.prompt_len} prompt "
            f"tokens a batch: give {_MOST_PROMPT_TOKENS} at most"
        )
    if config.png is not None:
        from skipdecode.reporting.plots import check_matplotlib

        check_matplotlib()


def _schedule(config: Config, layers: int, cost: CostModel | None = None) -> Schedule:
    """The schedule asked for; a wall-clock target is solved for with the cost, without it full depth is checked."""
    warmup = config.warmup_layers
    order = top_down(layers, warmup) if config.order == "top-down" else None
    asked = None if config.prompt_layers is None else prompt_set(config.prompt_layers, layers)
    shared: dict[str, Any] = {"seq_len": config.seq_len, "warmup_layers": warmup, "drop_order": order}
    shared["prompt"] = asked or "full"
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
