"""Where prompts come from, as lines of bytes that can be read more than once in constant memory.

What can be read only once (standard input, a pipe) is copied to a temporary file first. A source has a fingerprint, so
that an interrupted run is only ever resumed on the same input.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

from skipdecode.common.jsonl import BOM
from skipdecode.errors import DataError

__all__ = ["MAX_LINE_BYTES", "PromptSource"]

MAX_LINE_BYTES = 64 * 2**20
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


class PromptSource:
    """Numbered lines of one input.

    Parameters
    ----------
    name : str
        What messages call it.
    opened : binary file
        Seekable; closed by `close`.
    format : {"jsonl", "txt"}
        How a line is read.
    fingerprint : dict
        JSON-ready; equal for equal input.
    """

    def __init__(self, name: str, opened: IO[bytes], format: str, fingerprint: dict[str, Any]) -> None:
        self.name = name
        self.format = format
        self.fingerprint = fingerprint
        self._file = opened

    @classmethod
    def open(cls, path: str, format: str | None = None) -> Self:
        """A file, a pipe, or standard input (``-``).

        `format` defaults to JSONL for the endings .jsonl, .ndjson and .json, and for standard input and pipes whose
        first character is ``{``; anything else is text, one prompt a line.

        Raises
        ------
        DataError
            The file cannot be read, or is a JSON array.
        """
        name = "standard input" if path == "-" else path
        try:
            opened = sys.stdin.buffer if path == "-" else Path(path).open("rb")  # noqa: SIM115 - closed by `close`
            regular = path != "-" and stat.S_ISREG(Path(path).stat().st_mode)
        except OSError as e:
            raise DataError(f"cannot read the input {path}: {e.strerror or e}") from None
        if regular:
            about = Path(path).stat()
            fingerprint = {"path": str(Path(path).resolve()), "bytes": about.st_size, "modified_ns": about.st_mtime_ns}
        else:
            opened, fingerprint = _spooled(opened)
        start = _first_character(opened)
        if format is None:
            by_name = Path(path).suffix.lower() in _JSONL_SUFFIXES
            format = "jsonl" if by_name or (not regular and start == b"{") else "txt"
        if format == "jsonl" and start == b"[":
            raise DataError(f"{name} is a JSON array: give JSONL, one JSON object a line")
        return cls(name, opened, format, fingerprint)

    @classmethod
    def of_prompts(cls, prompts: Sequence[str]) -> Self:
        """Prompts given as arguments: rows 1, 2, … with the field `prompt`."""
        data = "".join(json.dumps({"prompt": p}) + "\n" for p in prompts).encode()
        return cls("arguments", io.BytesIO(data), "jsonl", {"sha256": hashlib.sha256(data).hexdigest()})

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """1-based line numbers with their bytes, line ends taken off; None stands for a line above MAX_LINE_BYTES."""
        self._file.seek(0)
        number = 0
        while raw := self._file.readline(MAX_LINE_BYTES):
            number += 1
            if number == 1:
                raw = raw.removeprefix(BOM)
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                _drop_rest_of_line(self._file)
                yield number, None
            else:
                yield number, raw.rstrip(b"\r\n")

    def close(self) -> None:
        """Close the file; a temporary copy is deleted."""
        self._file.close()


def _spooled(stream: IO[bytes]) -> tuple[IO[bytes], dict[str, Any]]:
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
    shutil.copyfileobj(stream, copy)
    copy.seek(0)
    return copy, {"sha256": hashlib.file_digest(copy, "sha256").hexdigest()}


def _first_character(file: IO[bytes]) -> bytes:
    file.seek(0)
    start = file.read(4096).removeprefix(BOM).lstrip()[:1]
    file.seek(0)
    return start


def _drop_rest_of_line(file: IO[bytes]) -> None:
    while rest := file.readline(MAX_LINE_BYTES):
        if rest.endswith(b"\n"):
            return
