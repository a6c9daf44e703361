"""What `skipdecode.prepare` returns: the prepared model, its schedules, and the table of their evaluation."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import PREPARED_FILE, Fields, Json, heading, prepared_use
from skipdecode.common.tables import WIDTH, Printed, figures
from skipdecode.errors import ScheduleError
from skipdecode.evaluation.compare import (
    PERPLEXITY,
    fastest_that_keeps,
    impossible,
    kept_columns,
    near_zero,
    row_name,
    shown_name,
    with_kept,
)
from skipdecode.evaluation.method_runs import W8A8_NAME
from skipdecode.evaluation.pictures import kept_charts, save_charts
from skipdecode.generation.llm import LLM
from skipdecode.generation.speed import HOW
from skipdecode.generation.stats import depth_words
from skipdecode.learning.calibrate import SCHEDULE_FILE
from skipdecode.learning.settings import PrepareOptions
from skipdecode.learning.stage_log import Stages
from skipdecode.learning.stages import Evaluation, FullDepth, Tuning, TuningPlan
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.fit import Fit, set_fit
from skipdecode.models.loading.card import EVALUATION_FILE, PICTURE_FILE, push_to_hub, write_card
from skipdecode.models.loading.checkpoint import LoadedModel, open_checkpoint
from skipdecode.models.loading.fit_file import FitFile
from skipdecode.schedule import Schedule

FULL = "full"
"""The directory of the model that was tuned at full depth."""
TIMES = {"full": "tuning at full depth", "answers": "own answers", "layers": "choosing layers"}
TIMES |= {"pace": "speed of learning", "timing": "speed of decoding"}
NEIGHBOURS = {"slower": 0.5, "faster": 1.25}  # also evaluated: their shares of the target's nominal gain
_ALL = 0.995  # kept: more minutes bring nothing
MILDER = {"slower": 0.5, "mildest": 0.2}  # where the target may be too fast to keep the share that was asked for


@dataclass(frozen=True, repr=False)
class Prepared(Printed):
    """The result of `prepare`. Prints itself, also in a notebook.

    Attributes
    ----------
    document : mapping
        All results, JSON-ready, as in prepared.json.
    out : Path
        The directory of all results.
    """

    document: Mapping[str, Any]
    out: Path
    _loaded: LoadedModel

    @property
    def path(self) -> Path | None:
        """The directory of the tuned checkpoint; None if nothing was tuned."""
        minutes = self.document["minutes"]
        return tuned_directory(self.out, minutes) if minutes else None

    @property
    def schedule_file(self) -> Path:
        """The file of the schedule, beside its fit; the tuned checkpoint has both too."""
        return self.out / "fit" / SCHEDULE_FILE

    @property
    def schedule(self) -> Schedule:
        """The schedule of the tuning; without tuning, that of the target."""
        tuned = open_checkpoint(self.path).schedule if self.path else None
        return tuned or Schedule.load(self.schedule_file)

    @cached_property
    def llm(self) -> LLM:
        """The model, ready to generate text as `use` says."""
        if self.use["model"].startswith("./"):  # tuned
            return LLM(str(self.out))
        use = prepared_use(self.out)
        if (file := self.schedule_file.with_name(FIT_FILE)).is_file() and use["schedule"] != "full":
            fit = FitFile(file, schedules=(str(self.schedule_file),)).load(self._loaded.model)
            set_fit(self._loaded.model, fit)
        return LLM(self._loaded, use["schedule"], quantization=use.get("quantization", "none"))

    @property
    def recommended(self) -> Fields | None:
        """The row that is fastest in batches and keeps the share of `keep`; None without `keep`, or such a row."""
        return self._fastest("request_speedup")

    @property
    def recommended_alone(self) -> Fields | None:
        """The row that is fastest for one request at a time; None as for `recommended`."""
        return self._fastest("request_speedup_alone")

    def _fastest(self, speed: str) -> Fields | None:
        keep = self.document["keep"]
        return None if keep is None else fastest_that_keeps(self.rows, keep, speed)

    @property
    def untuned(self) -> str:
        """Why nothing was tuned, as a line; empty if something was."""
        minutes, left = self.document["minutes_given"], max(0.0, self.document["minutes_left"])
        if self.document["minutes"]:
            return ""
        return "nothing was tuned: " + (f"{minutes:g} minutes left {left:.1f} for it" if minutes else "minutes 0")

    def push_to_hub(self, repo: str, *, private: bool = True) -> str:
        """As `skipdecode.push_to_hub` of the tuned checkpoint; raises UsageError if nothing was tuned."""
        return push_to_hub(self.path or self.schedule_file.parent, repo, private=private)

    def save(self, datasets: Sequence[str]) -> None:
        """Write prepared.json and the picture, and with both the model card of the tuned checkpoint."""
        document, rows, picture = self.document, self.rows, self.out / PICTURE_FILE
        write_whole(self.out / PREPARED_FILE, json.dumps(document, indent=1) + "\n")
        save_charts(
            kept_charts(rows, document["kept_by_minutes"], document["target"], Path(document["model"]).name), picture
        )
        if self.path is None:
            return
        scores, table = [*rows[0]["scores"]], "\n".join(figures(kept_columns(rows), rows))
        evaluation = {"table": table, "scores": scores, "datasets": datasets, "rows": rows}
        write_whole(self.path / EVALUATION_FILE, json.dumps(evaluation, indent=1) + "\n")
        if picture.is_file():
            write_whole(self.path / PICTURE_FILE, picture.read_bytes())
        write_card(self.path, self._loaded.checkpoint, self.schedule, "prepare")

    def _file_of(self, row: Fields) -> Path | None:
        """The file of the schedule of one of the rows; None for the tuned checkpoint's own."""
        directory = tuned_directory(self.out, row["minutes"]) if row["minutes"] else self.schedule_file.parent
        files = (directory / f"{near}.json" for near in NEIGHBOURS | MILDER)
        name, own = row["name"].removesuffix(W8A8_NAME), None if row["minutes"] else self.schedule_file
        return next((file for file in files if file.is_file() and Schedule.load(file).name == name), own)

    @property
    def use(self) -> Json:
        """The model, schedule and quantization that use the result; a tuned model has its schedule.

        With `keep` those of the recommended row, else of the target: the tuned model, or the model with the schedule
        and its fit. Paths in the directory begin with ./, so that it can be moved.
        """
        if self.document["keep"] is None:
            target = {"name": self.document["target"], "minutes": self.document["minutes"]}
            row: Fields = next(row for row in self.rows if target.items() <= row.items())
        else:
            row = self.recommended or {"name": "full", "minutes": 0.0}
        checkpoint = self._loaded.checkpoint
        use: Json = {}
        if row["minutes"]:
            use["model"] = self._inside(tuned_directory(self.out, row["minutes"]))
        else:
            is_path = Path(checkpoint.name).exists()
            use["model"] = str(Path(checkpoint.name).resolve()) if is_path else checkpoint.name
            if checkpoint.given_base is not None:
                use["base"] = checkpoint.given_base
        if row["name"].startswith("full"):
            use["schedule"] = "full"
        elif file := self._file_of(row):
            use["schedule"] = self._inside(file)
        if "quantization" in row:
            use["quantization"] = row["quantization"]
        return use

    def _inside(self, path: Path) -> str:
        return f"./{path.relative_to(self.out).as_posix()}"

    @property
    def rows(self) -> list[Json]:
        """A row for each evaluated schedule: minutes, name, request_speedup, decode_speedup, scores, kept and more."""
        return list(self.document["rows"])

    def lines(self) -> list[str]:
        """The table, and what follows from it."""
        return [*_table_lines(self.document), *self._schedule_lines(), *self._times(), *self._conclusions()]

    def _schedule_lines(self) -> Iterator[str]:
        """What the schedules run, and how a row is read."""
        yield depth_words(self.schedule)
        if any("quantization" in row for row in self.rows):
            yield "w8a8: 8-bit weights and activations"
        if any(row.get("names_copied") is not None for row in self.rows):
            yield "invented names: of names and numbers that no record has, those that are copied from the prompt"

    def _times(self) -> Iterator[str]:
        times = []
        for key, seconds in self.document["seconds"].items():
            label, _, minutes = key.partition(" ")
            after = f" after {minutes} minutes" if label == Evaluation.label and float(minutes) else ""
            times += [f"{TIMES.get(label, label)}{after} {seconds / 60:.1f} min"] * (label != TuningPlan.label)
        yield f"time: {', '.join(times)}"

    def _conclusions(self) -> Iterator[str]:
        document, rows = self.document, self.rows
        yield from impossible(rows)
        yield from self._quality()
        known = {minutes: kept for minutes, kept in document["kept_by_minutes"].items() if kept is not None}
        if low := document["near_zero"]:
            remedy = "tune it at full depth first" if document["full_depth"] is None else "give more minutes"
            yield f"the model does not do this task yet: {low}; there is no share to keep: {remedy}"
        elif known:
            kept = ", ".join(f"{share:.1%} after {float(minutes):g} minutes" for minutes, share in known.items())
            yield f"speed by skipping: {document['target']} keeps {kept}"
        if document["keep"] is not None and not low:
            yield from self._recommendations(document["keep"])
        if len(losses := document["dev_loss"]) > 1:
            (_, before), (minutes, after) = losses[0], losses[-1]
            yield f"dev loss {before:.3f} before tuning, {after:.3f} after {minutes:.1f} minutes of it"

    def _quality(self) -> Iterator[str]:
        """What tuning at full depth brought, before layers were skipped."""
        if (full := self.document["full_depth"]) is None:
            return
        (_, before), (minutes, _) = full["dev_losses"][0], full["dev_losses"][-1]
        after, scores = min(loss for _, loss in full["dev_losses"]), self.rows[0]["scores"]
        if full["scores"] is None:
            yield f"{self.document['model']} does this task: {minutes:.1f} minutes at full depth lowered no dev loss"
            return
        gains = [f"{shown_name(name)} {score:.1f} to {scores[name]:.1f}" for name, score in full["scores"].items()]
        gains.insert(0, f"dev loss {before:.3f} to {after:.3f}")
        yield f"quality by tuning: {', '.join(gains)} after {minutes:.1f} minutes at full depth ({self.out / FULL})"

    def _recommendations(self, keep: float) -> Iterator[str]:
        batched, alone = self.recommended, self.recommended_alone
        if batched is None or batched["name"].startswith("full"):
            yield f"no schedule keeps {keep:.0%} at a higher speed"
        where = f" in batches of {self.document['batch']}"
        if batched is None:
            yield f"recommended to keep {keep:.0%}: none is faster than full depth{where}"
        else:
            yield f"recommended to keep {keep:.0%}: {_speed_words(batched, 'request_speedup')}{where}"
        if alone is not None and alone is not batched:
            yield f"for one request at a time: {_speed_words(alone, 'request_speedup_alone')}"

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *filter(None, [self.untuned])])


