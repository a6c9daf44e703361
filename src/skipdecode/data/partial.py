"""The partial output of a run: what makes a kill at any moment lose nothing and repeat nothing.

A header line with the run's settings, then one line a finished row, in any order: ``index ok|bad<tab>JSON``. Rows are
appended with one unbuffered write each and synced to disk every few seconds. A line that was cut off, and anything
after it, is dropped on resume. What is done is remembered as "all below a mark, and a few above it": rows come almost
in order, so memory does not grow with the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skipdecode.errors import OutputError

__all__ = ["PartialFile", "json_line"]

_FORMAT = 1
_HEADER_START = b'{"skipdecode_partial"'
_SYNC_SECONDS = 5.0
_DIFFERENCES_SHOWN = 3
_VALUE_CHARACTERS = 48


def json_line(row: Any) -> bytes:
    """One line of JSON, UTF-8 with its line end."""
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


class PartialFile:
    """Finished rows on disk.

    Parameters
    ----------
    path : Path
        The file; made if it is not there, taken over if it is.
    settings : dict
        JSON-ready fingerprint of the run.
    restart : bool
        Drop what is there.

    Attributes
    ----------
    rows, bad : int
        Rows that are there, and how many of them are error rows.

    Raises
    ------
    OutputError
        The file cannot be written, belongs to a run with other settings (the message names them), or is being written
        by another process.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self.rows = 0
        self.bad = 0
        self._done_below = 0
        self._done_above: set[int] = set()
        self._synced = time.monotonic()
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as e:
            raise OutputError(f"cannot write {path}: {e.strerror or e}") from None
        try:
            self._lock()
            self._size = 0 if restart else self._take_over(settings)
            self._file.truncate(self._size)
            if not self._size:
                self._append(json_line({"skipdecode_partial": _FORMAT, "settings": settings}))
        except BaseException:
            self._file.close()
            raise

    def __contains__(self, index: int) -> bool:
        return index < self._done_below or index in self._done_above

    def append(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        """Keep a row; once this returns, a kill of this process does not lose it."""
        self._append(b"%d %s\t" % (index, b"bad" if bad else b"ok") + json_line(row))
        self._note(index, bad)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Index and JSON line of every row, in the order in which they were finished."""
        for index, _, line, _ in _whole_rows(self.path):
            yield index, line

    def sync(self) -> None:
        """Wait until all rows are on the disk itself."""
        with _as_output_error(self.path, self.rows):
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and close; may be called twice."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()

    # ------------------------------------------------------------------ inside

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"{self.path} is being written by another run: wait for it, or name another output"
            ) from None
        except OSError:
            # Some network file systems cannot lock; there, two runs at once are not noticed.
            return

    def _take_over(self, settings: dict[str, Any]) -> int:
        """Take over what an earlier run left; returns the number of bytes that are whole."""
        with self.path.open("rb") as file:
            header = file.readline()
        if not header.endswith(b"\n") and _HEADER_START.startswith(header[: len(_HEADER_START)]):
            return 0
        _check_header(self.path, header, settings)
        end = len(header)
        for index, bad, _, line_end in _whole_rows(self.path):
            self._note(index, bad)
            end = line_end
        return end

    def _note(self, index: int, bad: bool) -> None:
        if index in self:
            return
        self.rows += 1
        self.bad += bad
        self._done_above.add(index)
        while self._done_below in self._done_above:
            self._done_above.remove(self._done_below)
            self._done_below += 1

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        with _as_output_error(self.path, self.rows):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                # Half a line may have been written; cut it off, so that the file stays whole.
                with contextlib.suppress(OSError):
                    self._file.truncate(self._size)
                raise
        self._size += len(line)


@contextlib.contextmanager
def _as_output_error(path: Path, rows: int) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise OutputError(
            f"cannot write {path}: {e.strerror or e}; {rows} finished rows are kept in it: make room, then give the "
            "same command again"
        ) from None


def _whole_rows(path: Path) -> Iterator[tuple[int, bool, bytes, int]]:
    """Index, badness, JSON line and end offset of the rows up to the first line that is not whole."""
    with path.open("rb") as file:
        end = len(file.readline())
        for raw in file:
            head, _, line = raw.partition(b"\t")
            index, _, kind = head.partition(b" ")
            if not (index.isdigit() and kind in (b"ok", b"bad") and line.startswith(b"{") and line.endswith(b"}\n")):
                return
            end += len(raw)
            yield int(index), kind == b"bad", line, end


def _check_header(path: Path, header: bytes, settings: dict[str, Any]) -> None:
    try:
        found = json.loads(header)
        before = found["settings"] if found["skipdecode_partial"] == _FORMAT else None
    except (ValueError, KeyError, TypeError):
        before = None
    if not isinstance(before, dict):
        raise OutputError(f"{path} is not a partial output of this version: move it away, or drop it with --restart")
    differences = list(_differences(before, json.loads(json.dumps(settings))))
    if differences:
        more = len(differences) - _DIFFERENCES_SHOWN
        shown = "; ".join(differences[:_DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise OutputError(
            f"{path} was begun with other settings ({shown}): repeat those to go on, or drop its rows with --restart"
        )


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(k for k in now if k not in before)]:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name}: {_short(before)} then, {_short(now)} now"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARACTERS else text[: _VALUE_CHARACTERS - 1] + "…"
