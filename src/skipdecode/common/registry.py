"""Names for things that are imported on first use, so that listing the choices costs nothing.

A registry maps a name to ``"module:attribute"``. An unknown name is refused with the list of the known ones.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from skipdecode.errors import UsageError

__all__ = ["Registry", "check_name", "near"]


def near(name: object, known: Iterable[str]) -> str:
    """What a user who wrote `name` may have meant, as words for a message; empty where nothing known is like it."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f" (did you mean {by_lower[found[0]]!r}?)" if found else ""


def check_name(kind: str, name: object, known: Collection[str]) -> str:
    """`name` if it is among the known ones.

    Raises
    ------
    UsageError
        With the accepted names, and the nearest one where there is one.
    """
    if isinstance(name, str) and name in known:
        return name
    raise UsageError(f"unknown {kind} {name!r}{near(name, known)}: accepted are {', '.join(known)}")


class Registry:
    """Lazily imported objects by name.

    Parameters
    ----------
    kind : str
        What the names stand for, in the singular; used in errors ("unknown metric ...").
    targets : mapping of str to str
        ``"package.module:attribute"`` by name.
    """

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self.kind = kind
        self._targets = dict(targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def check(self, name: object) -> str:
        """`name` if it is known; see `check_name`."""
        return check_name(self.kind, name, self._targets)

    def get(self, name: str) -> Any:
        """The object that `name` stands for, imported now; raises UsageError as `check` does."""
        module, _, attribute = self._targets[self.check(name)].partition(":")
        return getattr(importlib.import_module(module), attribute)
