"""Options: what a value may be is checked once, and told with the field in Python, with the flag in a shell."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from skipdecode.cli.arguments import add_options, config_from, with_flags
from skipdecode.common.options import Options, option
from skipdecode.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Base(Options):
    count: int = option("how many", default=1, least=1)
    share: float = option("how much", default=0.5, above=0, most=1)
    parts: tuple[float, ...] = option("of it", default=(0.0,), least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    name: str = option("whose", positional=True)
    kind: Literal["a", "b"] = option("which", default="a")
    limit: int | None = option("at most", default=None, least=0, most=9)
    sure: bool = option("whether", default=False)
    inner: int = 3  # no option


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("count", 0, "1 or more"),
        ("count", 1.5, "a whole number, 1 or more"),
        ("count", True, "a whole number, 1 or more"),
        ("count", None, "a whole number, 1 or more"),
        ("share", 0, "more than 0, up to 1"),
        ("share", "all", "a number, more than 0, up to 1"),
        ("share", math.inf, "a finite number, more than 0, up to 1"),
        ("parts", (0.5, 1), "0 or more, less than 1"),
        ("parts", "0.5", "a list of values"),
        ("kind", "c", "one of a, b"),
        ("limit", 10, "0 to 9"),
        ("sure", "no", "true or false"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_accepted(field: str, value: Any, accepted: str):
    with pytest.raises(OptionError) as refused:
        Settings(name="x", **{field: value})
    assert (refused.value.name, refused.value.accepted) == (field, accepted)
    wrong = value[-1] if isinstance(value, tuple) else value
    assert str(refused.value) == f"{field}={wrong!r} is not accepted: give {accepted}"


def test_bounds_that_are_accepted_are():
    made = Settings(name="x", count=1, share=1, parts=(0, 0.9), kind="b", limit=None)
    assert made.part(Base) == Base(share=1, parts=(0, 0.9))
    assert Settings(name="x", limit=9).limit == 9


def parsed(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    return config_from(Settings, parser.parse_args(words))


def test_a_command_line_makes_the_config():
    made = parsed("x y", "--parts", "0.1", "0.123456789", "--no-sure", "--limit", "0", "--kind", "b")
    assert made == Settings(name="x y", parts=(0.1, 0.123456789), limit=0, kind="b")
    with pytest.raises(OptionError) as refused:
        parsed("x", "--share", "2")
    assert str(with_flags(refused.value, Settings)) == "--share 2.0 is not accepted: give more than 0, up to 1"
