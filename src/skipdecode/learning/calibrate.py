"""`skipdecode.calibrate`: learn on records which layers to skip, in which order, and a fit that replaces them."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from skipdecode.common.environment import environment, isolated_torch
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import heading
from skipdecode.common.plain import as_records
from skipdecode.common.progress import note
from skipdecode.common.tables import Printed, figures
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.model import CostModel
from skipdecode.cost.source import find_cost, read_cost
from skipdecode.data.batches import batches_of
from skipdecode.data.examples import Example, encode_source, make_template
from skipdecode.data.source import Source, read_file
from skipdecode.engine.opening import load
from skipdecode.errors import UsageError
from skipdecode.learning.fitting import TOKENS_A_COLUMN, make_fit
from skipdecode.learning.goal import Goal, goal_of_records, mean_prompt, suited
from skipdecode.learning.search import MakeFit, SearchResult, search_model
from skipdecode.learning.settings import STORE_FILE, CalibrateOptions, FitOptions
from skipdecode.learning.tune import in_hardware_type
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.families import lenders
from skipdecode.models.fit import Fit, temporary_fit
from skipdecode.models.loading.checkpoint import Checkpoint, LoadedModel, Model, loaded_of, open_checkpoint
from skipdecode.models.loading.weights_sample import base_sample
from skipdecode.schedule import Schedule

SCHEDULE_FILE = "schedule.json"
_REPORT = "calibration.json"
_SHOWN_ORDER = 12
_FIT_ROWS = 4  # of like answers: rows of 8 of like prompts had half as many padded columns of answers again
_COLUMNS = {
    "schedule": "{name}",
    "speed-up": "{speedup:.2f}x",
    "decode speed-up": "{decode_speedup:.2f}x",
    "prompt layers": "{prompt_layers}",
    "mean layers": "{mean_layers:.1f}",
    "loss": "{loss:.4f}",
}


@dataclass(frozen=True, repr=False)
class Calibrated(Printed):
    """A schedule that was learned on records, with its fit. Prints itself, also in a notebook.

    Attributes
    ----------
    document : mapping
        All measurements, JSON-ready, as in calibration.json.
    path : Path or None
        The directory with schedule.json, the fit and calibration.json.
    """

    schedule: Schedule
    fit: Fit | None
    document: Mapping[str, Any]
    path: Path | None = None

    @property
    def losses(self) -> dict[str, float]:
        """Teacher-forced cross-entropy per response token on the records, by the name of a measured schedule."""
        return {candidate["name"]: candidate["loss"] for candidate in self.document["candidates"]}

    def __str__(self) -> str:
        schedule, document = self.schedule, self.document
        order = " ".join(map(str, schedule.drop_order[:_SHOWN_ORDER]))
        order += " …" if len(schedule.drop_order) > _SHOWN_ORDER else ""
        depth = f"{schedule.budgets[0]}" + ("" if schedule.is_flat else f" decreasing to {schedule.budgets[-1]}")
        lines = [f"{schedule.name}: {depth} of {schedule.num_layers} layers; skipped in the order {order}"]
        if schedule.prompt != "full":
            lines.append(f"prompts run layers {' '.join(map(str, schedule.prompt_layers()))}")
        lines += [f"loss per response token (teacher-forced cross-entropy) on {document['records']} records", ""]
        return "\n".join([*lines, *figures(_COLUMNS, document["candidates"])])


@isolated_torch()
def calibrate(
    model: Model,
    data: Source,
    *,
    out: str | Path | None = None,
    cost: CostModel | str | Path | None = None,
    until: float = math.inf,
    **options: Any,
) -> Calibrated:
    """Learn drop order, prompt layers and depth on records with responses, for a speed-up; and a fit. No gradients.

    The depth decreases linearly over the text, as far as the target requires. The fit replaces skipped layers by linear
    maps (least squares), whose time counts.

    Parameters
    ----------
    model : LLM, LoadedModel, str or Path
        A model that is loaded, or a name as for `skipdecode.load`. The arithmetic is in its type, and in fp32 on a CPU
        that has no instructions for that.
    data : str, Path or records
        Records with prompt and response, as for `skipdecode.tune`.
    out : str or Path, optional
        Directory for schedule.json, the fit and calibration.json. An interrupted call continues from the
        measurements that it has.
    cost : CostModel, str or Path, optional
        Cost of a step, also as the file of skipdecode plan --json. Default: measured, as by `skipdecode.plan`.
    until : float
        Reading of `time.perf_counter()` at which the search ends with what it has. Default: it takes its time.
    **options
        Fields of `CalibrateOptions`: target_speedup or nominal_speedup; one of task, prompt_template and prompt_field,
        with response_field; records, prompt_depths, fit, …

    Raises
    ------
    TargetError
        No schedule reaches the target; the message has the bound and its cause.
    DataError, UsageError
        Records or options cannot be used.
    DivergedError
        A state or a loss is not finite.
    """
    data, checkpoint = as_records(data), open_checkpoint(model)
    settings = _settings_for(CalibrateOptions(**options), checkpoint)
    if cost is not None and settings.target_speedup is None:
        raise UsageError("`cost` is for a `target_speedup`: leave it out")
    known_cost = None if cost is None else checked_cost(cost, checkpoint.num_layers, settings.batch)
    template = make_template(settings, data)
    file = read_file(data, template, skip_bad=settings.skips_bad)
    as_loaded = loaded_of(model) or load(checkpoint)
    loaded = replace(as_loaded, model=in_hardware_type(as_loaded.model))
    with temporary_fit(loaded.model, None):  # a calibration computes another
        examples = encode_source(file, "data", template, loaded, settings)[0]
        examples = shuffled(examples, settings.seed)
        learn = examples[: settings.records]
        fit_maker = _fit_maker(loaded, examples, learn, settings) if settings.fit else None
        step_cost = _step_cost(known_cost, as_loaded, settings, mean_prompt(examples))
        goal = goal_of_records(settings, step_cost, examples, checkpoint.config)
        with tempfile.TemporaryDirectory() if out is None else nullcontext(out) as directory:
            result = search_model(settings, goal, loaded, learn, fit_maker, Path(directory) / STORE_FILE, until)
        if result.fit is not None:
            result.fit.about["base"] = base_sample(loaded.model)
    document = _document(checkpoint.name, settings, goal, len(learn), result)
    if out is not None:
        result.schedule.save(Path(out, SCHEDULE_FILE))
        if result.fit is not None:
            result.fit.save(Path(out, FIT_FILE))
        write_whole(Path(out, _REPORT), json.dumps(document, indent=1) + "\n")
    return Calibrated(result.schedule, result.fit, document, None if out is None else Path(out))


def _document(model: str, settings: CalibrateOptions, goal: Goal, records: int, result: SearchResult) -> dict[str, Any]:
    """The content of calibration.json."""
    return {
        **heading("calibration"),
        "model": model,
        "seconds_per_batch": goal.workload.full_seconds,
        "options": asdict(settings),
        "records": records,
        "prompt_len": goal.workload.prompt_len,
        "cost": goal.workload.cost.to_dict(),
        "environment": environment(),
        "schedule": result.schedule.to_dict(),
        "order": list(result.order),
        "block_influence": list(result.influence),
        "candidates": [candidate.to_dict() for candidate in result.candidates],
    }


def _settings_for(settings: CalibrateOptions, checkpoint: Checkpoint) -> CalibrateOptions:
    """Adapt the settings to a model, some of which can have no fit or no prompt layers; refuse what does not fit it."""
    settings = suited(settings, checkpoint.config)
    if settings.fit and lenders(checkpoint.config):
        note(f"no fit: layers of a {checkpoint.config.model_type} model read the keys and values of others")
        return replace(settings, fit=False)
    return settings


def checked_cost(cost: CostModel | str | Path, layers: int, batch: int = 1) -> CostModel:
    """Return a given cost, read if it is a file; raises UsageError if it is for other layers or another batch.

    `batch` 1 leaves the batch to the cost.
    """
    name = "the given cost" if isinstance(cost, CostModel) else f"cost {cost}"
    checked = cost if isinstance(cost, CostModel) else read_cost(cost)
    if checked.num_layers != layers:
        raise UsageError(f"{name} is for {checked.num_layers} layers, but the model has {layers}")
    if batch not in (1, checked.batch):
        raise UsageError(f"{name} is for batches of {checked.batch}: leave out `batch` {batch}")
    return checked


def _step_cost(
    cost: CostModel | None, loaded: LoadedModel, settings: CalibrateOptions, prompt_len: int
) -> CostModel | None:
    """The cost of a step with the fit: the known one, else measured if a time is the target."""
    if cost is None and settings.target_speedup is not None:
        cost = find_cost(loaded, batch=settings.batch, prompt_len=prompt_len).cost
    if cost is None or not settings.fit or cost.bridge_share:
        return cost
    geometry = ModelGeometry.from_config(loaded.checkpoint.config)
    return cost.with_fit(geometry, min(settings.fit_rank, geometry.hidden_size), settings.fit_taps)


def _fit_maker(
    loaded: LoadedModel, examples: Sequence[Example], learn: Sequence[Example], settings: CalibrateOptions
) -> MakeFit:
    """Return the function that fits a model's maps, on its records."""
    width = loaded.model.config.get_text_config(decoder=True).hidden_size
    texts = records_for_fit(examples, learn, settings, width)
    return partial(make_fit, loaded.model, batches_of(texts, min(_FIT_ROWS, settings.batch_size)), settings)


