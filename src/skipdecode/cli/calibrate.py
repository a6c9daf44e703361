"""Learn which layers to leave out, in which order and where in the text, on your own records.

Give records with responses and one target: a wall-clock speed-up of decoding (--target-speedup), or the paper's nominal
one (--nominal-speedup: as many layers as the paper's schedule of that number would run on these records). Losses are
teacher-forced and need no gradients. Writes schedule.json (for --schedule), calibration.json with all measurements,
and calibration.png. The loss of every schedule is predicted, then measured, also on records held out.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from skipdecode.calibration.settings import Settings
from skipdecode.cli.calibrate_report import report
from skipdecode.cli.options.option import option
from skipdecode.cli.options.records import RecordOptions, make_template, read_examples
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.errors import DataError, MissingExtraError, OutputError, UsageError
from skipdecode.performance.cost import CostModel

if TYPE_CHECKING:
    from skipdecode.calibration.goal import Goal
    from skipdecode.calibration.run import Calibration
    from skipdecode.data.prompts import Example
    from skipdecode.models.attach import Attachment
    from skipdecode.models.loading.hub import LoadedModel

__all__ = ["Config", "run"]

_SCHEDULE, _REPORT, _PICTURE, _STORE = "schedule.json", "calibration.json", "calibration.png", "measured.jsonl"


@dataclass(frozen=True, kw_only=True)
class Config(RecordOptions):
    """Options of `skipdecode calibrate`."""

    model: str = option("directory (of a model or an adapter), hub id or smollm2-135m", positional=True)
    data: str = option("JSON lines with prompts and responses")
    out: str = option("directory for the schedule, the measurements and the picture")
    target_speedup: float | None = option(
        "wall-clock speed-up of decoding over full depth, on texts as long as the records", default=None
    )
    nominal_speedup: float | None = option(
        "run as many layers as the paper's schedule of this nominal speed-up would on these records", default=None
    )
    use: str = option(
        "lockstep: all rows of a batch start together; continuous: rows of mixed ages, which asks for a flat schedule",
        default="lockstep",
        choices=("lockstep", "continuous"),
    )
    method: str = option(
        "of the drop order: greedy by the measured loss, or block-influence, which takes one pass",
        default="greedy",
        choices=("greedy", "block-influence"),
    )
    records: int = option("records to learn from, drawn at random by prompt", default=64)
    held_out: int = option("records with other prompts, for the check only; 0 for none", default=64)
    candidates: int = option("greedy: layers tried in each round after the first", default=6)
    least: int | None = option("layers at which the drop order stops (default: by the target)", default=None)
    buckets: int = option("groups of positions whose depth is solved for", default=8)
    warmup_layers: int = option("first layers that always run", default=1)
    seq_len: int | None = option(
        "positions over which the paper's depth falls (default: 95th percentile of the responses' lengths)",
        default=None,
    )
    batch: int = option("rows decoded together, for the wall-clock target", default=1)
    cost: str | None = option(
        "cost of a step: a file of skipdecode plan --json (default: measured or predicted as plan does)", default=None
    )
    batch_size: int = option("records in a forward pass", default=8)
    seed: int = option("seed of the draw of records", default=0)
    resume: bool = option("go on with what was measured in --out", default=False)
    json: bool = option("print the result as one JSON document", default=False)


def run(config: Config) -> int:
    """Calibrate, write and print."""
    settings = _settings(config)
    out = Path(config.out)
    _check(config, out)
    cost = _cost(config) if config.target_speedup is not None and config.cost is not None else None
    make_template(config)  # refuses before a model is loaded
    loaded = _load(config)
    learn, check = _draw(config, loaded)
    layers = loaded.model.config.get_text_config(decoder=True).num_hidden_layers
    prompt_len = round(median(len(e.prompt) for e in learn))
    origin = "layers only"
    if config.target_speedup is not None:
        origin = f"from {config.cost}"
        if cost is None:
            cost, origin = _found_cost(config, prompt_len)
        if cost.num_layers != layers:
            raise UsageError(f"--cost {config.cost} is for {cost.num_layers} layers, but the model has {layers}")
    from skipdecode.calibration.goal import set_goal

    goal = set_goal(settings, cost, prompt_len, [len(e.response) for e in learn], layers)
    found = _measure(config, settings, goal, loaded, learn, check, out)
    document = _document(config, goal, found, origin, (len(learn), len(check)))
    write_whole(out / _SCHEDULE, found.schedule.to_json(indent=1) + "\n")
    write_whole(out / _REPORT, json.dumps(document, indent=1) + "\n")
    _draw_picture(found, goal, out)
    print(json.dumps(document) if config.json else report(document, out / _SCHEDULE))
    return 0


def _settings(config: Config) -> Settings:
    names = ("target_speedup", "nominal_speedup", "candidates", "least", "buckets", "warmup_layers", "seq_len")
    values: dict[str, Any] = {n: getattr(config, n) for n in (*names, "use", "method", "batch_size")}
    for name, least in (("records", 1), ("held_out", 0), ("batch", 1)):
        if getattr(config, name) < least:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {getattr(config, name)} is not accepted: give {least} or more")
    return Settings(**values)


def _check(config: Config, out: Path) -> None:
    if config.cost is not None and config.target_speedup is None:
        raise UsageError("--cost belongs to --target-speedup: a nominal one counts layers")
    if out.exists() and not out.is_dir():
        raise OutputError(f"--out {out} is a file: give a directory")
    if not config.resume and out.is_dir() and any(out.iterdir()):
        raise UsageError(
            f"--out {out} is not empty: give --resume to go on with what was measured, or another directory"
        )


def _cost(config: Config) -> CostModel:
    try:
        data = json.loads(Path(config.cost or "").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise DataError(f"--cost {config.cost} is no JSON file that can be read: {e}") from None
    if isinstance(data, dict) and isinstance(data.get("cost"), dict):
        data = data["cost"]
    return CostModel.from_dict(data)


def _found_cost(config: Config, prompt_len: int) -> tuple[CostModel, str]:
    from skipdecode.performance.cost_source import find_cost

    source = find_cost(config.model, batch=config.batch, prompt_len=prompt_len, progress=True)
    return source.cost, source.origin


def _load(config: Config) -> LoadedModel:
    import torch

    from skipdecode.models.loading.hub import load_model

    # Only devices with arithmetic for it take the checkpoint's own half-precision type.
    return load_model(config.model, dtype="auto" if torch.cuda.is_available() else "float32")


def _draw(config: Config, loaded: LoadedModel) -> tuple[list[Example], list[Example]]:
    """Records to learn from, and records with other prompts; spread over the file, the same for the same seed."""
    examples, _ = read_examples(config, "data", loaded.model, loaded.tokenizer)
    by_prompt: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        by_prompt.setdefault(example.prompt, []).append(example)
    groups = list(by_prompt.values())
    random.Random(config.seed).shuffle(groups)
    learn, rest = _take(groups, config.records)
    check, _ = _take(rest, config.held_out)
    if len(check) < config.held_out:
        print(
            f"skipdecode: {len(check)} records are held out, not {config.held_out}: the other prompts are too few",
            file=sys.stderr,
        )
    return learn, check


def _take(groups: Sequence[list[Example]], count: int) -> tuple[list[Example], list[list[Example]]]:
    """The first `count` records, one a prompt while there are prompts, and the groups that were not touched."""
    taken: list[Example] = []
    for rank in range(max(map(len, groups), default=0)):
        for used, group in enumerate(groups):
            if len(taken) == count:
                return taken, list(groups[used if rank == 0 else len(groups) :])
            if rank < len(group):
                taken.append(group[rank])
    return taken, []


def _measure(
    config: Config,
    settings: Settings,
    goal: Goal,
    loaded: LoadedModel,
    learn: list[Example],
    check: list[Example],
    out: Path,
) -> Calibration:
    from tqdm import tqdm

    from skipdecode.calibration.influence import block_influence
    from skipdecode.calibration.meter import LossMeter, identity_of
    from skipdecode.calibration.run import calibrate, trials
    from skipdecode.common.journal import KeptValues
    from skipdecode.models.attach import attach
    from skipdecode.schedule import Schedule

    tokenizer: Any = loaded.tokenizer
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    out.mkdir(parents=True, exist_ok=True)
    identity = identity_of(loaded.model, config.model, (learn, check), config.batch_size)
    store = KeptValues(out / _STORE, identity, pieces="measurements", remedy="give another --out")
    loaded.model.eval()
    attachment: Attachment
    bar = tqdm(desc="measuring", unit="batch")
    with bar, attach(loaded.model, Schedule.full(goal.workload.cost.num_layers)) as attachment:

        def meter(examples: list[Example], part: str) -> LossMeter:
            size = config.batch_size
            return LossMeter(
                attachment, examples, store, part=part, batch_size=size, pad_id=pad, advance=lambda: bar.update()
            )

        meters = meter(learn, "learn"), meter(check, "held out") if check else None
        wanted = trials(settings, goal)
        bar.reset(total=wanted[0] * meters[0].batches + (wanted[1] * meters[1].batches if meters[1] else 0))
        influence = block_influence(attachment, learn, batch_size=config.batch_size, pad_id=pad)
        found = calibrate(settings, goal, influence, *meters, name=_name(config))
        bar.total = bar.n
    store.close()
    return found


def _name(config: Config) -> str:
    if config.target_speedup is not None:
        return f"calibrated-{config.target_speedup:g}x-wall"
    return f"calibrated-{cast('float', config.nominal_speedup):g}x"


def _document(config: Config, goal: Goal, found: Calibration, origin: str, records: tuple[int, int]) -> dict[str, Any]:
    workload = goal.workload
    return {
        "format": 1,
        "model": config.model,
        "options": {name: getattr(config, name) for name in Config.__dataclass_fields__},
        "records": records[0],
        "held_out_records": records[1],
        "prompt_len": workload.prompt_len,
        "steps_at_position": list(workload.steps),
        "cost": workload.cost.to_dict(),
        "cost_origin": origin,
        "environment": environment(),
        **found.to_dict(),
    }


def _draw_picture(found: Calibration, goal: Goal, out: Path) -> None:
    from skipdecode.reporting.plots import calibration_figure, png

    if found.rounds:
        first = found.rounds[0]
        importance = {layer: loss - first.base for layer, loss in first.losses.items()}
        label = "loss added when it alone is left out"
    else:
        importance, label = dict(enumerate(found.influence)), "block influence"
    title = (
        f"{found.schedule.name}, mean {goal.workload.mean_layers(found.schedule):.1f} of {len(found.influence)} layers"
    )
    try:
        figure = calibration_figure(found.schedule, importance, importance_label=label, title=title)
    except MissingExtraError as e:
        print(f"skipdecode: no picture: {e}", file=sys.stderr)
    else:
        write_whole(out / _PICTURE, png(figure))
