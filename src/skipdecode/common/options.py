"""Options: dataclass fields with a help text and accepted values, which are checked when the dataclass is created.

The settings of each room are such dataclasses. The command line creates flags from the fields
(`skipdecode.cli.arguments`). A wrong value therefore has the same message in Python, with the name of the field, and in
a shell, with the name of the flag.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from skipdecode.common.files import RunDirectory
from skipdecode.common.jsonl import Fields, is_text
from skipdecode.common.plain import unwrapped
from skipdecode.errors import OptionError, UsageError

T = TypeVar("T")
OVERWRITE = "begin anew: replace a finished output, and what another command left unfinished"


def near(name: object, known: Iterable[str]) -> str:
    """A hint with the known name that is most similar to `name`; empty if no name is similar."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    matches = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""


def check_name(kind: str, name: object, known: Collection[str]) -> str:
    """`name` if it is known; else raises UsageError with the accepted names and the most similar one."""
    if isinstance(name, str) and name in known:
        return name
    raise UsageError(f"unknown {kind} {name!r}{near(name, known)}: accepted are {', '.join(known)}")


def _itself(value: str) -> Iterable[Path]:
    return (Path(value),)


class Reads(NamedTuple):
    """An option whose value is a path that is read; `paths` returns all paths that are read for a value."""

    paths: Callable[[str], Iterable[Path]] = _itself


class Writes(NamedTuple):
    """An option whose value is a file that is written; `paths` returns all files that are written for a value."""

    paths: Callable[[str], Iterable[Path]] = _itself


def option(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    choices: Sequence[str] | None = None,
    positional: bool = False,
    alias: str | None = None,
    parse: Callable[[str], Any] | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    path: Reads | Writes | RunDirectory | None = None,
) -> Any:
    """A dataclass field that is also a command-line option.

    `help`: what the option does, with the unit. `default`: an option without a default must be given. `choices`:
    accepted values; not needed for a ``Literal`` type. `positional`: whether the value has no flag; a tuple type takes
    any number of values. `alias`: a second name of the flag. `parse`: converts text to the value; raises ValueError
    with a message for users. Default: the type of the field. `path`: how the command uses the path;
    `skipdecode.cli.arguments` checks paths before any work. `least`, `most`, `above`, `below`: bounds of a number, or
    of each number of a tuple; `above` and `below` are not accepted themselves.
    """
    limits = {"least": least, "most": most, "above": above, "below": below}
    bounds = {name: bound for name, bound in limits.items() if bound is not None}
    named = {"help": help, "choices": choices, "positional": positional, "alias": alias, "parse": parse}
    metadata = {**named, "path": path, "flag": True, "bounds": bounds}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def setting(help: str, **keywords: Any) -> Any:
    """An `option` without a flag: it is set in Python, or in a recipe."""
    field = option(help, **keywords)
    field.metadata = {**field.metadata, "flag": False}
    return field


class Options:
    """Base of a dataclass with `option` fields: checks their types and ranges when an instance is created.

    A subclass with further checks extends `__post_init__`.

    Attributes: `given`: names of the values that were given, to the class or on the command line; all others have their
    default. `NEEDS`, `EXCLUDES`: for an option that is given on the command line: options of which one must be given
    too; options that must not be given. `ONE_OF`: options of which one must be given on the command line.
    `skipdecode.cli.arguments.check_together` checks all.

    Raises OptionError: the value of a field is not accepted; names the first such field.
    """

    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    EXCLUDES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    ONE_OF: ClassVar[tuple[tuple[str, ...], ...]] = ()
    given: ClassVar[frozenset[str]]

    def __new__(cls, *_: object, **values: object) -> Self:
        instance = super().__new__(cls)
        object.__setattr__(instance, "given", frozenset(values))  # options are frozen
        return instance

    def part(self, base: type[T]) -> T:
        """An instance of one of the base classes with the values of its fields."""
        return base(**{f.name: getattr(self, f.name) for f in dataclasses.fields(base)})  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for name, value in [*vars(self).items()]:
            object.__setattr__(self, name, _python_types(value))  # options are frozen
        for name, kind in kinds(type(self)).items():
            value = getattr(self, name)
            if value is None and kind.optional:
                continue
            if kind.many and not isinstance(value, tuple | list):
                raise OptionError(name, value, "a list of values")
            if kind.named and not isinstance(value, Mapping):
                raise OptionError(name, value, "names with values")
            several = value.values() if kind.named else value
            for item in several if kind.many or kind.named else (value,):
                if (accepted := kind.refuses(item)) is not None:
                    raise OptionError(name, item, accepted)


