"""Every error a user can meet.

::

    SkipDecodeError            base; ``exit_code`` is what the command line returns
    ├── UsageError             wrong flags or values on the command line (exit code 2)
    │   └── OptionError        a value that an option does not accept
    ├── ScheduleError          a schedule that is not nested, or does not fit the model (exit code 2)
    ├── TargetError            a wall-clock target that no schedule of this kind reaches (exit code 2)
    ├── AttachError            the model cannot be gated
    │   ├── UnsupportedModelError   its architecture is not in the table of families
    │   └── AlreadyAttachedError    a schedule is attached already
    ├── UnsupportedFeatureError     a generation feature that breaks cached skipping, refused by name
    ├── UnfitModelError        the fast engine does not cover the model; transformers' own forward still may
    ├── RefusedEngineError     a vLLM engine that would give wrong text, refused before it starts
    ├── ModelLoadError         a model name or directory that does not load
    ├── DataError              prompts or records that cannot be read; carries the line number
    ├── OutputError            results that cannot be written
    ├── DivergedError          a tuning run whose loss is no longer a number
    └── MissingExtraError      an optional dependency is absent; says what to install

Messages are one line: what was wrong, what is accepted, what to do.
"""

from __future__ import annotations

__all__ = [
    "AlreadyAttachedError",
    "AttachError",
    "DataError",
    "DivergedError",
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
    "UsageError",
]


class SkipDecodeError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code = 1


class UsageError(SkipDecodeError):
    """A command line that cannot be carried out as written."""

    exit_code = 2


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

    exit_code = 2


class TargetError(SkipDecodeError, ValueError):
    """A speed target out of reach; the message states the bound and what sets it."""

    exit_code = 2


class AttachError(SkipDecodeError):
    """The model cannot be gated."""


class UnsupportedModelError(AttachError, TypeError):
    """The model's architecture is not in the table of families."""


class AlreadyAttachedError(AttachError, RuntimeError):
    """A schedule is attached to this model already."""


class UnsupportedFeatureError(SkipDecodeError, ValueError):
    """A generation feature that cannot work with skipped layers, refused by name."""


class UnfitModelError(SkipDecodeError):
    """The fast engine does not cover this model; the message says what it met."""


class RefusedEngineError(SkipDecodeError):
    """A vLLM engine whose schedule does not fit, or that is asked for something that skipped layers break."""


class ModelLoadError(SkipDecodeError):
    """A model name, directory or file that does not load."""


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
    """

    def __init__(self, message: str, line: int | None = None, *, index: int | None = None) -> None:
        where = f"prompts[{index}]: " if index is not None else "" if line is None else f"line {line}: "
        super().__init__(where + message)
        self.line, self.index = line, index


class OutputError(SkipDecodeError):
    """Results that cannot be written."""


class DivergedError(SkipDecodeError):
    """A tuning run whose loss or gradient is no longer a number; the message says where the batch is recorded."""


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
