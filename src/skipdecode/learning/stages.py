"""The stages of a long run: each is done once, counts the time of all its processes, and notices lost files.

The sizes of `prepare`'s stages fit into the user's minutes, by the speed of the model on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skipdecode.common.files import write_whole
from skipdecode.common.journal import KeptValues
from skipdecode.common.progress import note
from skipdecode.data.batches import batches_of, response_logits
from skipdecode.data.examples import Example
from skipdecode.errors import SkipDecodeError
from skipdecode.learning.settings import CLOCK_FILE
from skipdecode.learning.tune import in_hardware_type
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


SHARES = {"answers": 1 / 4, "layers": 1 / 4, "evaluation": 1 / 6}  # of the minutes, at most; tuning has the rest
_PRODUCTS = 1.3  # of the time of a fit's forward passes, with the products of its states
_TIMED = 2  # records
_LEAST_TEXTS = 48  # of an evaluation
TYPICAL = Example("", *2 * (tuple(1 + i % 8 for i in range(96)),))  # before there are texts
_DEV_SHARE = 0.02  # of the minutes: a pass over the dev records
_LEAST_RECORDS, _MOST_RECORDS = 8, 64
_TOKENS_A_COLUMN = 8  # of a fit, for each column of the states: fewer are taken only where nothing else is left to save
_MOST_A_COLUMN = 28  # tokens of a fit: twice as many lower the KL by 3% (docs/LOG.md)
_SEARCHES: tuple[dict[str, Any], ...] = (
    {"records": 8, "fit_depths": 4, "spread_prompts": True},
    {"records": 8, "fit_depths": 2, "spread_prompts": False},
    {"records": 4, "fit_depths": 2, "spread_prompts": False},
)
# `tokens` is the share of an own text's tokens: the last ones are of short texts, but never of fewer.
EVALUATIONS = tuple(
    dict(zip(("records", "neighbours", "speed_batches", "speed_rounds", "tokens"), size, strict=True))
    for size in (
        (64, True, 4, 3, 1.0),
        (64, True, 1, 3, 1.0),
        (_LEAST_TEXTS, True, 1, 3, 1.0),
        (_LEAST_TEXTS, True, 1, 2, 0.5),
        (_LEAST_TEXTS, False, 1, 2, 0.5),
        (_LEAST_TEXTS, False, 1, 2, 0.25),
        (_LEAST_TEXTS, False, 1, 1, 0.25),
        (_LEAST_TEXTS, False, 1, 1, 0.125),
    )
)
_WAYS = 1.2  # times the work of the schedules: W8A8 takes half of it, drafts at full depth the rest
_READ = 0.4  # of the time of transformers' forward, where the fast engine reads texts

Floats = Sequence[float]


@dataclass(frozen=True)
class Pace:
    """Tokens per second of a model's forward at full depth, and the mean tokens of a prompt with its response."""

    tokens_per_second: float
    text_tokens: float

    @classmethod
    def of(cls, model: Any, examples: Sequence[Example]) -> Pace:
        """Measured in two forwards on a few records, of which the second counts, in the type that learning takes."""
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

    def enough(self, width: int, methods: int) -> float:
        """About the minutes of which a third is left to tune, after the smallest stages, for texts of this length."""
        search = _PRODUCTS * (2 * _TOKENS_A_COLUMN * width + 4 * _LEAST_RECORDS * self.text_tokens)
        evaluation = methods * _LEAST_TEXTS * self.text_tokens * 2  # generated, timed and read
        return 1.5 * (24 * self.text_tokens + search + 2 * evaluation) / self.tokens_per_second / 60

    def search(self, seconds: float, width: int, prompt_sets: int) -> dict[str, Any]:
        """Settings of a calibration that takes about so many seconds: the most thorough one whose fit has tokens.

        `width` is hidden_size, `prompt_sets` the number of prompt sets to try, without evenly spaced ones.
        """
        found: dict[str, Any] = {}
        for found in _SEARCHES:
            sets = prompt_sets * (1 + found["spread_prompts"])
            measured = found["records"] * self.text_tokens * (1 + sets)
            # Sets of the lowest layers share full depth's states; others have states of half of the layers.
            passes = _PRODUCTS * (1 + 0.3 * found["fit_depths"] + (0.4 if found["spread_prompts"] else 0.05) * sets)
            tokens = (seconds * self.tokens_per_second - measured) / passes
            if tokens >= _TOKENS_A_COLUMN * width:
                break
        return found | {"fit_tokens": max(1, min(_MOST_A_COLUMN * width, round(tokens)))}

    def evaluation(
        self, seconds: float, per_batch: Floats, batch: int, most: int, speedups: Floats, own: bool, ways: bool
    ) -> dict[str, Any]:
        """The size of an evaluation that takes about so many seconds, or the smallest one.

        `per_batch` are seconds of a batch at full depth, of its prompts and of its decoding; `speedups` those of full
        depth and the schedules; `own`: texts of the model, which it reads again; `ways`: other weights and drafts too.
        """
        found: dict[str, Any] = {}
        for found in EVALUATIONS:
            sides = speedups if found["neighbours"] else speedups[:2]
            records, cut = min(most, found["records"]), found["tokens"] if own else 1.0
            timed = found["speed_rounds"] * min(found["speed_batches"], -(-records // batch)) + ways
            times = sum(1 / one for one in sides) * (1 + _WAYS * ways) * (records / batch + timed)
            took = times * (per_batch[0] + cut * per_batch[1])
            took += cut * _READ * own * (len(sides) + ways) * records * self.text_tokens / self.tokens_per_second
            if took <= seconds:
                break
        return found | {"records": min(most, found["records"])}

    def dev_records(self, seconds: float) -> int:
        """Dev records whose loss takes a small part of so many seconds."""
        affordable = _DEV_SHARE * seconds * self.tokens_per_second / self.text_tokens
        return min(_MOST_RECORDS, max(_LEAST_RECORDS, int(affordable)))
