"""Messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from skipdecode.errors import UsageError


def near(name: object, known: Iterable[str]) -> str:
    """A hint with the known name that is most similar to `name`; empty if no name is similar."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f" (did you mean {by_lower[found[0]]!r}?)" if found else ""


def check_name(kind: str, name: object, known: Collection[str]) -> str:
    """`name` if it is known; else raises UsageError with the accepted names and the most similar one."""
    if isinstance(name, str) and name in known:
        return name
    raise UsageError(f"unknown {kind} {name!r}{near(name, known)}: accepted are {', '.join(known)}")
