"""The stages of `prepare` as data, with their sizes, their log, and the clock that ends each of them.

A stage is done once, counts the time of all its processes, and is done again if its files are lost. The log stores the
dataclasses of this module; the class and the minutes of a stage are its key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import torch

from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import PREPARED_FILE
from skipdecode.common.progress import note
from skipdecode.common.resume import ANEW, ResumeLog
from skipdecode.data.batches import batches_of
from skipdecode.data.examples import Example, RecordOptions
from skipdecode.data.source import Source
from skipdecode.errors import SkipDecodeError
from skipdecode.learning.settings import CLOCK_FILE, PREPARE_LOG, SHORT, WHOLE, EvaluationSize, SearchSize
from skipdecode.learning.tune import in_hardware_type
from skipdecode.models.forward import response_logits
from skipdecode.models.loading.card import PICTURE_FILE
from skipdecode.models.recipe import RECIPE_FILE

TUNED_SHARE = 1 / 2
"""Of the minutes, at least, at full depth and under the schedule; the other stages shrink first."""
_FULL, _ANSWERS, _LAYERS, _EVALUATION = 1 / 4, 1 / 10, 1 / 8, 1 / 12  # of the minutes, at most; two evaluations
_LEAST_SCALE = 0.2  # of these shares, where loading the model takes most of the rest
_ENDING = 1.05  # times the first evaluation: the last one, with its table
_DIRECTORIES = ("answers", "records", "full", "fit", "tuned-*", "eval-*")
_SOME_TUNING = 0.1  # of the minutes: with less, nothing is tuned

_PRODUCTS = 1.3  # of the time of a fit's forward passes, with the products of its states
_TIMED = 2  # records
_LEAST_TEXTS = 16  # of an evaluation that says something
TYPICAL = Example("", *2 * (tuple(1 + i % 8 for i in range(96)),))  # before there are texts
_DEV_SHARE = 0.01  # of the minutes: a pass over the dev records
_STEP = 3  # times as long as a forward
_TEACHES = 0.1  # of the dev loss: what the second half of a tuning takes off if its records still teach
_DETERMINED = 0.5  # nats a token: above it other writers had written other responses, and greedy answers teach more
_LEAST_RECORDS, _MOST_RECORDS = 8, 64
_TOKENS_A_COLUMN = 8  # of a fit, for each column of the states: fewer are taken only where nothing else is left to save
_MOST_A_COLUMN = 28  # tokens of a fit: twice as many lower the KL by 3% (docs/LOG.md)


# ---------------------------------------------------------------------- sizes


_SEARCHES = (SearchSize(8, 4, True), SearchSize(8, 2, False), SearchSize(4, 2, False))


@dataclass(frozen=True)
class Pace:
    """Tokens per second of a model's forward at full depth, and the mean tokens of a prompt with its response."""

    label: ClassVar = "pace"
    tokens_per_second: float
    text_tokens: float

    @classmethod
    def of(cls, model: Any, examples: Sequence[Example]) -> Pace:
        """Measure two forwards on a few records, of which the second counts, in the type that learning takes."""
        model = in_hardware_type(model)
        (batch,) = batches_of(examples[:_TIMED], _TIMED)
        batch, took = batch.to(model.device), 0.0
        with torch.inference_mode():
            for _ in range(2):
                start = time.perf_counter()
                response_logits(model, batch, attached=False)
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
                took = time.perf_counter() - start
        length = sum(len(e.prompt) + len(e.response) for e in examples) / len(examples)
        return cls(batch.tokens / took, length)

    def enough(self, width: int) -> float:
        """Return about the minutes of which half are left to tune, after small stages, for texts of this length."""
        search = _PRODUCTS * (2 * _TOKENS_A_COLUMN * width + 4 * _LEAST_RECORDS * self.text_tokens)
        evaluation = 4 * _LEAST_TEXTS * self.text_tokens * 2  # four methods; generated, timed and read
        return 2 * (24 * self.text_tokens + search + 2 * evaluation) / self.tokens_per_second / 60

    def search(self, seconds: float, width: int, prompt_sets: int) -> SearchSize:
        """Return the most thorough search that takes about so many seconds and whose fit has tokens, or the least one.

        `width` is hidden_size, `prompt_sets` the number of prompt sets to try, without evenly spaced ones.
        """
        size, tokens = _SEARCHES[-1], 0.0
        for size in _SEARCHES:
            sets = prompt_sets * (1 + size.spread_prompts)
            measured = size.records * self.text_tokens * (1 + sets)
            # Sets of the lowest layers share full depth's states; others have states of half of the layers.
            passes = _PRODUCTS * (1 + 0.3 * size.fit_depths + (0.4 if size.spread_prompts else 0.05) * sets)
            tokens = (seconds * self.tokens_per_second - measured) / passes
            if tokens >= _TOKENS_A_COLUMN * width:
                break
        return replace(size, fit_tokens=max(1, min(_MOST_A_COLUMN * width, round(tokens))))

    def evaluation(self, seconds: float, a_batch: float, batch: int, speedups: Sequence[float]) -> EvaluationSize:
        """Return the size of an evaluation that is to take about so many seconds: WHOLE if that fits.

        `a_batch`: seconds of a batch of requests at full depth. `speedups`: those of full depth and of the schedules,
        each of which runs with W8A8 weights too, in about half of the time.
        """
        runs = -(-WHOLE.records // batch) + WHOLE.speed_rounds * WHOLE.speed_batches
        took = 1.5 * sum(a_batch / speedup for speedup in speedups) * runs
        return WHOLE if took <= seconds else SHORT

    def steps(self, seconds: float, batch: int) -> int:
        """Return about the number of training steps at full depth in so many seconds, 1 at least."""
        return max(1, round(seconds * self.tokens_per_second / (_STEP * batch * self.text_tokens)))

    def dev_records(self, seconds: float) -> int:
        """Return the number of dev records whose loss takes a small part of so many seconds."""
        affordable = _DEV_SHARE * seconds * self.tokens_per_second / self.text_tokens
        return min(_MOST_RECORDS, max(_LEAST_RECORDS, int(affordable)))


# ---------------------------------------------------------------------- the stages


@dataclass(frozen=True)
class Answers:
    """The records of all later stages: the user's, or the model's `own` answers."""

    label: ClassVar = "answers"
    train: Source
    dev: Source
    options: RecordOptions  # by which they become prompt and response
    own: bool = False


@dataclass(frozen=True)
class FullDepth:
    """The tuning at full depth, for which `minutes` of the command were given, and the dev loss over its minutes.

    `scores` are of the checkpoint before it; None: it did the task already, and the tuning was thrown away.
    """

    label: ClassVar = "full"
    minutes: float
    dev_losses: list[tuple[float, float]]
    scores: dict[str, float] | None

    @property
    def is_learning(self) -> bool:
        """Whether the loss was still falling at the end."""
        end = self.dev_losses[-1][0]
        halfway = [loss for minutes, loss in self.dev_losses if minutes <= end / 2][-1]
        return self.scores is not None and self._best < (1 - _TEACHES) * halfway

    @property
    def learns_responses(self) -> bool:
        """Whether responses teach more than the model's answers: the loss still falls, and prompts determine them."""
        return self.is_learning and self._best < _DETERMINED

    @property
    def _best(self) -> float:
        return min(loss for _, loss in self.dev_losses)

    def serves(self, minutes: float) -> bool:
        """Whether a command of so many minutes has no more to tune at full depth."""
        return minutes <= self.minutes or not self.is_learning


@dataclass(frozen=True)
class Timing:
    """What a step of decoding costs, a `CostModel` as JSON, and the search that fits into the time."""

    label: ClassVar = "timing"
    cost: dict[str, Any] | None
    search: SearchSize


@dataclass(frozen=True)
class Layers:
    """The schedule that reaches the target is saved beside its fit; the size of both evaluations of it.

    `request_tokens`: mean new tokens of a record.
    """

    label: ClassVar = "layers"
    size: EvaluationSize
    request_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """Rows of the evaluated schedules, before tuning (`minutes` 0) or after."""

    label: ClassVar = "evaluation"
    minutes: float
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class TuningPlan:
    """The minutes that are left to tune, stored so that a resumed run tunes the same."""

    label: ClassVar = "left"
    minutes: float

    def is_too_short(self, minutes: float) -> bool:
        """Whether so little of all `minutes` is left that nothing is tuned."""
        return self.minutes < _SOME_TUNING * minutes


@dataclass(frozen=True)
class Tuning:
    """The result of the tuning, and the loss of the dev records over its minutes."""

    label: ClassVar = "tuning"
    result: dict[str, Any]
    dev_losses: list[tuple[float, float]]


T = TypeVar("T", Answers, Pace, FullDepth, Timing, Layers, Evaluation, TuningPlan, Tuning)


@dataclass(frozen=True)
class Finished:
    """A stage in the log: its cost over all processes, what it read, and digests of the files that it wrote.

    `minutes` is None for a stage that serves any number of minutes, as that before tuning does.
    """

    label: str
    minutes: float | None
    ended: float  # seconds since the epoch
    stage: dict[str, Any]
    seconds: float
    cpu_seconds: float
    files: dict[str, str]
    reads: Any

    @property
    def key(self) -> str:
        """The name in results."""
        return _key(self.label, self.minutes)

    @property
    def is_shared(self) -> bool:
        """Whether runs of other minutes use it too."""
        return not self.minutes


def _key(label: str, minutes: float | None) -> str:
    return label if minutes is None else f"{label} {minutes:g}"


# ---------------------------------------------------------------------- the log


class Stages:
    """The finished stages of a directory, and the time that they and this process took.

    `settings`: JSON-ready; all that the stages depend on. `outputs`: patterns of the files that a stage makes.
    `started`: reading of `time.perf_counter()` when the minutes of this process began. `overwrite`: begin anew, unless
    the directory has an unfinished run with these settings.
    """

    def __init__(
        self,
        out: Path,
        settings: Mapping[str, Any],
        outputs: Sequence[str] = (),
        started: float = 0.0,
        *,
        overwrite: bool = False,
    ) -> None:
        path = out / PREPARE_LOG
        if overwrite and (out / PREPARED_FILE).exists():
            path.unlink(missing_ok=True)
        discard = partial(_remove_results, out)
        self._log = ResumeLog(path, settings, what="stages", remedy=ANEW, restart=overwrite, discard=discard)
        self._outputs, self._started = outputs, started
        self._here = self._before = 0.0  # seconds of finished stages of this process; of killed ones in this stage

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def forget(self) -> None:
        """Remove all stages and their files: a refused command leaves nothing behind."""
        self._log.remove()
        _remove_results(self._log.path.parent)

    def finished(self) -> list[Finished]:
        """All finished stages, in the order of their completion."""
        stages = [Finished(**value) for _, value in self._log.items() if value is not None]
        return sorted(stages, key=lambda stage: stage.ended)

    def find(self, kind: type[T], minutes: float | None = None) -> T | None:
        """Return a finished stage; None if there is none."""
        value = self._log.get(_key(kind.label, minutes))
        return None if value is None else _restored(kind, value["stage"])

    def evaluations(self) -> list[Evaluation]:
        """All finished evaluations, of any minutes."""
        return [_restored(Evaluation, done.stage) for done in self.finished() if done.label == Evaluation.label]

    def seconds(self, kind: type[T], minutes: float | None = None) -> float:
        """Seconds that a finished stage took."""
        return float(self._log.get(_key(kind.label, minutes))["seconds"])

    def files(self, kind: type[T]) -> dict[str, str]:
        """Digests of the files that a finished stage wrote."""
        found: dict[str, str] = self._log.get(kind.label)["files"]
        return found

    def spent(self) -> float:
        """Seconds of the finished stages that all minutes share, and of this process outside of stages."""
        shared = sum(stage.seconds for stage in self.finished() if stage.is_shared)
        return shared + self._before + time.perf_counter() - self._started - self._here

    def run(
        self,
        kind: type[T],
        work: Callable[[], T],
        *,
        minutes: float | None = None,
        directory: Path | None = None,
        reads: Any = None,
    ) -> T:
        """Return a stage from the log, or do its work and store it.

        It is done again if a file that it made in `directory` is gone or changed, or if `reads`, what it depends on, is
        not what it was.
        """
        key = _key(kind.label, minutes)
        value = self._log.get(key)
        done = None if value is None else Finished(**value)
        if done is not None and directory is not None and (lost := _lost(directory, done.files)):
            note(f"{directory / lost} is gone, or not the file that this run made: the stage {key!r} is done again")
            (directory / RECIPE_FILE).unlink(missing_ok=True)  # else the tuning would be told as finished
            done = None
        if done is not None and done.reads != reads:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            self._log.put(key, None)  # if this process is killed, the next one continues what begins here
            done = None
        if done is None:
            clock = self._log.path.with_name(CLOCK_FILE)
            start = time.perf_counter()
            with _counted(clock, key) as (self._before, took):
                stage = asdict(work())
            self._here += time.perf_counter() - start
            self._before = 0.0
            files = {} if directory is None else self._digests(directory)
            done = Finished(kind.label, minutes, time.time(), stage, **took(), files=files, reads=reads)
            self._log.put(key, asdict(done))
            clock.unlink(missing_ok=True)
        return _restored(kind, self._log.get(key)["stage"])

    def _digests(self, directory: Path) -> dict[str, str]:
        """The files of a stage that later stages and users need, with digests of the small ones."""
        files = (file for pattern in self._outputs for file in sorted(directory.glob(pattern)))
        return {file.name: _digest(file) for file in files}


def _remove_results(out: Path) -> None:
    """Remove what a run has made in a directory."""
    for pattern in (PREPARED_FILE, CLOCK_FILE, PICTURE_FILE, *_DIRECTORIES):
        for path in out.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _restored(kind: type[T], values: Mapping[str, Any]) -> T:
    """A stage from its JSON."""
    hints = get_type_hints(kind)
    return kind(
        **{name: hints[name](**value) if is_dataclass(hints[name]) else value for name, value in values.items()}
    )


def _digest(file: Path) -> str:
    if file.suffix == ".safetensors":  # gigabytes
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _lost(directory: Path, files: Mapping[str, str]) -> str | None:
    """The first file that is not there as it was made; None if all are."""
    for name, known in files.items():
        if not (directory / name).is_file() or _digest(directory / name) != known:
            return name
    return None


@contextlib.contextmanager
def _counted(file: Path, key: str) -> Iterator[tuple[float, Callable[[], dict[str, float]]]]:
    """A context in which a stage's times are counted, on top of those of earlier processes; `file` keeps them.

    Gives the seconds of earlier processes, and what returns the times so far.
    """
    before = {"seconds": 0.0, "cpu_seconds": 0.0}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stage"] == key:
            before = {name: float(kept[name]) for name in before}
    start, busy = time.perf_counter(), time.process_time()

    def took() -> dict[str, float]:
        now = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        return {name: round(before[name] + value, 1) for name, value in now.items()}

    try:
        yield before["seconds"], took
    finally:
        with contextlib.suppress(SkipDecodeError):
            write_whole(file, json.dumps({"stage": key} | took()))


# ---------------------------------------------------------------------- the clock


@dataclass(frozen=True)
class Clock:
    """When each stage ends, from the minutes of the whole command; 0 minutes: no stage has an end.

    `from_prompts`: there are no responses to tune on at full depth. `loading`: seconds in which the model was loaded.
    It is copied and saved for tuning, and loaded for the last evaluation, which takes `_LOADS` times as long. The
    adapter, the picture and the card take `_SAVING` seconds more.
    """

    stages: Stages
    minutes: float
    from_prompts: bool
    loading: float

    _LOADS: ClassVar = 3
    _SAVING: ClassVar = 5.0

    @cached_property
    def shares(self) -> dict[str, float]:
        """The most that each stage takes of the minutes; all together leave `TUNED_SHARE` to both tunings."""
        shares = {Answers.label: _ANSWERS, Layers.label: _LAYERS, Evaluation.label: _EVALUATION}
        room = 1 - TUNED_SHARE - (1 + self._LOADS) * self.loading / (60 * self.minutes or math.inf)
        scale = min(1.0, max(_LEAST_SCALE, room / (sum(shares.values()) + _EVALUATION)))
        full = {} if self.from_prompts else {FullDepth.label: _FULL}
        return full | {label: scale * share for label, share in shares.items()}

    def until(self, label: str) -> float:
        """Return the reading of `time.perf_counter()` at which a stage before the tuning under the schedule ends.

        A stage that ends early leaves its time to that tuning.
        """
        labels = list(self.shares)
        before = sum(self.shares[other] for other in labels[: labels.index(label) + 1])
        own = time.perf_counter() + 60 * self.minutes * self.shares[label] if self.minutes else math.inf
        if label == Answers.label:  # of few answers nothing is learned, so a stage before it does not shorten it
            return own
        return min(own, self._reading(self.loading + 60 * self.minutes * before))

    @property
    def end(self) -> float:
        """The reading of `time.perf_counter()` at which the minutes are over."""
        return self._reading(60 * self.minutes)

    def minutes_to_tune(self, evaluation: float) -> float:
        """Return the minutes that are left; `evaluation`: seconds of the first one, which the last one takes too."""
        later = _ENDING * evaluation + self._LOADS * self.loading + self._SAVING
        return self.minutes - (self.stages.spent() + later) / 60

    def _reading(self, spent: float) -> float:
        return time.perf_counter() + spent - self.stages.spent() if self.minutes else math.inf
