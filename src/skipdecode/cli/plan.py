"""Find a schedule for a model and a speed target; shows it as a picture, with the speed-ups to expect.

Give one target: a wall-clock speed-up (--target-speedup, of whole requests, or with --phase decode of the steps after
the prompt), a nominal speed-up (--nominal-speedup), numbers of layers (--min-exit-layer and --max-exit-layer), or an
existing schedule (--schedule). A fit beside that schedule or in the checkpoint is counted. Nothing is generated; the
model's prompts and decode steps are timed, and the times are kept for later commands.

Three speed-ups are shown. Request: time of prompt and steps, full depth / schedule. Decode: time of the steps after the
prompt. Nominal: all layers / layers that a new token runs. The first two are predicted for the workload of --batch,
--prompt-len, --seq-len and --use; generate --compare measures them on your prompts.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.cli.arguments import command_line
from skipdecode.cli.options import MODEL, EngineOptions, ScheduleOptions
from skipdecode.cli.paths import OVERWRITE
from skipdecode.common.options import Reads, Writes, option
from skipdecode.cost.solve import PlanOptions
from skipdecode.errors import UsageError
from skipdecode.models.loading.ref import model_files
from skipdecode.schedule import Schedule
from skipdecode.schedule.draw import shows_blocks
from skipdecode.schedule.order import top_down

if TYPE_CHECKING:
    from skipdecode.cost.plan import Plan

_TARGETS = ("target_speedup", "nominal_speedup", "min_exit_layer", "schedule")


@dataclass(frozen=True, kw_only=True)
class Config(PlanOptions, EngineOptions, ScheduleOptions):
    """Options of `skipdecode plan`."""

    NEEDS: ClassVar = {
        "phase": ("target_speedup",),
        "min_exit_layer": ("max_exit_layer",),
        "max_exit_layer": ("min_exit_layer",),
    }
    EXCLUDES: ClassVar = {name: _TARGETS[place + 1 :] for place, name in enumerate(_TARGETS)}

    model: str = option(MODEL, positional=True, path=Reads(model_files))
    min_exit_layer: int | None = option("layers that run at the last position", default=None, least=1)
    max_exit_layer: int | None = option("layers that run at the first position", default=None, least=1)
    json: bool = option("print one JSON document", default=False)
    out: str | None = option(
        "file for the schedule (JSON), for skipdecode generate --schedule", default=None, path=Writes()
    )
    overwrite: bool = option(OVERWRITE, default=False)


def run(config: Config) -> int:
    """Plan, print, and write the files that were asked for."""
    from skipdecode.cost.plan import plan

    if all(getattr(config, name) is None for name in _TARGETS):
        raise UsageError(
            "no target was given: give one of --target-speedup, --nominal-speedup, --min-exit-layer with "
            "--max-exit-layer, or --schedule"
        )
    config.use_threads()
    names = ("dtype", "device", "engine", "quantization")
    given: dict[str, Any] = {name: getattr(config, name) for name in names} | asdict(config.part(PlanOptions))
    found = plan(config.ref, _schedule(config), **given)
    if config.out is not None:
        found.schedule.save(config.out)
    commands = _commands(config, found)
    if config.json:
        print(json.dumps(found.to_dict() | {"next": commands["next"]}, indent=2))
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        print(found.text(max(60, min(100, columns)), blocks=shows_blocks(sys.stdout.encoding)))
        print(*(f"{name:<10}{command}" for name, command in commands.items()), sep="\n")
    return 0


def _schedule(config: Config) -> Schedule | str | None:
    """The schedule of the options; None if they have a wall-clock target."""
    if config.target_speedup is not None:
        return None
    if config.schedule is not None:
        return config.schedule + (":flat" if config.flat else "")
    layers, warmup = config.ref.num_layers, config.warmup_layers
    order = top_down(layers, warmup) if config.order == "top-down" else None
    shared: dict[str, Any] = {"seq_len": config.seq_len, "warmup_layers": warmup, "drop_order": order}
    if config.nominal_speedup is not None:
        schedule = Schedule.from_speedup(layers, config.nominal_speedup, spread=config.spread, **shared)
    else:
        ends: dict[str, Any] = {"min_exit_layer": config.min_exit_layer, "max_exit_layer": config.max_exit_layer}
        schedule = Schedule.paper(layers, **ends, **shared)
    schedule = schedule.reordered("even") if config.order == "even" else schedule
    return schedule.flattened() if config.flat else schedule


def _commands(config: Config, found: Plan) -> dict[str, str]:
    """The next commands: save the schedule; or use it, after tuning if the weights are not tuned for it."""
    rest = f"--max-new-tokens {config.new_tokens} 'Your prompt'"
    file = config.schedule or config.out
    if file is None:
        return {"next": command_line("plan", config) + " --out schedule.json"}
    model, file = shlex.join(config.words), shlex.quote(file)
    if config.schedule is not None:
        return {"next": f"skipdecode generate {model} --schedule {file} {rest}"}
    if found.tuned:
        return {"next": f"skipdecode generate {model} --schedule {file} --compare {rest}"}
    data = "--train train.jsonl --dev dev.jsonl --prompt-field prompt --response-field response"
    tune = f"skipdecode tune {model} --schedule {file} {data} --out tuned"
    then = {"then": f"skipdecode generate tuned --compare {rest}"}
    if config.target_speedup is None or config.phase == "decode":
        return {"next": tune} | then
    # With few records an order of layers that is learned on them loses less than the plan's.
    target = f"--target-speedup {config.target_speedup:g} --batch {config.batch}"
    return {"next": f"skipdecode prepare {model} {target} {data} --out ready", "or": tune} | then