class Kind(NamedTuple):
    """The values that an option accepts: their type; several values, values by name, None; metadata of the field."""

    type: type
    many: bool
    named: bool
    optional: bool
    choices: tuple[str, ...] | None
    metadata: Fields

    def refuses(self, value: Any) -> str | None:
        """The accepted values in words if `value` is not accepted, else None."""
        if self.choices is not None:
            return None if value in self.choices else f"one of {', '.join(self.choices)}{near(value, self.choices)}"
        if self.type is bool:
            return None if isinstance(value, bool) else "true or false"
        if self.type is str:
            is_path = isinstance(value, os.PathLike)
            return None if is_path or (isinstance(value, str) and is_text(value)) else "text in UTF-8"
        if self.type not in (int, float):
            return None if isinstance(value, self.type) else f"a {self.type.__name__}"
        accepted = self._range()
        if isinstance(value, bool) or not isinstance(value, int if self.type is int else int | float):
            return ("a whole number" if self.type is int else "a number") + (accepted and f", {accepted}")
        if not abs(value) <= sys.float_info.max:  # infinite, NaN, or a whole number beyond all floats
            return "a finite number" + (accepted and f", {accepted}")
        fits = all(_BOUNDS[name][0](value, bound) for name, bound in self.metadata["bounds"].items())
        return None if fits else accepted

    def _range(self) -> str:
        bounds = self.metadata["bounds"]
        if {"least", "most"} <= bounds.keys():
            return f"{bounds['least']} to {bounds['most']}"
        return ", ".join(words.format(bounds[name]) for name, (_, words) in _BOUNDS.items() if name in bounds)


_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "least": (operator.ge, "{} or more"),
    "above": (operator.gt, "more than {}"),
    "most": (operator.le, "up to {}"),
    "below": (operator.lt, "less than {}"),
}


def _python_types(value: Any) -> Any:
    """A value, or all of several values, in Python's own types: numbers of numpy and torch are taken."""
    if isinstance(value, Mapping):
        return {unwrapped(name): unwrapped(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(unwrapped, value))
    return unwrapped(value)


_KINDS: dict[type, dict[str, Kind]] = {}


def kinds(options: type) -> dict[str, Kind]:
    """The options of a dataclass, by name."""
    if options not in _KINDS:
        hints = typing.get_type_hints(options)
        _KINDS[options] = {
            f.name: _kind(hints[f.name], f.metadata) for f in dataclasses.fields(options) if "help" in f.metadata
        }
    return _KINDS[options]


def _kind(hint: Any, metadata: Fields) -> Kind:
    inner, optional, many, named = hint, False, False, False
    if typing.get_origin(inner) in (typing.Union, types.UnionType):
        optional = True
        inner = next(a for a in typing.get_args(inner) if a is not type(None))
    if typing.get_origin(inner) is tuple:
        inner, many = typing.get_args(inner)[0], True
    if typing.get_origin(inner) is Mapping:
        inner, named = typing.get_args(inner)[1], True
        inner = object if inner is Any else inner
    choices = metadata["choices"]
    if typing.get_origin(inner) is typing.Literal:
        inner, choices = str, choices or typing.get_args(inner)
    return Kind(inner, many, named, optional, None if choices is None else tuple(choices), metadata)
