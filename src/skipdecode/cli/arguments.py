"""Command-line arguments from the option fields of a config dataclass, and checks of the paths among them.

Paths are checked before any work, as the options declare them (`path` of `option`): no file is both read and written,
or written twice; an existing file is replaced only with --overwrite; a directory is absent, empty or of an earlier run,
and one run at a time writes into it. A link counts as its target. Devices, pipes and ``-`` are written without these
checks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from skipdecode.common.files import RunDirectory, check_output, locked
from skipdecode.common.jsonl import Json, prepared_use
from skipdecode.common.options import Kind, Options, Reads, Writes, kinds, near
from skipdecode.common.progress import note
from skipdecode.errors import OptionError, SkipDecodeError, UsageError

T = TypeVar("T")


# The groups of `--help`, in order; an option that is in none of them is one for experts.
GROUPS = {
    "most used": (
        *("input", "train", "dev", "test", "data", "self", "prompts", "out", "output", "schedule", "target_speedup"),
        *("keep", "minutes", "steps", "max_new_tokens", "compare", "system", "host", "port", "json", "types"),
    ),
    "data": (
        *("task", "prompt_template", "prompt_field", "response_field", "format", "chat", "template"),
        *("chat_template_kwargs", "bad_records", "limit", "test_records", "dev_records", "metrics"),
        *("output_format", "include_prompt", "summary", "recipe", "overwrite", "push_to_hub"),
    ),
    "sampling": ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "json_schema", "exact"),
}
_EXPERTS = "experts"


def add_options(parser: Parser, config: type) -> None:
    """Add an argument for each `option` field of `config`, in the groups of `GROUPS`."""
    options_by_name = kinds(config)
    parser.settings = [name for name, kind in options_by_name.items() if not kind.metadata["flag"]]
    # With any number of positional arguments, a flag with several values would take those too.
    one_each = any(kind.many and kind.metadata["positional"] for kind in options_by_name.values())
    groups = {title: parser.add_argument_group(title) for title in (*GROUPS, _EXPERTS)}
    titles = {name: title for title, names in GROUPS.items() for name in names}
    order = [*positionals(config), *titles]
    flags = [field for field in dataclasses.fields(config) if field.name in options_by_name and field.metadata["flag"]]
    for field in sorted(flags, key=lambda field: [*order, field.name].index(field.name)):
        group = parser if field.metadata["positional"] else groups[titles.get(field.name, _EXPERTS)]
        _add(group, field, options_by_name[field.name], None if one_each else "+")


def positionals(config: type) -> list[str]:
    """The options without a flag, in order."""
    return [name for name, kind in kinds(config).items() if kind.metadata["positional"]]


def config_from(config: type[T], args: argparse.Namespace) -> T:
    """The config from parsed arguments; raises OptionError if a value is not accepted.

    In place of a directory that `prepare` wrote, it has the model and the options that this directory recommends. A
    config whose `follows_prepared` is false is about the directory itself.
    """
    known = kinds(config)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(args).items() if name in known}
    use = prepared_use(str(values.get("model", ""))) if getattr(config, "follows_prepared", False) else {}
    for name, value in use.items():
        if name in known and (name == "model" or name not in values):
            values[name] = (value,) if known[name].many else value
            if known[name].many and "default" in known:
                values["default"] = value
    return config(**values)


def with_flags(error: SkipDecodeError, config: type) -> SkipDecodeError:
    """The error with flags in place of options, which messages for Python write as `prompt_field`."""
    known = {name for name, kind in kinds(config).items() if kind.metadata["flag"]}
    if isinstance(error, OptionError) and error.name in known:
        name = option_name(config, error.name)
        return UsageError(f"{name} {error.value!r} is not accepted: give {error.accepted}")
    names = "|".join(known)
    error.args = (re.sub(rf"`({names})`", lambda match: option_name(config, match[1]), str(error)), *error.args[1:])
    return error


def check_together(config: Any) -> None:
    """Refuse, with a UsageError, options that break `ONE_OF`, `NEEDS` or `EXCLUDES` of the config's class."""
    shown = {name: option_name(type(config), name) for name in kinds(type(config))}
    set_options = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default}
    for names in config.ONE_OF:
        if not set_options.intersection(names):
            raise UsageError(f"{shown[names[0]]} is missing: give {' or '.join(shown[name] for name in names)}")
    for name, others in config.NEEDS.items():
        if name in set_options and not set_options.intersection(others):
            wanted = " or ".join(shown[other] for other in others)
            raise UsageError(f"{shown[name]} needs {wanted}: add it, or leave out {shown[name]}")
    for name, others in config.EXCLUDES.items():
        if name in set_options and (clash := next((other for other in others if other in set_options), None)):
            raise UsageError(f"{shown[name]} and {shown[clash]} exclude each other: give one of them")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def option_name(config: type, name: str) -> str:
    """The flag of a field, or the upper-case name of a positional one."""
    return name.upper() if kinds(config)[name].metadata["positional"] else flag(name)


def _metavar(name: str, kind: Kind) -> str:
    """The placeholder of an option's value in the help text."""
    use = kind.metadata["path"]
    if kind.choices is not None:
        return f"{{{','.join(kind.choices)}}}"
    if isinstance(use, RunDirectory):
        return "DIR"
    if use in (Reads(), Writes()):
        return "FILE"
    return {int: "N", float: "X"}.get(kind.type, name.rpartition("_")[2].upper())


