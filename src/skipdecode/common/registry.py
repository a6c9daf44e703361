"""Names of things, some of which are imported at first use, and messages about unknown names."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

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


class Registry:
    """Objects by name, imported at first use: listing the names imports nothing.

    Parameters
    ----------
    kind : str
        What the names are, in the singular; used in errors ("unknown metric ...").
    targets : mapping of str to str
        ``"package.module:attribute"`` by name.
    retired : mapping of str to str
        What to use in place of a name that is no longer there.
    """

    def __init__(self, kind: str, targets: Mapping[str, str], retired: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._targets = dict(targets)
        self._retired = dict(retired or {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def check(self, name: object, *others: str) -> str:
        """`name` if it is known or one of `others`; see `check_name`. The error of a retired name says what to use."""
        if isinstance(name, str) and name in self._retired:
            raise UsageError(f"the {self.kind} {name} was removed: use {self._retired[name]}")
        return check_name(self.kind, name, (*self._targets, *others))

    def get(self, name: str) -> Any:
        """The object of the name; raises UsageError for an unknown name."""
        return pkgutil.resolve_name(self._targets[self.check(name)])
