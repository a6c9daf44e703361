"""The command line: each verb has a module, which is imported only when the verb is called; --help is then fast.

The module of a verb has a docstring (its description), a frozen `Config` dataclass whose fields are the options
(`skipdecode.common.options.option`), and `run(config) -> int`. The config also declares the paths that the verb reads
and writes, and options that need or exclude each other. Rooms below this one write an option in a message as
`prompt_field`, which users of the command line see as --prompt-field.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from skipdecode import __version__
from skipdecode.cli.arguments import (
    Parser,
    add_options,
    check_together,
    claimed,
    config_from,
    positionals,
    resumes,
    with_flags,
)
from skipdecode.common.environment import COMMAND, isolated_torch
from skipdecode.common.options import kinds, near
from skipdecode.common.progress import detailed, note, quiet
from skipdecode.errors import SkipDecodeError
from skipdecode.schedule.grammar import SCHEDULES

__all__ = ["VERBS", "main"]

VERBS = {
    "prepare": "make a model fast in minutes: choose layers, tune, evaluate",
    "generate": "generate text for every prompt of a file, with fewer layers per token",
    "serve": "start an OpenAI-compatible server with a schedule per request",
    "chat": "chat with a model in the terminal",
    "plan": "find a schedule for a speed target, and predict its speed",
    "tune": "fine-tune a model under a schedule (LoRA or all weights)",
    "eval": "measure quality, fidelity and speed; compare runs",
    "export": "write the model of a flat schedule as a smaller ordinary model",
    "info": "list versions, devices, supported model types and cached models",
}
_INTERRUPTED, _TERMINATED = 130, 143
_MORE = "more: docs/first-model.md (a tour), docs/commands.md (all verbs)"
_DEBUG = "show tracebacks, details of the run, and warnings of other packages"
# Errors of a path in the command: wrong usage, not failed work.
_NO_SUCH_PATH = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_NO_MEMORY = re.compile("can't allocate memory|out of memory", re.IGNORECASE)  # torch has no class for the CPU's
_TOO_LARGE = "the memory is too small: lower the batch size or the number of tokens"


@isolated_torch()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code (0 done, 1 work failed, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        with detailed() if debug else quiet(), _sigterm_raised():
            return _run(arguments)
    except SkipDecodeError as error:
        return _fail(str(error), error.exit_code, debug)
    except _Terminated as stop:
        return _fail(f"terminated{stop}", _TERMINATED, debug)
    except KeyboardInterrupt as stop:
        return _fail(f"interrupted{stop}", _INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader of the output has ended (`| head`).
        sys.stderr.close()
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 2 if isinstance(error, _NO_SUCH_PATH) else 1, debug)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            return _fail(f"{_TOO_LARGE} ({error}; --debug shows the traceback)", 1, debug)
        return _fail(f"{type(error).__name__}: {error} (--debug shows the traceback)", 1, debug)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the work as Ctrl-C does."""


@contextlib.contextmanager
def _sigterm_raised() -> Iterator[None]:
    """Raise `_Terminated` on SIGTERM, where nobody else handles the signal."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if verb not in VERBS:
        parser = _top_parser()
        if not verb.startswith("-"):
            parser.error(f"unknown verb {verb!r}{near(verb, VERBS)}: accepted are {', '.join(VERBS)}")
        parser.read([verb, *arguments[1:]])
    module = importlib.import_module(f"skipdecode.cli.{verb}")
    from skipdecode.cli.options import check_inputs  # which --version and wrong verbs do without

    parser = Parser(
        prog=f"skipdecode {verb}",
        usage=f"skipdecode {verb} [OPTIONS] {' '.join(map(str.upper, positionals(module.Config)))}",
        description=module.__doc__,
        epilog=(SCHEDULES if "schedule" in kinds(module.Config) else "") + _MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, module.Config)
    parser.add_argument("--debug", action="store_true", help=_DEBUG)
    command = COMMAND.set(shlex.join(["skipdecode", *arguments]))
    try:
        config = config_from(module.Config, parser.read(arguments[1:]))
        with claimed(config):
            check_together(config)
            check_inputs(config)
            if sys.modules.get("torch") is None and (model := getattr(config, "model", None)):
                note(f"loading {model}")  # seconds pass before torch is imported
            return int(module.run(config))
    except KeyboardInterrupt as stop:
        continues = "; the same command continues" if resumes(module.Config) else ""
        raise type(stop)(str(stop) or continues) from None
    except SkipDecodeError as error:
        raise with_flags(error, module.Config) from error.__cause__
    finally:
        COMMAND.reset(command)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"skipdecode: {' '.join(message.split())}", file=sys.stderr)
    return code


def _top_parser() -> Parser:
    width = max(map(len, VERBS))
    lines = "\n".join(f"  {verb:<{width}}  {line}" for verb, line in VERBS.items())
    parser = Parser(
        prog="skipdecode",
        description=f"Layer-skipping decoding that keeps batching and KV caching.\n\nverbs:\n{lines}",
        epilog="skipdecode VERB --help lists the options of a verb",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", metavar="VERB", help="one of the verbs above")
    parser.add_argument("--debug", action="store_true", help=_DEBUG)
    parser.add_argument("--version", action="version", version=f"skipdecode {__version__}")
    return parser