def _add(parser: argparse._ActionsContainer, field: dataclasses.Field[Any], kind: Kind, several: str | None) -> None:
    meta = kind.metadata
    required = field.default is dataclasses.MISSING
    shown = "" if required or field.default in (None, (), "") else f" (default: {field.default})"
    keywords: Json = {"help": (meta["help"] + shown).replace("%", "%%"), "default": argparse.SUPPRESS}
    if kind.type is bool:
        parser.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, **keywords)
        return
    keywords["type"] = _reader(field.name, kind)
    if meta["positional"]:
        counts = {(True, True): "+", (True, False): "*", (False, True): None, (False, False): "?"}
        nargs = counts[kind.many, required]
        parser.add_argument(field.name, nargs=nargs, metavar=field.name.upper(), **keywords)
        return
    if kind.many:
        keywords |= {"nargs": several, "action": "extend" if several else "append"}
    elif _is_path(kind):
        keywords["action"] = _OnePath
    names = [flag(name) for name in (field.name, meta["alias"]) if name]
    parser.add_argument(*names, required=required, metavar=_metavar(field.name, kind), **keywords)


def _is_path(kind: Kind) -> bool:
    """Whether each value of an option is a file or a directory, and no name of something else."""
    use = kind.metadata["path"]
    return use == Reads() or isinstance(use, Writes | RunDirectory)


class _OnePath(argparse.Action):
    """Takes the last of several paths, as for other options, and says that the others are not read or written."""

    def __call__(self, parser: Any, namespace: Any, values: object, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            note(f"{option_string} is given twice: {values} counts, not {getattr(namespace, self.dest)}")
        setattr(namespace, self.dest, values)


def _reader(name: str, kind: Kind) -> Callable[[str], object]:
    """Converts the text of a flag to its value; raises OptionError."""
    parse = kind.metadata["parse"] or kind.type

    def read(text: str) -> object:
        if not text and _is_path(kind):  # as of a variable of the shell that is not set
            raise OptionError(name, text, "a name that is not empty")
        try:
            value: object = parse(text)
        except ValueError as e:
            accepted = kind.refuses(text) if parse is kind.type else None
            raise OptionError(name, text, accepted or str(e)) from None
        return value

    return read


_SPEEDUPS = ("nominal_speedup", "speedup")  # names of it in Python


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError with one line, and suggests a known option for an unknown one.

    `settings` are the fields without a flag.
    """

    settings: Collection[str] = ()

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        known = self._option_string_actions
        for word in words[: words.index("--") if "--" in words else None]:
            name = word.partition("=")[0]
            # As in argparse, a word with a space is a text, and the beginning of an option is accepted.
            if name.startswith("--") and " " not in name and not any(option.startswith(name) for option in known):
                setting = name.removeprefix("--no-").removeprefix("--").replace("-", "_")
                hint = near(name, known)
                if setting in self.settings:
                    function = self.prog.replace(" ", ".").replace(".eval", ".evaluate")
                    hint = f": it is an option of {function} in Python"
                    hint += ", and in --recipe FILE" if "--recipe" in known else ""
                elif setting in _SPEEDUPS and "--schedule" in known:
                    hint = ": a nominal speed-up is a schedule, such as --schedule 2x"
                self.error(f"unknown option {name}{hint}")
        return self.parse_intermixed_args(words)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


# Set by the launchers that accelerate supports: only the first process of a run writes.
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


@contextlib.contextmanager
def claimed(config: Options) -> Iterator[None]:
    """Hold the outputs of a command for this process; raises UsageError or OutputError for a path it may not write."""
    overwrite, paths = getattr(config, "overwrite", False), [*_paths(config)]
    used = {path: name for use, value, name in paths if isinstance(use, Reads) for path in _real_paths(use, value)}
    outputs = [(use, value, name) for use, value, name in paths if not isinstance(use, Reads)]
    for use, value, name in outputs:
        for path in _real_paths(use, value):
            if path in used:
                raise UsageError(f"{used[path]} and {name} are the same, {path}: name another output")
            used[path] = name
    with contextlib.ExitStack() as stack:
        for use, value, name in outputs:
            if isinstance(use, Writes):
                check_output(value, name, overwrite=overwrite)
                continue
            use.check(Path(value), overwrite=overwrite)
            if all(os.environ.get(rank, "0") == "0" for rank in _RANKS):
                stack.enter_context(locked(Path(value)))
        yield


def resumes(config: type) -> bool:
    """Whether the verb of a config recognises an earlier run in its directory, and continues the run."""
    uses = (kind.metadata["path"] for kind in kinds(config).values())
    return any(isinstance(use, RunDirectory) and use.marks for use in uses)


def _paths(config: Options) -> Iterator[tuple[Reads | Writes | RunDirectory, str, str]]:
    """Yield the use of each path among the options, its value, and the name that users give the option."""
    for name, kind in kinds(type(config)).items():
        value, use = getattr(config, name), kind.metadata["path"]
        for path in value if kind.many else (value,):
            if use is not None and path not in (None, "", "-"):
                yield use, path, f"{option_name(type(config), name)} {path}"


def _real_paths(use: Reads | Writes | RunDirectory, value: str) -> list[str]:
    """The paths that a value stands for, without links; devices may be read and written."""
    return [os.path.realpath(path) for path in use.paths(value) if not path.is_char_device()]
