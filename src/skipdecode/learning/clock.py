"""When each stage of `prepare` ends, from the minutes of the whole command."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from skipdecode.learning.stage_log import Stages
from skipdecode.learning.stages import Evaluation, FullDepth, Layers, LearningRecords

TUNED_SHARE = 1 / 2
"""Of the minutes, at least, at full depth and under the schedule; the other stages shrink first."""
_FULL, _ANSWERS, _LAYERS, _EVALUATION = 1 / 4, 1 / 8, 1 / 8, 1 / 12  # of the minutes, at most; two evaluations
_LEAST_SCALE = 0.2  # of these shares, where loading the model takes most of the rest
_ENDING = 1.05  # times the first evaluation: the last one, with its table


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
        shares = {LearningRecords.label: _ANSWERS, Layers.label: _LAYERS, Evaluation.label: _EVALUATION}
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
        if label == LearningRecords.label:  # nothing is learned of few answers: no stage before shortens this one
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
