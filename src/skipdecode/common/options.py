"""Options: dataclass fields that say what they do and what they accept, checked once, when the dataclass is made.

A room's settings are such a dataclass; the command line makes flags of its fields (`skipdecode.cli.arguments`). So a
wrong value gets the same answer from Python, where it names the field, and from a shell, where it names the flag.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from skipdecode.common.directories import RunDirectory
from skipdecode.common.jsonl import is_text
from skipdecode.common.registry import near
from skipdecode.errors import OptionError

__all__ = ["Kind", "Options", "Reads", "Writes", "kinds", "option"]

T = TypeVar("T")


def _itself(value: str) -> Iterable[Path]:
    return (Path(value),)


class Reads(NamedTuple):
    """A path that is read: the value itself, or the paths that `paths` makes of it."""

    paths: Callable[[str], Iterable[Path]] = _itself


class Writes(NamedTuple):
    """A file that is written, and with `paths` others that come with it."""

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

    Parameters
    ----------
    help : str
        What it does, with the unit.
    default : Any, optional
        Without one, the option must be given.
    choices : sequence of str, optional
        Accepted values; a ``Literal`` type says them by itself.
    positional : bool
        Given without a flag; with a tuple type, any number of values.
    alias : str, optional
        A second name of the flag.
    parse : callable, optional
        From text to the value; raises ValueError with a message for users. Default: the field's type.
    path : Reads, Writes or RunDirectory, optional
        What the command does with the path that the value names; `skipdecode.cli.paths` checks that before any work.
    least, most, above, below : float, optional
        Bounds of the number, or of each number of a tuple; the last two are not themselves accepted.
    """
    bounds = {"least": least, "most": most, "above": above, "below": below}
    named = {"help": help, "choices": choices, "positional": positional, "alias": alias, "parse": parse}
    metadata = {**named, "path": path, "bounds": bounds}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """Base of a dataclass with `option` fields, which checks their types and ranges when it is made.

    A subclass that checks more does so in a `__post_init__` of its own, after this one's.

    Raises
    ------
    OptionError
        Names the first field whose value is not accepted.
    """

    def part(self, base: type[T]) -> T:
        """The values of one of the classes that this one inherits from, alone."""
        return base(**{f.name: getattr(self, f.name) for f in dataclasses.fields(base)})  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for name, kind in kinds(type(self)).items():
            value = getattr(self, name)
            if value is None and kind.optional:
                continue
            if kind.many and not isinstance(value, tuple | list):
                raise OptionError(name, value, "a list of values")
            if kind.named and not isinstance(value, Mapping):
                raise OptionError(name, value, "names with values")
            for one in value.values() if kind.named else value if kind.many else (value,):
                if (accepted := kind.refuses(one)) is not None:
                    raise OptionError(name, one, accepted)


class Kind(NamedTuple):
    """What values an option takes: their type, whether it takes many, many by name, or None; its field's metadata."""

    type: type
    many: bool
    named: bool
    optional: bool
    choices: tuple[str, ...] | None
    metadata: Mapping[str, Any]

    def refuses(self, value: Any) -> str | None:
        """What is accepted in place of `value`, in words; None if it is accepted."""
        if self.choices is not None:
            return None if value in self.choices else f"one of {', '.join(self.choices)}{near(value, self.choices)}"
        if self.type is bool:
            return None if isinstance(value, bool) else "true or false"
        if self.type is str:
            is_path = isinstance(value, os.PathLike)
            return None if is_path or (isinstance(value, str) and is_text(value)) else "text in UTF-8"
        if self.type not in (int, float):
            return None if isinstance(value, self.type) else f"a {self.type.__name__}"
        bounds, accepted = self.metadata["bounds"], self._range()
        if isinstance(value, bool) or not isinstance(value, int if self.type is int else int | float):
            return ("a whole number" if self.type is int else "a number") + (accepted and f", {accepted}")
        if not math.isfinite(value):
            return "a finite number" + (accepted and f", {accepted}")
        fits = (
            (bounds["least"] is None or value >= bounds["least"])
            and (bounds["most"] is None or value <= bounds["most"])
            and (bounds["above"] is None or value > bounds["above"])
            and (bounds["below"] is None or value < bounds["below"])
        )
        return None if fits else accepted

    def _range(self) -> str:
        least, most, above, below = (self.metadata["bounds"][name] for name in ("least", "most", "above", "below"))
        if least is not None and most is not None:
            return f"{least} to {most}"
        words = ((least, "{} or more"), (above, "more than {}"), (most, "up to {}"), (below, "less than {}"))
        return ", ".join(text.format(bound) for bound, text in words if bound is not None)


_KINDS: dict[type, dict[str, Kind]] = {}


def kinds(options: type) -> dict[str, Kind]:
    """The options of a dataclass by name."""
    if options not in _KINDS:
        hints = typing.get_type_hints(options)
        _KINDS[options] = {
            f.name: _kind(hints[f.name], f.metadata) for f in dataclasses.fields(options) if "help" in f.metadata
        }
    return _KINDS[options]


def _kind(hint: Any, metadata: Mapping[str, Any]) -> Kind:
    inner, optional, many, named = hint, False, False, False
    if typing.get_origin(inner) in (typing.Union, types.UnionType):
        optional = True
        inner = next(a for a in typing.get_args(inner) if a is not type(None))
    if typing.get_origin(inner) is tuple:
        inner, many = typing.get_args(inner)[0], True
    if typing.get_origin(inner) is Mapping:
        inner, named = typing.get_args(inner)[1], True
    choices = metadata["choices"]
    if typing.get_origin(inner) is typing.Literal:
        inner, choices = str, choices or typing.get_args(inner)
    return Kind(inner, many, named, optional, None if choices is None else tuple(choices), metadata)
