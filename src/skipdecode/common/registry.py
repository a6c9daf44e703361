"""Names of things, some of which are imported at first use, and messages about unknown names."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from skipdecode.errors import UsageError

__all__ = ["Registry", "check_name", "near"]


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


class Registry:
    """Objects by name, imported at first use: listing the names imports nothing.

    Parameters
    ----------
    kind : str
        What the names are, in the singular; used in errors ("unknown metric ...").
    targets : mapping of str to str
        ``"package.module:attribute"`` by name.
    """

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self.kind = kind
        self._targets = dict(targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def check(self, name: object) -> str:
        """`name` if it is known; see `check_name`."""
        return check_name(self.kind, name, self._targets)

    def get(self, name: str) -> Any:
        """The object of the name; raises UsageError for an unknown name."""
        return pkgutil.resolve_name(self._targets[self.check(name)])