def shuffled(examples: Sequence[Example], seed: int) -> list[Example]:
    """All examples in a random order, one of each prompt before a second one of any; the same for the same seed."""
    by_prompt: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        by_prompt.setdefault(example.prompt, []).append(example)
    groups = list(by_prompt.values())
    random.Random(seed).shuffle(groups)
    return [group[rank] for rank in range(max(map(len, groups))) for group in groups if rank < len(group)]


def records_for_fit(
    examples: Sequence[Example], learn: Sequence[Example], settings: FitOptions, hidden_size: int
) -> list[Example]:
    """Records to fit on, in the order of their lengths.

    Records are taken up to the tokens of the settings, and at least `TOKENS_A_COLUMN` for each column of the states.
    Those of `learn`, on which schedules are compared, are taken last: a map flatters records that it has seen.
    Raises UsageError: all have too few tokens for a map.
    """
    others = [example for example in examples if example not in learn]
    taken: list[Example] = []
    tokens, wanted = 0, max(settings.fit_tokens, TOKENS_A_COLUMN * hidden_size)
    for example in [*others, *learn][: settings.fit_records]:
        if tokens >= wanted:
            break
        taken.append(example)
        tokens += len(example.prompt) + len(example.response)
    fed = tokens - len(taken)  # a text's last token is not
    if fed <= hidden_size:
        few = f"{fed} tokens are too few to fit maps of {hidden_size} columns"
        raise UsageError(f"{few}: give more or longer records, or no fit")
    return sorted(taken, key=lambda e: (len(e.response), len(e.prompt)))
