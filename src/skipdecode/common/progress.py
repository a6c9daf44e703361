"""What a user is told while work goes on, on standard error: lines, and bars that lines leave whole."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from tqdm import tqdm

__all__ = ["note", "progress_bar", "quiet", "without_foreign_bars"]

_LINE_SECONDS = 30.0


def note(line: str) -> None:
    """One line, above a progress bar that may be there."""
    tqdm.write(f"skipdecode: {line}", file=sys.stderr)


def progress_bar(
    total: int | None, unit: str, *, name: str | None = None, done: int = 0, shown: bool = True, leave: bool = True
) -> Any:
    """A bar over `total` units, `done` of which were there before; a line every 30 s where there is no terminal.

    One that is not `shown` says nothing; one that does not `leave` goes when it is closed.
    """
    if sys.stderr.isatty() or not shown:
        return tqdm(
            total=total, initial=done, desc=name, unit=unit, mininterval=0.2, leave=leave, file=sys.stderr,
            disable=not shown,
        )  # fmt: skip
    return _Lines(total, unit, name, done)


class _Lines:
    """In the place of tqdm's bar: plain lines for a log, none from work that ends before the first is due."""

    def __init__(self, total: int | None, unit: str, name: str | None, done: int) -> None:
        self.total = total
        self.n: float = done
        self._unit, self._units = unit, f"{unit}es" if unit.endswith("ch") else f"{unit}s"
        self._name, self._done, self._more = name, done, ""
        self._start = self._due = time.monotonic()
        self._due += _LINE_SECONDS
        self._told: float | None = None  # units of the last line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: float = 1) -> None:
        self.n += count
        if time.monotonic() >= self._due:
            self._tell()

    def set_postfix(self, **values: object) -> None:
        self.set_postfix_str(", ".join(f"{name}={value}" for name, value in values.items()))

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self._more = text

    def reset(self, total: int | None = None) -> None:
        self.total, self.n, self._done = total, 0, 0
        self._start = time.monotonic()

    def close(self) -> None:
        if self._told not in (None, self.n):
            self._tell()
        self._told = None

    def _tell(self) -> None:
        now, self._told = time.monotonic(), self.n
        self._due, passed = now + _LINE_SECONDS, max(now - self._start, 1e-9)
        rate = (self.n - self._done) / passed
        of = "" if self.total is None else f" of {self.total}"
        pace = f"{rate:.3g} {self._units}/s" if rate >= 1 or not rate else f"{1 / rate:.3g} s/{self._unit}"
        words = [f"{self.n}{of} {self._units}", pace, *([self._more] if self._more else [])]
        if self.total is not None and rate and self.n < self.total:
            words.append(f"{tqdm.format_interval((self.total - self.n) / rate)} left")
        else:
            words.append(f"{tqdm.format_interval(passed)} {'in all' if self.n == self.total else 'so far'}")
        note(f"{self._name}: {', '.join(words)}" if self._name else ", ".join(words))


# ---------------------------------------------------------------------- other packages


@contextmanager
def quiet() -> Iterator[None]:
    """Without other packages' warnings and their log lines below an error; warnings of our own become notes."""
    logs, verbosity = logging.root.manager.disable, os.environ.get("TRANSFORMERS_VERBOSITY")
    logging.disable(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", category=UserWarning, module=r"skipdecode(\.|$)")
            warnings.showwarning = lambda message, *_, **__: note(str(message))
            yield
    finally:
        logging.disable(logs)
        if verbosity is None:
            os.environ.pop("TRANSFORMERS_VERBOSITY", None)


@contextmanager
def without_foreign_bars() -> Iterator[None]:
    """Without the bars that transformers shows while it loads weights; those of downloads stay, on a terminal.

    Nor what other packages tell each other's makers (FutureWarning).
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as theirs

    shown, downloads = theirs.is_progress_bar_enabled(), not are_progress_bars_disabled()
    theirs.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if shown:
            theirs.enable_progress_bar()
