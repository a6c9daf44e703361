"""The journal of a run: after a kill at any moment, no finished work is lost or repeated.

The first line has the settings of the run, each further line a finished piece of work. A line is appended with one
unbuffered write, and synced to disk every few seconds. A resumed run drops an incomplete line and all lines after it.
One process writes at a time. Pieces are read one by one: memory does not grow with the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, TypeVar

from skipdecode.common.environment import COMMAND
from skipdecode.common.files import Lock
from skipdecode.common.jsonl import json_line
from skipdecode.errors import OutputError, WriteError

JOURNAL_KEY, _FORMAT = "skipdecode_partial", 1
ANEW = "give `overwrite` to begin anew, or another `out`"
_SYNC_SECONDS = 5.0
_DIFFERENCES_SHOWN = 3
_VALUE_CHARACTERS = 48

Piece = TypeVar("Piece")


def is_begun(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a file is the journal of a run with the same settings."""
    try:
        with path.open("rb") as file:
            return bool(_settings_of(file.readline()) == _as_json(settings))
    except OSError:
        return False


class Journal(Generic[Piece]):
    """Finished pieces of work on disk.

    Parameters
    ----------
    path : Path
        The file; it is created if it does not exist, and continued if it does.
    settings : mapping
        JSON-ready; all that the pieces depend on. Written to the first line.
    parse : callable
        Returns the piece of a line; raises ValueError if the line is incomplete.
    take : callable
        Called with each piece of an earlier run.
    pieces : str
        The name of the pieces in messages, in the plural.
    remedy : str
        What else a user can do if the file is refused.
    restart : bool
        Drop the earlier pieces.

    Attribute `count`: the number of pieces.

    Raises OutputError: the file cannot be written, is of a run with other settings (the message names them), or is
    being written by another process.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        parse: Callable[[bytes], Piece],
        take: Callable[[Piece], object],
        pieces: str,
        remedy: str,
        restart: bool = False,
    ) -> None:
        self.path = path
        self.count = 0
        self._parse = parse
        self._pieces = pieces
        self._synced = time.monotonic()
        with contextlib.ExitStack() as undo:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Before the file is opened: a run that ends now deletes it.
                self._lock = undo.enter_context(closing(Lock(path.with_name(f".{path.name}.lock"), path)))
                self._file = undo.enter_context(path.open("ab", buffering=0))
            except OSError as e:
                raise OutputError(f"cannot write {path}: {e.strerror or e}") from None
            self._size = self._check_heading(_as_json(settings), remedy, restart)
            for piece, end in self._whole() if self._size else ():
                take(piece)
                self.count += 1
                self._size = end
            self._file.truncate(self._size)
            if not self._size:
                self._write(json_line({JOURNAL_KEY: _FORMAT, "settings": settings, "command": COMMAND.get()}))
            undo.pop_all()

    def append(self, line: bytes) -> None:
        """Append a piece; after this call, a kill of the process does not lose it."""
        self._write(line)
        self.count += 1
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def read(self) -> Iterator[Piece]:
        """All pieces, in the order of their completion."""
        for piece, _ in self._whole():
            yield piece

    def sync(self) -> None:
        """Wait until all pieces are on disk."""
        with self._as_output_error():
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and close; may be called twice."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
            # Without pieces there is nothing to continue, and no settings that a corrected command would have to match.
            self._end(delete=not self.count)

    def remove(self) -> None:
        """Delete the journal of a run that is saved. Raises OSError."""
        self._end(delete=True)

    def _end(self, *, delete: bool) -> None:
        self._file.close()
        if delete:
            self.path.unlink(missing_ok=True)
        self._lock.close()

    # ------------------------------------------------------------------ inside

    def _check_heading(self, settings: Any, remedy: str, restart: bool) -> int:
        """Bytes of the first line; 0 if it is incomplete or `restart` is set. Refuses other files."""
        with self.path.open("rb") as file:
            heading = file.readline()
        start = f'{{"{JOURNAL_KEY}"'.encode()
        begins = start.startswith(heading[: len(start)])
        if begins and (restart or not heading.endswith(b"\n")):
            return 0
        before = _settings_of(heading)
        if before is None:
            also = f", or {remedy}" if begins else ""
            raise OutputError(f"{self.path} holds no {self._pieces} of this version: move it away{also}")
        differences = list(_differences(before, settings))
        if differences:
            more = len(differences) - _DIFFERENCES_SHOWN
            shown = "; ".join(differences[:_DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            raise OutputError(other_settings(self.path, shown, json.loads(heading).get("command", ""), remedy))
        return len(heading)

    def _whole(self) -> Iterator[tuple[Piece, int]]:
        """Pieces with the offsets of their line ends, up to the first incomplete line."""
        with self.path.open("rb") as file:
            end = len(file.readline())
            for raw in file:
                try:
                    piece = self._parse(raw)
                except ValueError:
                    return
                if not raw.endswith(b"\n"):
                    return
                end += len(raw)
                yield piece, end

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        with self._as_output_error():
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                # Remove a partly written line.
                with contextlib.suppress(OSError):
                    self._file.truncate(self._size)
                raise
        self._size += len(line)

    @contextlib.contextmanager
    def _as_output_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise WriteError(
                f"cannot write {self.path}: {e.strerror or e}; {self.count} {self._pieces} are kept in it: free "
                "disk space, then repeat the command"
            ) from None


def other_settings(path: Path, differences: str, command: str, remedy: str) -> str:
    """Message for a run that another command began; `command` is empty if it was begun from Python."""
    begun, repeat = f" by {command}" if command else "", "that command" if command else "those"
    return f"{path} was started with other settings ({differences}){begun}: repeat {repeat} to continue, or {remedy}"


class KeptValues(Journal[list[Any]]):
    """A journal of JSON-ready values by key, in lines ``[key, value]``; all values are in memory. See `Journal`."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, pieces: str, remedy: str, restart: bool = False
    ) -> None:
        self._values: dict[str, Any] = {}
        super().__init__(path, settings, parse=_pair, take=self._take, pieces=pieces, remedy=remedy, restart=restart)

    def get(self, key: str) -> Any:
        """The value of a key; None if there is none."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a value; raises WriteError if it cannot be written."""
        self.append(json_line([key, value]))
        self._values[key] = value

    def _take(self, piece: list[Any]) -> None:
        key, self._values[key] = piece


def _pair(line: bytes) -> list[Any]:
    """The key and the value of a line; raises ValueError for other content."""
    pair = json.loads(line)
    if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise ValueError(f"{pair!r} is not a pair of a key and a value")
    return pair


def _as_json(settings: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(settings))


def _settings_of(heading: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(heading)
        settings = found["settings"] if found[JOURNAL_KEY] == _FORMAT else None
    except (ValueError, KeyError, TypeError):
        return None
    return settings if isinstance(settings, dict) else None


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(k for k in now if k not in before)]:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name}: {_short(before)} then, {_short(now)} now"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARACTERS else text[: _VALUE_CHARACTERS - 1] + "…"
