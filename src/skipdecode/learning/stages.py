"""The stages of a long run: each is done once, counts the time of all its processes, and notices lost files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skipdecode.common.files import write_whole
from skipdecode.common.journal import KeptValues
from skipdecode.common.progress import note
from skipdecode.errors import SkipDecodeError
from skipdecode.learning.settings import CLOCK_FILE
from skipdecode.models.carried import RECIPE_FILE

SHARED = ("answers", "sizes", "layers", "evaluation 0")  # their results serve any number of minutes


class Stages:
    """Finished stages by name, in a journal.

    `path`: the journal. `settings`: JSON-ready; all that the stages depend on. `outputs`: patterns of the files that a
    stage makes.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], outputs: Sequence[str] = ()) -> None:
        self._kept = KeptValues(path, settings, pieces="stages", remedy="give another output directory")
        self._outputs = outputs
        self._here = 0.0  # seconds of the stages that this process ran

    def close(self) -> None:
        """Close the journal."""
        self._kept.close()

    def finished(self) -> dict[str, Any]:
        """All finished stages, in the order of their completion."""
        return dict(self._kept.read())

    def spent(self, started: float) -> float:
        """Seconds of the finished stages that all minutes share, and of this process outside of stages."""
        shared: float = sum(stage["seconds"] for name, stage in self.finished().items() if name in SHARED)
        return shared + time.perf_counter() - started - self._here

    def run(
        self, name: str, work: Callable[[], dict[str, Any]], *, place: Path | None = None, of: Any = None
    ) -> dict[str, Any]:
        """The result of a stage with its times (seconds, cpu_seconds), from an earlier run or computed now.

        A stage is computed again if a file that it made in `place` is gone or changed, or if `of`, what it depends on,
        is not what it was.
        """
        stage: dict[str, Any] | None = self._kept.get(name)
        if stage is not None and place is not None and (lost := _lost(place, stage.get("files", {}))):
            note(f"{place / lost} is gone, or not the file that this run made: the stage {name!r} is done again")
            (place / RECIPE_FILE).unlink(missing_ok=True)  # else the tuning would be told as finished
            stage = None
        if stage is None or stage.get("of", of) != of:
            clock = self._kept.path.with_name(CLOCK_FILE)
            start = time.perf_counter()
            with _counted(clock, name) as took:
                found = work()
            self._here += time.perf_counter() - start
            made = {} if place is None else {"files": self._files(place)}
            times = {key: round(value, 1) for key, value in took().items()}
            self._kept.put(name, found | times | made | {"of": of})
            clock.unlink(missing_ok=True)
            stage = dict(self._kept.get(name))
        return stage

    def _files(self, place: Path) -> dict[str, str]:
        """The files of a stage that later stages and users need, with digests of the small ones."""
        files = (file for pattern in self._outputs for file in sorted(place.glob(pattern)))
        return {file.name: _digest(file) for file in files}


def _digest(file: Path) -> str:
    if file.suffix == ".safetensors":  # gigabytes
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _lost(place: Path, files: Mapping[str, str]) -> str | None:
    """The first file that is not there as it was made; None if all are."""
    return next((n for n, known in files.items() if not (place / n).is_file() or _digest(place / n) != known), None)


@contextlib.contextmanager
def _counted(file: Path, name: str) -> Iterator[Callable[[], dict[str, float]]]:
    """A context in which a stage's times are counted, on top of those of earlier processes; `file` keeps them."""
    before = {"seconds": 0.0, "cpu_seconds": 0.0}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stage"] == name:
            before = {key: float(kept[key]) for key in before}
    start, busy = time.perf_counter(), time.process_time()

    def took() -> dict[str, float]:
        now = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        return {key: before[key] + value for key, value in now.items()}

    try:
        yield took
    finally:
        with contextlib.suppress(SkipDecodeError):
            write_whole(file, json.dumps({"stage": name} | took()))
