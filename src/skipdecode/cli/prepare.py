"""Make a model fast in minutes: choose layers and a fit, tune under the schedule, and evaluate before and after.

  skipdecode prepare MODEL --target-speedup 1.5 --task e2e --train train.jsonl --dev dev.jsonl --out ready
  skipdecode prepare MODEL --target-speedup 1.5 --train alpaca.json --out ready
  skipdecode prepare MODEL --target-speedup 1.25 --self --out ready
  skipdecode prepare TUNED --target-speedup 2 --self --task e2e --prompts train.jsonl --test test.jsonl --out ready

--minutes is the time of the whole command. The model's own answers (--self) and choosing layers take up to a quarter
each, the evaluations a sixth, and the tuning the rest; 0 is without tuning, and without a limit. With --self, the model
is trained on its own answers at full depth; a checkpoint that was tuned at full depth needs no other responses.
--keep 0.98 evaluates drafts and W8A8 weights too, and recommends the fastest way that keeps 98% of every score.
The directory of --out is a MODEL of every verb: the fastest way that keeps the share, else the schedule.
--resume continues an interrupted run. With another value of --minutes, it reuses answers, layers and fit, whose time
counts again, and compares the results of both values.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import asdict, dataclass
from typing import ClassVar

from skipdecode.cli.options import NamedModel, PushOptions
from skipdecode.common.environment import COMMAND
from skipdecode.common.options import Reads, option
from skipdecode.learning.settings import PREPARE_DIRECTORY, PrepareOptions


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, PrepareOptions, PushOptions):
    """Options of `skipdecode prepare`."""

    ONE_OF: ClassVar = (("train", "self"),)

    out: str = option("directory for all results", path=PREPARE_DIRECTORY)
    resume: bool = option("continue an earlier run in --out, which may have had other --minutes", default=False)
    train: str = option(
        "file of training records (JSONL, JSON, Parquet, CSV), or owner/name:split", default="", path=Reads()
    )
    dev: str = option(
        "file of records that select the best weights (default: a tenth of --train)", default="", path=Reads()
    )
    test: str = option(
        "JSONL or CSV file of records to evaluate on (default: --dev); with --self and no --task: file of prompts "
        "(default: some of the prompts, which are held out)",
        default="",
        path=Reads(),
    )
    cost: str | None = option(
        "cost of a step: a file of skipdecode plan --json (default: measured, as by plan)", default=None, path=Reads()
    )
    json: bool = option("print one JSON document", default=False)


def run(config: Config) -> int:
    """Prepare and print."""
    started = time.perf_counter()
    from skipdecode.learning.prepare import prepare

    config.push()
    files = {name: getattr(config, name) or None for name in ("train", "dev", "test", "cost")}
    ready = prepare(config.ref, **files, out=config.out, started=started, **asdict(config.part(PrepareOptions)))
    commands = _next(config, ready.document["more_minutes"])
    if config.json:
        print(json.dumps(dict(ready.document) | {"next": commands}))
    else:
        print(ready, f"next: {commands[0]}", f"more minutes: {commands[1]}", sep="\n")
    config.push(ready.path or ready.schedule_file.parent)
    return 0


def _next(config: Config, minutes: float) -> list[str]:
    """The commands that use the result, and that go on with more minutes."""
    again = re.sub(r" --(minutes[ =]\S+|resume)", "", COMMAND.get())
    more = f"{again} --minutes {minutes:g} --resume"
    return [f"skipdecode generate {shlex.quote(config.out)} --compare 'Your prompt'", more]
