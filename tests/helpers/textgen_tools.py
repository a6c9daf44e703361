"""A tiny model directory with a byte-level tokenizer, processes, standard input, a full disk, and rows of files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CHAT_TEMPLATE, byte_tokenizer
from tiny import tiny_model

CONTEXT = 96


def save_tiny_model(
    path: Path, *, tokenizer: bool = True, chat: Any = CHAT_TEMPLATE, context: int = CONTEXT, **entries: Any
) -> str:
    """A random Llama of 8 layers with the byte tokenizer, `entries` in its config; returns its directory as text."""
    model = tiny_model("llama", vocab_size=259, max_position_embeddings=context, **entries)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer(chat).save_pretrained(path)
    return str(path)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "skipdecode", *arguments]


def subprocess_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """A limit on the bytes of a file, which fails in the middle of a write, as a full disk does."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def stdin_of(monkeypatch: pytest.MonkeyPatch, content: str | bytes) -> None:
    """Put this on the standard input of this process."""
    content = content.encode() if isinstance(content, str) else content
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def log_entries(path: Path) -> dict[Any, Any]:
    """The entries of a log, also of one that a process is writing; none if there is no file."""
    try:
        with tempfile.TemporaryDirectory() as copy:
            for file in path.parent.glob(f"{path.name}*"):
                shutil.copy(file, copy)
            with closing(sqlite3.connect(Path(copy) / path.name)) as database:
                return {key: json.loads(value) for key, value in database.execute("SELECT * FROM entries")}
    except (OSError, sqlite3.Error):  # just begun, or renewed
        return {}


def read_rows(path: Path | str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