def results_document(
    settings: PrepareOptions,
    model: str,
    schedule: Schedule,
    minutes_left: float,
    full_depth: FullDepth | None,
    stages: Stages,
) -> Json:
    """Collect all rows with the share of full depth's scores that each keeps, and the gain of the minutes.

    `minutes_left` were left to tune under the schedule.
    """
    minutes, finished, target = settings.minutes, stages.finished(), schedule.name
    if settings.quantization == "w8a8":
        target += W8A8_NAME
    evaluations = [done for done in finished if done.label == Evaluation.label]
    evaluations.sort(key=lambda done: done.minutes or 0.0)
    rows = with_kept([{"minutes": done.minutes, **row} for done in evaluations for row in done.stage["rows"]])
    low = "" if full_depth is not None and full_depth.is_learned else near_zero(rows)
    if low:  # full depth, of which a share would be kept, does not do the task
        rows = [row | {"kept": None, "kept_interval": None} for row in rows]
    tuning = stages.find(Tuning, minutes)
    shown = minutes if tuning else 0.0
    kept = {row["minutes"]: row["kept"] for row in rows if row["name"] == target}
    more: float | None = max(20.0, 2 * minutes)
    if not tuning and minutes:
        more = max(20.0, 2 * minutes, ceil(2 * (minutes - minutes_left)))
    elif (kept.get(shown) or 0) >= _ALL:
        more = None
    return heading("prepared") | {
        "model": model,
        "full_depth": full_depth and asdict(full_depth),
        "near_zero": low,
        "minutes": shown,
        "minutes_given": minutes,
        "minutes_left": minutes_left,
        "more_minutes": more,
        "keep": settings.keep,
        "batch": settings.batch,
        "target": target,
        "seconds": {stage.key: stage.seconds for stage in finished},
        "cpu_seconds": {stage.key: stage.cpu_seconds for stage in finished},
        "rows": [row for row in rows if row["minutes"] in (0.0, shown)],
        "kept_by_minutes": kept,
        "dev_loss": [] if tuning is None else tuning.dev_losses,
    }


