"""Learn on your records which layers to skip, and in which order.

Give records with responses, or --self for self-generated data, and one target: a wall-clock speed-up of whole requests,
prompts included (--target-speedup; with --phase decode of the steps after the prompt), or a nominal speed-up
(--nominal-speedup: as many layers as the paper's schedule with this number would run on these records). For whole
requests, the layers of prompts are learned too. The depth decreases linearly over the text, as far as the target
requires. Losses are teacher-forced and need no gradients. A fit replaces what the schedule skips: least squares finds
linear maps for skipped layers and for keys and values of prompts (--no-fit: no fit). The search measures each layer
with its map in place, and the time of the maps counts. The command writes schedule.json (for --schedule, which also
uses skipdecode.fit beside it), calibration.json with all measurements, and calibration.png. The loss of the schedule is
compared with the paper's schedule and with evenly spaced layers, which have no fit, also on held-out records.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.calibration.goal import Goal, check_layers, prompt_sets, set_goal
from skipdecode.calibration.settings import CalibrationSettings, FitOptions
from skipdecode.cli.arguments import flag
from skipdecode.cli.options import NamedModel, read_cost
from skipdecode.cli.options.records import encode_file, read_files, with_self_generated
from skipdecode.common.columns import figures
from skipdecode.common.directories import RunDirectory
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.common.journal import JOURNAL_KEY
from skipdecode.common.kinds import heading
from skipdecode.common.options import Reads, option
from skipdecode.cost.model import CostModel
from skipdecode.data.examples import RecordOptions, make_template, self_template
from skipdecode.data.prompts import Example, RecordFile
from skipdecode.data.records import Template
from skipdecode.data.source import PromptSource
from skipdecode.engine.loading import load
from skipdecode.errors import UsageError
from skipdecode.models.carried import FIT_FILE
from skipdecode.models.loading.base_weights import base_sample
from skipdecode.models.loading.hub import LoadedModel
from skipdecode.schedule import Schedule
from skipdecode.tuning.self_generated import ABOUT_FILE, TRAIN_FILE, SelfGeneratedOptions, open_prompts

if TYPE_CHECKING:
    from skipdecode.calibration.fitting import Fitter
    from skipdecode.calibration.run import Calibration

STORE_FILE = "measured.jsonl"
_SCHEDULE, _REPORT, _PICTURE = "schedule.json", "calibration.json", "calibration.png"
_DIRECTORY = RunDirectory("run of skipdecode calibrate", {STORE_FILE: JOURNAL_KEY, ABOUT_FILE: "settings"})
_SHOWN_ORDER = 12
_PROMPT = ("task", "prompt_template", "prompt_field", "response_field", "chat")


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, CalibrationSettings, FitOptions, SelfGeneratedOptions, RecordOptions):
    """Options of `skipdecode calibrate`."""

    NEEDS: ClassVar = {"cost": ("target_speedup",)}

    data: str = option(
        "JSONL or CSV file of records with prompts and responses, unless --self", default="", path=Reads()
    )
    out: str = option("directory for the schedule, the measurements and the picture", path=_DIRECTORY)
    records: int = option("records to learn from, a random sample by prompt", default=64, least=1)
    held_out: int = option("held-out records with other prompts, only for measurements; 0: none", default=64, least=0)
    batch: int = option("sequences decoded together, for the wall-clock target", default=1, least=1)
    cost: str | None = option(
        "cost of a step: a file of skipdecode plan --json (default: measured or predicted, as by plan)",
        default=None,
        path=Reads(),
    )
    seed: int = option("seed of the sample of records", default=0)
    resume: bool = option("continue an earlier run in --out", default=False)
    fit: bool = option(
        "fit bridges over skipped layers, which the search measures in place, and keys and values of prompts",
        default=True,
    )
    json: bool = option("print one JSON document", default=False)


def run(config: Config) -> int:
    """Calibrate, and write and print the results."""
    from skipdecode.calibration.run import calibrate_model, draw_records, records_for_fit
    from skipdecode.reporting.charts import try_picture
    from skipdecode.reporting.plots import calibration_figure

    prompts = open_prompts(config)
    if config.self == bool(config.data):
        raise UsageError("give one of --data FILE and --self")
    cost = _cost(config)
    layers = config.ref.num_layers
    check_layers(config, layers)
    prompt_sets(config, layers)
    if config.nominal_speedup is not None:
        Schedule.from_speedup(layers, config.nominal_speedup, 64, warmup_layers=config.warmup_layers)
    loaded, examples = _read(config, prompts)
    learn, check = draw_records(examples, config.records, config.held_out, config.seed)
    width = loaded.model.config.get_text_config(decoder=True).hidden_size
    fitter = _fitter(config, loaded, records_for_fit(examples, learn, check, config, width), width)
    # The time of a batch's prompts depends on their sum; the cache reads of a step on a typical prompt.
    prompt_len = round((fmean if config.whole else median)(len(e.prompt) for e in learn))
    origin, fitted = "layers only", None
    if config.target_speedup is not None:
        cost, origin = _found_cost(config, cost, prompt_len)
        fitted = _fitted_cost(config, cost)
    goal = set_goal(config, cost, prompt_len, [len(e.response) for e in learn], layers, fitted)
    found = calibrate_model(config, goal, loaded, learn, check, fitter, Path(config.out) / STORE_FILE)
    document, out = _document(config, goal, found, origin, (len(learn), len(check))), Path(config.out)
    found.schedule.save(out / _SCHEDULE)
    if found.fit is not None:
        found.fit.about["base"] = base_sample(loaded.model)
        found.fit.save(out / FIT_FILE)
    write_whole(out / _REPORT, json.dumps(document, indent=1) + "\n")
    try_picture(out / _PICTURE, partial(calibration_figure, document))
    print(json.dumps(document) if config.json else _report(document, out / _SCHEDULE))
    return 0


def _cost(config: Config) -> CostModel | None:
    """The cost of --cost; refuses one that does not fit the model."""
    if config.cost is None:
        return None
    cost, layers = read_cost(config.cost), config.ref.num_layers
    if cost.num_layers != layers:
        raise UsageError(f"--cost {config.cost} is for {cost.num_layers} layers, but the model has {layers}")
    if config.batch not in (1, cost.batch):
        raise UsageError(f"--cost {config.cost} is for batches of {cost.batch}: leave out --batch {config.batch}")
    return cost


def _found_cost(config: Config, cost: CostModel | None, prompt_len: int) -> tuple[CostModel, str]:
    """The cost of --cost or of this machine, and its origin."""
    if cost is not None:
        return cost, f"from {config.cost}"
    from skipdecode.cost.source import find_cost

    source = find_cost(config.ref, batch=config.batch, prompt_len=prompt_len)
    return source.cost, source.origin


def _fitted_cost(config: Config, cost: CostModel) -> CostModel | None:
    """The cost with the bridges and maps of a fit, where one is made; that of a --cost which counts a fit stays."""
    from skipdecode.cost.geometry import ModelGeometry

    if not config.fit or cost.bridge_share:
        return None
    geometry = ModelGeometry.from_config(config.ref.config)
    return cost.with_fit(geometry, min(config.fit_rank, geometry.hidden_size), config.fit_taps)


def _read(config: Config, prompts: PromptSource | None) -> tuple[LoadedModel, list[Example]]:
    """The model, in fp32 on CPUs, and the records."""
    import torch

    from skipdecode.models.fit import keep_fit

    def load_unfitted() -> LoadedModel:
        # Half precision only on a GPU.
        loaded = load(config.ref, dtype="auto" if torch.cuda.is_available() else "float32")
        keep_fit(loaded.model, None)  # a calibration computes its own fit
        return loaded

    # Wrong options and records are refused before the model is loaded.
    if config.self:
        self_template(config)
        loaded = load_unfitted()
        drawn = None if prompts else max(config.records, config.fit_records) + config.held_out
        asked = replace(config, self_records=config.self_records or drawn)
        config, template, _ = with_self_generated(asked, loaded, prompts, held_out=0, data=TRAIN_FILE)
        file = _records(config, template)
    else:
        template = make_template(config)
        file = _records(config, template)
        loaded = load_unfitted()
    return loaded, encode_file(config, template, loaded, "data", file)[0]


def _records(config: Config, template: Template) -> RecordFile:
    """The records of --data."""
    return read_files(config, template, data=None)["data"]


def _fitter(config: Config, loaded: LoadedModel, records: Sequence[Example], width: int) -> Fitter | None:
    """The fitter on these records; refuses, before measurements, records with too few tokens for a bridge."""
    from skipdecode.calibration.fitting import Fitter
    from skipdecode.tuning.collate import batches_of

    if not config.fit:
        return None
    tokens = sum(len(record.response) for record in records)
    if tokens <= width:
        raise UsageError(
            f"{config.data or '--self'}: {tokens} response tokens are too few to fit bridges of {width} columns: give "
            "more or longer records, or --no-fit"
        )
    return Fitter(loaded.model, batches_of(records, config.batch_size), config)


def _document(config: Config, goal: Goal, found: Calibration, origin: str, records: tuple[int, int]) -> dict[str, Any]:
    workload = goal.workload
    return {
        **heading("calibration"),
        "model": config.model,
        "options": {f.name: getattr(config, f.name) for f in fields(Config)},
        "records": records[0],
        "held_out_records": records[1],
        "prompt_len": workload.prompt_len,
        "cost": workload.cost.to_dict(),
        "cost_origin": origin,
        "environment": environment(),
        **found.to_dict(),
    }


# ---------------------------------------------------------------------- report

_COLUMNS = {
    "schedule": "{name}",
    "speed-up": "{speedup:.2f}x",
    "request speed-up": "{request_speedup:.2f}x",
    "decode speed-up": "{decode_speedup:.2f}x",
    "prompt layers": "{prompt_layers}",
    "mean layers": "{mean_layers:.1f}",
    "loss": "{measured:.4f}",
    "held out": "{held_out:.4f}",
}


def _report(document: dict[str, Any], schedule_file: Path) -> str:
    """The report for a terminal."""
    schedule = Schedule.from_dict(document["schedule"])
    verdicts = document["verdicts"]
    order = " ".join(map(str, schedule.drop_order[:_SHOWN_ORDER])) + (
        " …" if len(schedule.drop_order) > _SHOWN_ORDER else ""
    )
    depth = f"{schedule.budgets[0]}" + ("" if schedule.is_flat else f" decreasing to {schedule.budgets[-1]}")
    lines = [
        f"{schedule.name}: {depth} of {schedule.num_layers} layers; skipped in the order {order}",
        *([] if schedule.prompt == "full" else [f"prompts run layers {' '.join(map(str, schedule.prompt_layers()))}"]),
        f"loss per response token (teacher-forced cross-entropy) on {document['records']} records"
        + (f", and on {document['held_out_records']} held out" if document["held_out_records"] else ""),
        "",
        *figures(_COLUMNS, verdicts, absent=""),
    ]
    lines += ["", *_remarks(verdicts), f"next: {shlex.join(_next(document, schedule_file))}"]
    return "\n".join(lines)


def _next(document: dict[str, Any], schedule_file: Path) -> list[str]:
    """The command that tunes under the schedule, with the same prompts."""
    options = document["options"]
    given = [(flag(name), options[name]) for name in _PROMPT if options[name] not in (None, False)]
    same = [word for name, value in given for word in ([name] if value is True else [name, value])]
    command = ["skipdecode", "tune", document["model"], "--schedule", str(schedule_file), *same]
    if options["self"]:
        return [*command, "--self", "--out", "tuned"]
    return [*command, "--train", options["data"], "--dev", "dev.jsonl", "--out", "tuned"]


def _remarks(verdicts: list[dict[str, Any]]) -> list[str]:
    """A note if a baseline has a smaller loss."""
    chosen = verdicts[-1]
    key, where = ("measured", "these records") if chosen["held_out"] is None else ("held_out", "held-out records")
    better = [v["name"] for v in verdicts if v["name"] in ("paper", "even") and v[key] < chosen[key]]
    return [f"on {where}, the calibrated schedule is not better than: {', '.join(better)}"] if better else []
