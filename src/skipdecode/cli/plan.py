"""Find a schedule for a model and a speed target; shows it as a picture, with the speed-ups to expect.

Give a wall-clock speed-up of whole requests (--target-speedup), or a schedule to assess (--schedule 2x, or a file). A
fit beside that schedule or in the checkpoint is counted. Nothing is generated; the model's prompts and decode steps are
timed, and the times are kept for later commands.

Three speed-ups are shown. Request: time of prompt and steps, full depth / schedule. Decode: time of the steps after the
prompt. Nominal: all layers / layers that a new token runs. The first two are predicted for the workload of --batch,
--prompt-len and --seq-len; generate --compare measures them on your prompts.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from skipdecode.cli.options import EngineOptions, ScheduleOptions
from skipdecode.common.environment import COMMAND
from skipdecode.common.jsonl import Json
from skipdecode.common.options import OVERWRITE, Writes, option
from skipdecode.cost.solve import PlanOptions

if TYPE_CHECKING:
    from skipdecode.cost.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Config(PlanOptions, EngineOptions, ScheduleOptions):
    ONE_OF: ClassVar = (("target_speedup", "schedule"),)
    NEEDS: ClassVar = dict.fromkeys(("flat", "prompt_layers"), ("target_speedup",))
    EXCLUDES: ClassVar = {"target_speedup": ("schedule",)}

    json: bool = option("print one JSON document", default=False)
    out: str | None = option(
        "file for the schedule (JSON), for skipdecode generate --schedule", default=None, path=Writes()
    )
    overwrite: bool = option(OVERWRITE, default=False)


def run(config: Config) -> int:
    """Plan, print, and write the files that were asked for."""
    from skipdecode.cost.plan import plan

    config.use_threads()
    names = ("dtype", "device", "engine", "quantization")
    options: Json = {name: getattr(config, name) for name in names} | asdict(config.part(PlanOptions))
    planned = plan(config.checkpoint, config.schedule, **options)
    if config.out is not None:
        planned.schedule.save(config.out)
    commands = _commands(config, planned)
    if config.json:
        print(json.dumps(planned.to_dict() | {"next": commands["next"]}, indent=2))
    else:
        columns = shutil.get_terminal_size((80, 24)).columns
        text, encoding = planned.text(max(60, min(100, columns))), sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))
        print(*(f"{name:<10}{command}" for name, command in commands.items()), sep="\n")
    return 0


def _commands(config: Config, planned: Plan) -> dict[str, str]:
    """The next commands: save the schedule; or use it, after tuning if the weights are not tuned for it."""
    rest = f"--max-new-tokens {config.new_tokens} 'Your prompt'"
    file = config.schedule or config.out
    if file is None:
        return {"next": f"{COMMAND.get()} --out schedule.json"}
    model, file = shlex.join(config.words), shlex.quote(file)
    if planned.tuned:
        return {"next": f"skipdecode generate {model} --schedule {file} --compare {rest}"}
    data = "--train train.jsonl --dev dev.jsonl --prompt-field prompt --response-field response"
    tune = f"skipdecode tune {model} --schedule {file} {data} --out tuned"
    then = {"then": f"skipdecode generate tuned --compare {rest}"}
    if config.target_speedup is None:
        return {"next": tune} | then
    # With few records an order of layers that is learned on them loses less than the plan's.
    target = f"--target-speedup {config.target_speedup:g} --batch {config.batch}"
    return {"next": f"skipdecode prepare {model} {target} {data} --out ready", "or": tune} | then