def tuned_directory(out: Path, minutes: float) -> Path:
    """The directory of the checkpoint that these minutes made."""
    return out / f"tuned-{minutes:g}"


def neighbours(target: Schedule, directory: Path, shares: Mapping[str, float] = NEIGHBOURS) -> list[Schedule]:
    """The target, and schedules of other gains if its drop order, and the fit in `directory`, allow them."""
    by_name = {target.name: target}
    fit = Fit.load(directory / FIT_FILE) if (directory / FIT_FILE).is_file() else None
    for name, share in shares.items():
        with contextlib.suppress(ScheduleError):
            other = target.with_speedup(1 + (target.nominal_speedup - 1) * share)
            if fit is not None and not fit.serves(other):  # no layer is skipped that has no map
                other = replace(other, budgets=tuple(max(n, target.budgets[-1]) for n in other.budgets))
            other = other.named_by_layers(target.family)
            if not other.is_full and other.name not in by_name and (fit is None or fit.serves(other)):
                by_name[other.name] = other
                other.save(directory / f"{name}.json")
    return list(by_name.values())


def _table_lines(document: Mapping[str, Any]) -> Iterator[str]:
    rows = document["rows"]
    shown = rows if document["keep"] is None else sorted(rows, key=lambda row: row["request_speedup"] or 0.0)
    records = f" on {rows[0]['records']} records" if rows[0].get("records") else ""
    if rough := ", ".join(map(shown_name, rows[0]["not_counted"])):
        records += f" (not {rough}: too few records)"
    caption = (
        f"kept: worst score{records}, as a share of full depth's best, before or after tuning. Speed-ups over full "
        f"depth of the same minutes, in batches of {document['batch']} (one request: alone), {HOW}"
    )
    yield from (*textwrap.wrap(caption, WIDTH), "", *figures(kept_columns(shown), shown), "")
    if [*rows[0]["scores"]] == [PERPLEXITY]:
        yield "perplexity flatters tasks in which one wrong token spoils an answer, such as code: run its tests"


def _speed_words(row: Fields, speed: str) -> str:
    return f"{row_name(row)}, {row[speed]:.2f} times as fast, keeps {row['kept']:.1%}"
