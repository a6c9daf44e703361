"""Make a model fast in minutes: tune it at full depth if that pays, let it answer, choose layers, distil, evaluate.

  skipdecode prepare MODEL --target-speedup 1.5 --task e2e --train train.jsonl --dev dev.jsonl --out ready
  skipdecode prepare MODEL --target-speedup 1.5 --train alpaca.json --out ready
  skipdecode prepare MODEL --target-speedup 1.25 --self --out ready
  skipdecode prepare TUNED --target-speedup 2 --self --task e2e --prompts train.jsonl --test test.jsonl --out ready

--minutes is the time of the whole command. Tuning gets half of it or more, of which at full depth a quarter of the
minutes at most; it ends early where the dev loss no longer falls, and is thrown away where the checkpoint does the task
already. --out/full is the tuned model at full depth, which the result is compared with. The schedule learns that
model's greedy answers, or, while its loss was still falling, the responses of --train. With --self there are only
answers, to --prompts or to prompts that the model draws. Every stage ends at the clock. 0 is without tuning, and
without a limit. With --quantization w8a8, 8-bit weights do a part of the target, and the result runs with them.
--keep 0.98 recommends the fastest schedule or weights that keep 98% of every score, for batches and for one request at
a time.
The directory of --out is a MODEL of every verb: the fastest way that keeps the share, else the schedule.
After an interruption the same command continues. With another value of --minutes, it reuses answers, layers and fit,
whose time counts again, and compares the results of both values.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from skipdecode.cli.options import NamedModel, PushOptions, TrainingFiles
from skipdecode.common.environment import COMMAND
from skipdecode.common.jsonl import prepared_use
from skipdecode.common.options import OVERWRITE, Reads, option
from skipdecode.learning.settings import PREPARE_DIRECTORY, PrepareOptions


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, TrainingFiles, PrepareOptions, PushOptions):
    ONE_OF: ClassVar = (("train", "self"),)

    out: str = option("directory for all results", path=PREPARE_DIRECTORY)
    overwrite: bool = option(OVERWRITE, default=False)
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
    started = time.perf_counter()
    from skipdecode.learning.prepare import prepare

    config.push()
    files = {name: getattr(config, name) or None for name in ("train", "dev", "test", "cost")}
    settings = asdict(config.part(PrepareOptions))
    ready = prepare(config.checkpoint, **files, out=config.out, overwrite=config.overwrite, started=started, **settings)
    use = f"skipdecode generate {shlex.quote(config.out)} --compare 'Your prompt'"
    minutes = ready.document["more_minutes"]
    again = re.sub(r" --(minutes[ =]\S+|overwrite)", "", COMMAND.get())
    more = None if minutes is None else f"{again} --minutes {minutes:g}"
    if config.json:
        print(json.dumps(dict(ready.document) | {"next": [use, *([more] if more else [])]}))
    else:
        print(*ready.lines(), f"next: {use}", _export(prepared_use(ready.out)), *_last(ready.untuned, more), sep="\n")
    config.push(ready.path or ready.schedule_file.parent)
    return 0


def _export(use: Mapping[str, str]) -> str:
    """The line about the export of the result, with the formats that work."""
    from skipdecode.models.loading.export import possible_formats

    first, *others = possible_formats(use["model"], use.get("schedule"), use.get("base"))
    options = "".join(f" --{name} {shlex.quote(use[name])}" for name in ("base", "schedule") if name in use)
    choice = f" (formats: {', '.join([first, *others])})" if others else ""
    return f"export: skipdecode export {shlex.quote(use['model'])}{options} --format {first} --out DIRECTORY{choice}"


def _last(untuned: str, more: str | None) -> list[str]:
    """The last line: how to go on, and that nothing was tuned, if that is so."""
    if not untuned:
        return [f"more minutes: {more}"] if more else []
    return [f"{untuned}; this tunes: {more}" if more else untuned]
