"""Command-line options from the fields of a config dataclass: the field's help is the option's help."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["add_options", "config_from", "option"]

T = TypeVar("T")


def option(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    choices: Sequence[str] | None = None,
    positional: bool = False,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field that is also a command-line option.

    Parameters
    ----------
    help : str
        What it does, with the unit.
    default : Any, optional
        Without one, the option must be given.
    choices : sequence of str, optional
        Accepted values.
    positional : bool
        Given without a flag; with a tuple type, any number of values.
    parse : callable, optional
        From text to the value; raises ValueError with a message for users. Default: the field's type.
    """
    metadata = {"help": help.replace("%", "%%"), "choices": choices, "positional": positional, "parse": parse}
    return dataclasses.field(default=default, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add an option for every field of `config` that was made with `option`.

    A lower layer's dataclass that must not import this module writes the metadata itself; only `help` is needed.
    """
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            _add(parser, field, _plain_type(hints[field.name]))


def config_from(config: type[T], args: argparse.Namespace) -> T:
    """The config dataclass filled from parsed arguments."""
    names = [f.name for f in dataclasses.fields(config) if "help" in f.metadata]  # type: ignore[arg-type]
    values = {n: getattr(args, n) for n in names}
    return config(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], kind: Any) -> None:
    meta = field.metadata
    required = field.default is dataclasses.MISSING
    keywords: dict[str, Any] = {"help": meta["help"]}
    if not required:
        keywords["default"] = field.default
    if kind is bool:
        parser.add_argument(_flag(field), action=argparse.BooleanOptionalAction, **keywords)
        return
    many = typing.get_origin(kind) is tuple
    value_type = typing.get_args(kind)[0] if many else kind
    keywords["type"] = _reader(meta.get("parse") or value_type)
    if meta.get("choices") is not None:
        keywords["choices"] = tuple(meta["choices"])
    if meta.get("positional"):
        nargs = ("+" if required else "*") if many else (None if required else "?")
        parser.add_argument(field.name, nargs=nargs, metavar=field.name.upper(), **keywords)
        return
    if many:
        keywords |= {"nargs": "+", "action": _Gather}
    parser.add_argument(_flag(field), required=required, **keywords)


class _Gather(argparse.Action):
    """Values of a flag that is given more than once, all together, in place of the default."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is self.default else [*before, *values])


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _reader(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` whose ValueError message reaches the user, which argparse grants only to its own error type."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    read.__name__ = getattr(parse, "__name__", "value")
    return read


def _plain_type(hint: Any) -> Any:
    """`X` of `X | None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint
