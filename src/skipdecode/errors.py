"""All errors for users.

::

    SkipDecodeError            base: wrong usage (exit code 2)
    ├── WorkError              the work failed (exit code 1)
    │   ├── DivergedError      a state, loss or gradient that is not finite
    │   ├── FetchError         a model that could not be downloaded or stored; also a ModelLoadError
    │   └── WriteError         results that could not be written; also an OutputError
    ├── UsageError             wrong options on the command line
    │   ├── OptionError        a value that an option does not accept
    │   └── GrammarError       a JSON schema or grammar that cannot be enforced; has the path in the schema
    ├── ScheduleError          a schedule that is not nested, or does not fit the model
    ├── FitError               a fit that cannot be read, or is for another model
    ├── TargetError            a speed target that no schedule reaches
    ├── AttachError            a schedule cannot be attached to the model
    │   ├── UnsupportedModelError   the model type is not supported
    │   └── AlreadyAttachedError    a schedule is attached already
    ├── UnsupportedFeatureError     a generation feature that does not work with skipped layers
    ├── UnfitModelError        the fast engine does not support the model; transformers may
    ├── RefusedEngineError     a vLLM engine that would produce wrong text
    ├── ModelLoadError         a model that cannot be loaded
    ├── DataError              prompts or records that cannot be read; has the line number
    ├── OutputError            a path that the results cannot be written to
    └── MissingExtraError      an optional dependency is not installed

There are three warnings: `UntunedScheduleWarning`, `DepthWarning` and `UntestedVersionWarning`. Messages are one line:
what was wrong, what is accepted, what to do.
"""

from __future__ import annotations


class SkipDecodeError(Exception):
    """Base of all errors that this package raises."""

    exit_code = 2


class WorkError(SkipDecodeError):
    """The work failed after it had started."""

    exit_code = 1


class UsageError(SkipDecodeError):
    """A wrong command line."""


class OptionError(UsageError):
    """A value that an option does not accept.

    `name` is the field of the option, `value` the given value; `accepted` are the accepted values, in words.
    """

    def __init__(self, name: str, value: object, accepted: str) -> None:
        super().__init__(f"{name}={value!r} is not accepted: give {accepted}")
        self.name, self.value, self.accepted = name, value, accepted


class GrammarError(UsageError):
    """A JSON schema or another grammar that cannot be enforced.

    `reason` says why, in one line; `path` is a JSON pointer to the part of the schema, and added to the message.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"the schema cannot be enforced at {path}: {reason}" if path else reason)
        self.path = path


class ScheduleError(SkipDecodeError, ValueError):
    """A schedule that is not nested, skips a layer that must run, or does not fit the model."""


class FitError(SkipDecodeError, ValueError):
    """A fit that cannot be read, is not finite, or is for another model or prompt set."""


class TargetError(SkipDecodeError, ValueError):
    """A speed target that no schedule reaches; the message has the bound and its cause."""


class AttachError(SkipDecodeError):
    """A schedule cannot be attached to the model."""


class UnsupportedModelError(AttachError, TypeError):
    """The model type is not in the table of families."""


class AlreadyAttachedError(AttachError, RuntimeError):
    """The model already has an attached schedule."""


class UnsupportedFeatureError(SkipDecodeError, ValueError):
    """A generation feature that cannot work with skipped layers; the message names it."""


class UnfitModelError(SkipDecodeError):
    """The fast engine does not support the model or the machine; the message has the reason."""


class RefusedEngineError(SkipDecodeError):
    """A vLLM engine whose schedule does not fit, or with a feature that does not work with skipped layers."""


class ModelLoadError(SkipDecodeError):
    """A model name, directory or file that cannot be loaded."""


class FetchError(WorkError, ModelLoadError):
    """A model that could not be downloaded or stored, because of the network or the disk."""


class DataError(SkipDecodeError):
    """Records that cannot be read.

    `line` is the 1-based number of the line in the file, `index` the 0-based index in a list of prompts; the message
    begins with the number that is known. `id` is the record's, if it is known.
    """

    def __init__(
        self, message: str, line: int | None = None, *, index: int | None = None, id: str | None = None
    ) -> None:
        where = "" if line is None else f"line {line}: "
        if index is not None:
            where = f"prompts[{index}]: "
        super().__init__(where + message)
        self.line, self.index, self.id = line, index, id


class OutputError(SkipDecodeError):
    """A path that the results cannot be written to; raised before the work starts."""


class WriteError(WorkError, OutputError):
    """Results that could not be written after the work had started."""


class DivergedError(WorkError):
    """A state, loss or gradient that is not finite; the message names the records."""


class MissingExtraError(SkipDecodeError, ImportError):
    """An optional dependency is not installed.

    `what` is the feature that needs it, `extra` the extra of this package that installs it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'skipdecode[{extra}]'")


class UntestedVersionWarning(UserWarning):
    """A package whose installed version is outside the range that was tested."""


class UntunedScheduleWarning(UserWarning):
    """A schedule with weights that were not tuned under it, or under fewer layers: the text degrades."""


class DepthWarning(UserWarning):
    """Tokens of a forward run other layers than the schedule may suggest: all are prompt, or a turn on a used cache."""
