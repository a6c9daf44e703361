"""A schedule for a model and a speed target, as a picture, with nominal and real speed-up.

Give one target: a wall-clock speed-up of decoding (--target-speedup), the paper's nominal one (--nominal-speedup), or
the exits themselves (--min-exit-layer and --max-exit-layer). Nothing is generated. Where the model's weights are at
hand, a short calibration times its decode steps; otherwise they are predicted from its config.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from skipdecode.cli.options import EngineOptions, ModelOptions
from skipdecode.cli.plan_report import Plan, document, report
from skipdecode.common.files import write_whole
from skipdecode.common.options import option
from skipdecode.errors import UsageError
from skipdecode.performance.solve import assess, solve, why_flat
from skipdecode.schedule import Schedule
from skipdecode.schedule.draw import schedule_picture, shows_blocks
from skipdecode.schedule.order import top_down

if TYPE_CHECKING:
    from skipdecode.performance.cost import CostModel, Use

__all__ = ["Config", "run"]

_ORDERS = ("bottom-up", "even", "top-down")


@dataclass(frozen=True, kw_only=True)
class Config(ModelOptions, EngineOptions):
    """Options of `skipdecode plan`."""

    model: str = option("a local directory, a hub id, smollm2-135m, or the file of a config (JSON)", positional=True)
    target_speedup: float | None = option(
        "wall-clock speed-up of decoding over full depth; the budgets are solved for it", default=None, least=1
    )
    nominal_speedup: float | None = option(
        "the paper's speed-up: all layers / mean layers run; the gain in time is lower", default=None, least=1
    )
    min_exit_layer: int | None = option("layers that run at the last position", default=None, least=1)
    max_exit_layer: int | None = option("layers that run at the first position", default=None, least=1)
    seq_len: int = option(
        "generation positions over which the depth falls; best near the real output length", default=64, least=1
    )
    warmup_layers: int = option("first layers that always run", default=1, least=0)
    spread: float = option(
        "decay: from mean * (1 + spread) to mean * (1 - spread) layers", default=1 / 3, least=0, below=1
    )
    order: str = option("order in which layers are left out", default="bottom-up", choices=_ORDERS)
    use: str = option(
        "lockstep: all rows of a batch start together; continuous: a stream of rows of mixed ages",
        default="lockstep",
        choices=("lockstep", "continuous"),
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
    from skipdecode.performance.cost_source import find_cost

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
        progress=True,
    )
    schedule = _schedule(config, source.cost)
    lengths = {"prompt_len": config.prompt_len, "new_tokens": _tokens(config)}
    figures = assess(schedule, source.cost, source.geometry, use=_use(config), **lengths)
    plan = Plan(config, source, schedule, figures, _reason(config, schedule, source.cost), **lengths)
    if config.out is not None:
        write_whole(config.out, schedule.to_json(indent=1) + "\n")
    if config.png is not None:
        from skipdecode.reporting.plots import depth_figure, png

        title = f"{config.model}: {figures.nominal_speedup:.2f}x nominal, {figures.speedup:.2f}x predicted"
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
    if sum(given) != 1:
        raise UsageError(
            f"{'no' if not any(given) else 'more than one'} target was given: give one of --target-speedup, "
            "--nominal-speedup, or --min-exit-layer with --max-exit-layer"
        )


def _use(config: Config) -> Use:
    return cast("Use", config.use)


def _tokens(config: Config) -> int:
    """Generated tokens of a row: as many as run each position once."""
    return config.seq_len + 1


def _schedule(config: Config, cost: CostModel) -> Schedule:
    layers, warmup = cost.num_layers, config.warmup_layers
    order = top_down(layers, warmup) if config.order == "top-down" else None
    if config.target_speedup is not None:
        schedule = _solved(config, cost, _use(config), order)
    elif config.nominal_speedup is not None:
        schedule = Schedule.from_speedup(
            layers,
            config.nominal_speedup,
            config.seq_len,
            warmup_layers=warmup,
            spread=config.spread,
            drop_order=order,
        )
    else:
        schedule = Schedule.paper(
            layers,
            min_exit_layer=cast("int", config.min_exit_layer),
            max_exit_layer=cast("int", config.max_exit_layer),
            seq_len=config.seq_len,
            warmup_layers=warmup,
            drop_order=order,
        )
    if config.order == "even":
        # The order aims at the least budget, which is known only now; which layers run does not change the cost.
        return schedule.reordered("even")
    return schedule


def _solved(config: Config, cost: CostModel, use: Use, order: tuple[int, ...] | None) -> Schedule:
    return solve(
        cost,
        cast("float", config.target_speedup),
        config.seq_len,
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
