"""The log of a run: after a kill at any moment, no finished work is lost or repeated.

An SQLite file: the table ``about`` has the settings of the run, ``entries`` what is finished, by key. One process
writes at a time. Entries are read one by one: memory does not grow with the file.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skipdecode.common.environment import COMMAND
from skipdecode.common.files import Lock
from skipdecode.common.jsonl import Fields, json_line
from skipdecode.errors import OutputError, WriteError

ANEW = "give `overwrite` to begin anew, or another `out`"
# Without SQLite's own locks, which some network file systems do not have.
_SYSTEM = "win32-none" if sys.platform == "win32" else "unix-none"
_OLD = b'{"skipdecode_partial"'  # how a log of version 0.1 begins
_TABLES = """BEGIN;
DROP TABLE IF EXISTS about; CREATE TABLE about (settings, command);
DROP TABLE IF EXISTS entries; CREATE TABLE entries (key PRIMARY KEY, value);"""
_SYNC_SECONDS = 5.0
_DIFFERENCES_SHOWN = 3
_VALUE_CHARACTERS = 48


class ResumeLog:
    """Finished pieces of work on disk, JSON-ready values by key.

    `path`: the file; it is created if it does not exist, and continued if it does. `settings`: JSON-ready; all that the
    entries depend on. `what`: the name of the entries in messages, in the plural. `remedy`: what else a user can do if
    the file is refused. `restart`: drop the entries of a run with other settings, instead of refusing the file.
    `discard`: with `restart`, called before a log begins, to remove what else is left of other runs.

    Raises OutputError: the file cannot be written, is of a run with other settings (the message names them), or is
    being written by another process.
    """

    def __init__(
        self,
        path: Path,
        settings: Fields,
        *,
        what: str,
        remedy: str,
        restart: bool = False,
        discard: Callable[[], object] = lambda: None,
    ) -> None:
        self.path, self._what = path, what
        self._synced = time.monotonic()
        with contextlib.ExitStack() as undo:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Before the file is opened: a run that ends now deletes it.
                self._lock = undo.enter_context(contextlib.closing(Lock(path.with_name(f".{path.name}.lock"), path)))
                with path.open("a+b") as file:  # SQLite would open a file that cannot be written
                    file.seek(0)
                    is_old = file.read(len(_OLD)) == _OLD
                    if is_old and restart:
                        file.truncate(0)
                uri = f"{path.absolute().as_uri()}?vfs={_SYSTEM}"
                database = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
                self._database = undo.enter_context(contextlib.closing(database))
                database.execute("PRAGMA locking_mode = EXCLUSIVE")
                settings = json.loads(json.dumps(settings))
                if not self._continues(settings, remedy, is_old=is_old, restart=restart):
                    if restart:
                        discard()
                    self._begin(settings)
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = NORMAL")
            except (OSError, sqlite3.Error) as e:
                raise OutputError(f"cannot write {path}: {getattr(e, 'strerror', None) or e}") from None
            undo.pop_all()

    @property
    def count(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM entries").fetchone()[0])

    def get(self, key: int | str) -> Any:
        """Return the value of a key; None if there is none."""
        with self._as_output_error():
            row = self._database.execute("SELECT value FROM entries WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield all keys and values in the order of the keys, numbers as numbers."""
        with self._as_output_error():
            for key, value in self._database.execute("SELECT key, value FROM entries ORDER BY key"):
                yield key, json.loads(value)

    def put(self, key: int | str, value: object) -> None:
        """Store a value, in place of an earlier one of its key; raises WriteError if it cannot be written.

        After this call, a kill of the process does not lose it, and after some seconds a power failure does not either.
        """
        with self._as_output_error():
            self._database.execute("REPLACE INTO entries VALUES (?, ?)", (key, json_line(value)))
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self._database.execute("PRAGMA wal_checkpoint")
                self._synced = time.monotonic()

    def clear(self) -> None:
        """Drop all entries; raises WriteError."""
        with self._as_output_error():
            self._database.execute("DELETE FROM entries")

    def close(self) -> None:
        """Sync and close, and delete a log without entries; may be called twice."""
        is_empty = False
        with contextlib.suppress(sqlite3.Error):
            # There is nothing to continue, and no settings that a corrected command would have to match.
            is_empty = not self.count
        self._end(delete=is_empty)

    def remove(self) -> None:
        """Delete the log of a run that is saved. Raises OSError."""
        self._end(delete=True)

    def _end(self, *, delete: bool) -> None:
        self._database.close()
        if delete:
            for suffix in ("", "-wal", "-journal"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self._lock.close()

    @contextlib.contextmanager
    def _as_output_error(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as e:
            finished = f"{self.count} {self._what} are kept in it"
            raise WriteError(
                f"cannot write {self.path}: {e}; {finished}: free disk space, then repeat the command"
            ) from None
        except sqlite3.DatabaseError as e:
            raise OutputError(f"{self.path} is damaged ({e}): move it away") from None

    def _continues(self, settings: Fields, remedy: str, *, is_old: bool, restart: bool) -> bool:
        """Whether the file has these settings; False if it is new. Refuses other files, and other settings."""
        try:
            if self._database.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                return False
            [(before, command)] = self._database.execute("SELECT settings, command FROM about").fetchall()
        except (sqlite3.DatabaseError, ValueError) as e:
            reason, also = ("", f", or {remedy}") if is_old else (f" ({e})", "")
            raise OutputError(
                f"{self.path} holds no {self._what} of this version{reason}: move it away{also}"
            ) from None
        changed = list(differences(json.loads(before), settings))
        if changed and not restart:
            more = len(changed) - _DIFFERENCES_SHOWN
            shown = "; ".join(changed[:_DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            raise OutputError(other_settings(self.path, shown, command, remedy))
        return not changed

    def _begin(self, settings: Fields) -> None:
        """Write the settings, without entries."""
        with self._database as database:
            database.executescript(_TABLES)
            database.execute("INSERT INTO about VALUES (?, ?)", (json.dumps(settings), COMMAND.get()))


def other_settings(path: Path, differences: str, command: str, remedy: str) -> str:
    """Message for a run that another command began; `command` is empty if it was begun from Python."""
    begun, repeat = f" by {command}" if command else "", "that command" if command else "those"
    return f"{path} was started with other settings ({differences}){begun}: repeat {repeat} to continue, or {remedy}"


def differences(before: object, now: object, name: str = "") -> Iterator[str]:
    """Yield in words what differs between two values made of dictionaries, by the dotted names of their entries."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(k for k in now if k not in before)]:
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name}: {_short(before)} then, {_short(now)} now"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARACTERS else text[: _VALUE_CHARACTERS - 1] + "…"
