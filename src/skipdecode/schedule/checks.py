"""Checks of the plain values and the JSON that a schedule is made of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from skipdecode.errors import ScheduleError

__all__ = ["fields", "int_tuple", "json_value", "require_int", "require_positive"]


def require_int(field: str, value: Any) -> None:
    """Raise ScheduleError unless `value` is a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ScheduleError(f"{field}={value!r} is not accepted: give a whole number")


def require_positive(field: str, value: Any) -> None:
    """Raise ScheduleError unless `value` is a whole number of 1 or more."""
    require_int(field, value)
    if value < 1:
        raise ScheduleError(f"{field}={value} is not accepted: give 1 or more")


def int_tuple(field: str, values: Any) -> tuple[int, ...]:
    """The whole numbers of an iterable; raises ScheduleError on anything else."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ScheduleError(f"{field}={values!r} is not accepted: give a list of whole numbers")
    result = tuple(values)
    for value in result:
        require_int(field, value)
    return result


def fields(what: str, data: Any, known: tuple[str, ...], required: tuple[str, ...]) -> dict[str, Any]:
    """A JSON object's fields; raises ScheduleError naming the first that is unknown or missing."""
    if not isinstance(data, dict):
        raise ScheduleError(f"a {what} is a JSON object, not {type(data).__name__}")
    if unknown := sorted(set(data) - set(known)):
        raise ScheduleError(f"unknown {what} field {unknown[0]!r}: accepted are {', '.join(known)}")
    if missing := [name for name in required if name not in data]:
        raise ScheduleError(f"{what} field {missing[0]!r} is missing: needed are {', '.join(required)}")
    return dict(data)


def json_value(what: str, text: str) -> Any:
    """The value of JSON text; raises ScheduleError on wrong JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{what} must be JSON: {error}") from None
