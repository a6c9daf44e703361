"""The stages of `prepare` as data: what each leaves to later ones. A label and its minutes are the key in the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.data.examples import RecordOptions
from skipdecode.data.source import Source
from skipdecode.learning.settings import EvaluationSize, SearchSize

_SOME_TUNING = 0.1  # of the minutes: with less, nothing is tuned
_TEACHES = 0.1  # of the dev loss: what the second half of a tuning takes off if its records still teach
_DETERMINED = 0.5  # nats a token: above it other writers had written other responses, and greedy answers teach more


@dataclass(frozen=True)
class LearningRecords:
    """The records that all later stages learn: with the user's responses, or with the model's `own` answers."""

    label: ClassVar = "answers"
    train: Source
    dev: Source
    options: RecordOptions  # by which they become prompt and response
    own: bool = False
    distributions: str | None = None  # the file with what the model would choose at each position of its answers


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
    def is_learned(self) -> bool:
        """Whether the records teach full depth no more: a score that is low then is low by the task, as a summary's."""
        return len(self.dev_losses) > 1 and not self.is_learning

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
    """The cost of a step of decoding, a `CostModel` as JSON, and the search that fits into the time.

    `target` is the speed-up of steps with which whole requests reach the speed-up that is asked for.
    """

    label: ClassVar = "timing"
    cost: dict[str, Any]
    target: float
    search: SearchSize


@dataclass(frozen=True)
class Layers:
    """The size of both evaluations; the schedule that reaches the target and its fit are files of the stage.

    `request_tokens`: mean new tokens of a record.
    """

    label: ClassVar = "layers"
    size: EvaluationSize
    request_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """Rows of the evaluated schedules, before tuning (0 minutes in the log) or after."""

    label: ClassVar = "evaluation"
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
