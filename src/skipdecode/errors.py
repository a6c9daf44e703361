"""Every error a user can meet.

::

    SkipDecodeError            base; what was asked cannot be done as written (the command line's exit code is then 2)
    ├── WorkError              the work failed once it had begun (exit code 1)
    │   ├── DivergedError      a loss that is no number
    │   ├── FetchError         a model that could not be fetched or kept; a ModelLoadError too
    │   └── WriteError         results that could not be written; an OutputError too
    ├── UsageError             wrong flags or values on the command line
    │   └── OptionError        a value that an option does not accept
    ├── ScheduleError          a schedule that is not nested, or does not fit the model
    ├── FitError               a fit that cannot be read, or is for another model
    ├── TargetError            a wall-clock target that no schedule of this kind reaches
    ├── AttachError            the model cannot be gated
    │   ├── UnsupportedModelError   its architecture is not in the table of families
    │   └── AlreadyAttachedError    a schedule is attached already
    ├── UnsupportedFeatureError     a generation feature that breaks cached skipping, refused by name
    ├── UnfitModelError        the fast engine does not cover the model; transformers' own forward still may
    ├── RefusedEngineError     a vLLM engine that would give wrong text, refused before it starts
    ├── ModelLoadError         a model name or directory that does not load
    ├── DataError              prompts or records that cannot be read; carries the line number
    ├── OutputError            a place that cannot take the results
    └── MissingExtraError      an optional dependency is absent; says what to install

Beside them one warning: `UntunedScheduleWarning`.

Messages are one line: what was wrong, what is accepted, what to do.
"""

from __future__ import annotations

__all__ = [
    "AlreadyAttachedError",
    "AttachError",
    "DataError",
    "DivergedError",
    "FetchError",
    "FitError",
    "MissingExtraError",
    "ModelLoadError",
    "OptionError",
    "OutputError",
    "RefusedEngineError",
    "ScheduleError",
    "SkipDecodeError",
    "TargetError",
    "UnfitModelError",
    "UnsupportedFeatureError",
    "UnsupportedModelError",
    "UntunedScheduleWarning",
    "UsageError",
    "WorkError",
    "WriteError",
]


class SkipDecodeError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code = 2


class WorkError(SkipDecodeError):
    """The work failed once it had begun."""

    exit_code = 1


class UsageError(SkipDecodeError):
    """A command line that cannot be carried out as written."""


class OptionError(UsageError):
    """A value that an option does not accept.

    Parameters
    ----------
    name : str
        The option's field.
    value : Any
        What was given.
    accepted : str
        What is accepted, in words.
    """

    def __init__(self, name: str, value: object, accepted: str) -> None:
        super().__init__(f"{name}={value!r} is not accepted: give {accepted}")
        self.name, self.value, self.accepted = name, value, accepted


class ScheduleError(SkipDecodeError, ValueError):
    """A schedule that is not nested, drops a layer it must keep, or does not fit the model."""


class FitError(SkipDecodeError, ValueError):
    """A fit that cannot be read, is not finite, or is for another model or prompt set."""


class TargetError(SkipDecodeError, ValueError):
    """A speed target out of reach; the message states the bound and what sets it."""


class AttachError(SkipDecodeError):
    """The model cannot be gated."""


class UnsupportedModelError(AttachError, TypeError):
    """The model's architecture is not in the table of families."""


class AlreadyAttachedError(AttachError, RuntimeError):
    """A schedule is attached to this model already."""


class UnsupportedFeatureError(SkipDecodeError, ValueError):
    """A generation feature that cannot work with skipped layers, refused by name."""


class UnfitModelError(SkipDecodeError):
    """The fast engine does not cover this model, or cannot run here; the message says what it met."""


class RefusedEngineError(SkipDecodeError):
    """A vLLM engine whose schedule does not fit, or that is asked for something that skipped layers break."""


class ModelLoadError(SkipDecodeError):
    """A model name, directory or file that does not load."""


class FetchError(WorkError, ModelLoadError):
    """A model that could not be fetched, or kept: the network or the disk is at fault, not its name."""


class DataError(SkipDecodeError):
    """Records that cannot be read.

    Parameters
    ----------
    message : str
        What is wrong and what is accepted.
    line : int, optional
        1-based line number in the file; put in front of the message.
    index : int, optional
        Place in a list of prompts, from 0 on; put in front of the message.
    id : str, optional
        The record's own id, where it is known.
    """

    def __init__(
        self, message: str, line: int | None = None, *, index: int | None = None, id: str | None = None
    ) -> None:
        where = f"prompts[{index}]: " if index is not None else "" if line is None else f"line {line}: "
        super().__init__(where + message)
        self.line, self.index, self.id = line, index, id


class OutputError(SkipDecodeError):
    """A place that cannot take the results: it is told before the work begins."""


class WriteError(WorkError, OutputError):
    """Results that could not be written once the work had begun."""


class DivergedError(WorkError):
    """A loss or gradient that is no number, or no longer one; the message names the records."""


class MissingExtraError(SkipDecodeError, ImportError):
    """An optional dependency is absent.

    Parameters
    ----------
    what : str
        The feature that needs it.
    extra : str
        The extra of this package that brings it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'skipdecode[{extra}]'")


class UntunedScheduleWarning(UserWarning):
    """A schedule on weights that were not tuned under it or a deeper cut: the text breaks."""
