"""The log of the stages of `prepare`: each is done once, and counts the time of all its processes.

It is done again if a file that it made in its directory is lost, or what it read has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import PREPARED_FILE
from skipdecode.common.progress import note
from skipdecode.common.resume import ANEW, ResumeLog
from skipdecode.errors import SkipDecodeError
from skipdecode.learning.calibrate import SCHEDULE_FILE
from skipdecode.learning.pace import Pace
from skipdecode.learning.settings import CLOCK_FILE, PREPARE_LOG
from skipdecode.learning.stages import Evaluation, FullDepth, Layers, LearningRecords, Timing, Tuning, TuningPlan
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.loading.card import PICTURE_FILE

_DIRECTORIES = ("answers", "records", "full", "fit", "tuned-*", "eval-*")
_OUTPUTS = (SCHEDULE_FILE, FIT_FILE, "config.json", "adapter_config.json", "*.safetensors", "self*.jsonl")
"""Patterns of the files of a stage that later stages and users need."""

T = TypeVar("T", LearningRecords, Pace, FullDepth, Timing, Layers, Evaluation, TuningPlan, Tuning)


@dataclass(frozen=True)
class Finished:
    """A stage in the log: its cost over all processes, what it read, and digests of the files that it wrote.

    `minutes` is None or 0 for a stage before tuning, which runs of other minutes use too.
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


def _key(label: str, minutes: float | None) -> str:
    return label if minutes is None else f"{label} {minutes:g}"


class Stages:
    """The finished stages of a directory, and the time that they and this process took.

    `settings`: JSON-ready; all that the stages depend on. `started`: reading of `time.perf_counter()` when the minutes
    of this process began. `overwrite`: begin anew, unless the directory has an unfinished run with these settings.
    """

    def __init__(
        self, out: Path, settings: Mapping[str, Any], started: float = 0.0, *, overwrite: bool = False
    ) -> None:
        path, discard = out / PREPARE_LOG, partial(_remove_results, out)
        self._log = ResumeLog(path, settings, what="stages", remedy=ANEW, restart=overwrite, discard=discard)
        if overwrite and (out / PREPARED_FILE).exists():
            self._log.clear()
            discard()
        self._started = started
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

    def done(self, kind: type[T], minutes: float | None = None) -> Finished:
        """Return the entry of a stage that is finished."""
        return Finished(**self._log.get(_key(kind.label, minutes)))

    def spent(self) -> float:
        """Seconds of the finished stages that all minutes share, and of this process that no finished stage counts."""
        shared = sum(stage.seconds for stage in self.finished() if not stage.minutes)
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
        if done is not None and done.stage.keys() != {field.name for field in fields(kind)}:
            done = None  # of an earlier version
        before, now = {} if done is None else done.files, _digests(directory)
        lost = next((name for name, digest in before.items() if now.get(name) != digest), None)
        if lost is not None and directory is not None:
            note(f"{directory / lost} is gone, or not the file that this run made: the stage {key!r} is done again")
        if done is not None and (lost is not None or done.reads != reads):
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
            files = _digests(directory)
            done = Finished(kind.label, minutes, time.time(), stage, **took(), files=files, reads=reads)
            self._log.put(key, asdict(done))
            clock.unlink(missing_ok=True)
        return _restored(kind, self._log.get(key)["stage"])


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


def _digests(directory: Path | None) -> dict[str, str]:
    """The files of a stage in its directory, with digests of the small ones; those of weights are empty."""
    files = [] if directory is None else [file for pattern in _OUTPUTS for file in sorted(directory.glob(pattern))]
    return {f.name: "" if f.suffix == ".safetensors" else hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@contextlib.contextmanager
def _counted(file: Path, key: str) -> Iterator[tuple[float, Callable[[], dict[str, float]]]]:
    """A context in which a stage's times are counted, on top of those of earlier processes; `file` keeps them.

    Gives the seconds of earlier processes, and what returns the times so far.
    """
    before = {"seconds": 0.0, "cpu_seconds": 0.0}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        counts = json.loads(file.read_text(encoding="utf-8"))
        if counts["stage"] == key:
            before = {name: float(counts[name]) for name in before}
    start, busy = time.perf_counter(), time.process_time()

    def took() -> dict[str, float]:
        now = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        return {name: round(before[name] + value, 1) for name, value in now.items()}

    try:
        yield before["seconds"], took
    finally:
        with contextlib.suppress(SkipDecodeError):
            write_whole(file, json.dumps({"stage": key} | took()))
