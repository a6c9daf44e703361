"""The command line: one verb, one module, imported only when it is called, so that --help stays quick.

A verb module has a docstring (its first line is the help line), a frozen `Config` dataclass whose fields are the
options (`skipdecode.common.options.option`) and say which paths it reads and writes (`skipdecode.cli.paths` checks
those first), and `run(config) -> int`. `prepare_parser(parser, arguments)`, where
there is one, sets other defaults before the arguments are parsed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext

from skipdecode import __version__
from skipdecode.cli.arguments import Parser, add_options, config_from
from skipdecode.cli.paths import claimed
from skipdecode.common.progress import quiet
from skipdecode.common.registry import near
from skipdecode.errors import SkipDecodeError

__all__ = ["VERBS", "main"]

VERBS = {
    "demo": "the main job on the embedded default model: full depth and schedules, side by side",
    "plan": "a schedule for a model and a speed target, as a picture, with request, decode and nominal speed-up",
    "simulate": "throughput and latency of many requests on modelled workers, without a model",
    "generate": "text for every prompt of a file, in batches, with fewer layers per token",
    "chat": "talk to a model in the terminal, schedules switchable between turns",
    "prepare": "a fast checkpoint in minutes: layer order and fit, tuning from the fit, both evaluated",
    "tune": "fine-tune a model under a schedule, as a LoRA adapter or in all weights",
    "calibrate": "which layers to leave out, and where in the text, learned on your records",
    "eval": "quality, fidelity and measured speed on a task; runs compared; an HTML report",
    "report": "result files as one HTML page that works offline",
    "bench": "decoding speed of engines and schedules, next to the limit that the machine sets",
    "export": "a flat schedule's model as a smaller ordinary one, for transformers, vLLM and llama.cpp",
    "serve": "an OpenAI-compatible server with a schedule per request, and a page to try it",
    "info": "versions, devices, supported families, cached models",
}
_INTERRUPTED = 130
_DEBUG = "show the traceback of an error, and what other packages warn of"
# What is at a path that was given, or is not: the command, not the work, is at fault.
_NO_SUCH_PATH = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code (0 done, 1 failed at work, 2 cannot be done as written, 130 interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        with nullcontext() if debug else quiet():
            return _run(arguments)
    except SkipDecodeError as error:
        return _fail(str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing more to say, and nowhere to say it.
        sys.stderr.close()
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 2 if isinstance(error, _NO_SUCH_PATH) else 1, debug)
    except Exception as error:
        if debug:
            raise
        return _fail(f"{type(error).__name__}: {error} (--debug shows where it comes from)", 1, debug)


def _run(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if verb not in VERBS:
        parser = _top_parser()
        if not verb.startswith("-"):
            parser.error(f"unknown verb {verb!r}{near(verb, VERBS)}: accepted are {', '.join(VERBS)}")
        parser.read([verb, *arguments[1:]])
    module = importlib.import_module(f"skipdecode.cli.{verb}")
    parser = Parser(prog=f"skipdecode {verb}", description=module.__doc__, formatter_class=_Help)
    add_options(parser, module.Config)
    if hasattr(module, "prepare_parser"):
        module.prepare_parser(parser, arguments[1:])
    parser.add_argument("--debug", action="store_true", help=_DEBUG)
    config = config_from(module.Config, parser.read(arguments[1:]))
    with claimed(config):
        return int(module.run(config))


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"skipdecode: {' '.join(message.split())}", file=sys.stderr)
    return code


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown where there is one, descriptions as written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, (), "") else super()._get_help_string(action)


def _top_parser() -> Parser:
    width = max(map(len, VERBS))
    lines = "\n".join(f"  {verb:<{width}}  {line}" for verb, line in VERBS.items())
    parser = Parser(
        prog="skipdecode",
        description=f"Layer-skipping decoding that keeps batching and KV caching.\n\nverbs:\n{lines}",
        epilog="skipdecode VERB --help tells a verb's options",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", metavar="VERB", help="one of the verbs above")
    parser.add_argument("--debug", action="store_true", help=_DEBUG)
    parser.add_argument("--version", action="version", version=f"skipdecode {__version__}")
    return parser
