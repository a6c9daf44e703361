"""Messages and progress bars on standard error. A message does not break a bar."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

from skipdecode.common.jsonl import Json

_LINE_SECONDS = 30.0
_DETAILED = ContextVar("detailed", default=False)


def note(line: str) -> None:
    """Print one line; a progress bar stays below it."""
    tqdm.write(f"skipdecode: {line}", file=sys.stderr)


def detail(line: str) -> None:
    """Print one line for the developers of this package; nothing outside of `detailed`."""
    if _DETAILED.get():
        note(line)


@contextmanager
def detailed() -> Iterator[None]:
    """Print the lines of `detail`."""
    token = _DETAILED.set(True)
    try:
        yield
    finally:
        _DETAILED.reset(token)


def progress_bar(total: int | None, unit: str, *, name: str | None = None, done: int = 0, shown: bool = True) -> Any:
    """A bar over `total` units, of which `done` are finished; if stderr is no terminal, a line every 30 s.

    A bar that is not `shown` prints nothing.
    """
    options: Json = {"total": total, "initial": done, "unit": unit, "disable": not shown}
    if sys.stderr.isatty() or not shown:
        return tqdm(desc=name, mininterval=0.2, file=sys.stderr, **options)
    options |= {"unit": f" {unit}", "mininterval": _LINE_SECONDS, "delay": _LINE_SECONDS, "miniters": 1}
    return _Lines(desc=name and f"{name}: ", file=io.StringIO(), **options)


class _Lines(tqdm):  # type: ignore[type-arg]
    """A bar that prints notes; none if it ends before the first is due."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        at_end = self.disable  # tqdm disables a bar, then shows its end
        if self.n != self.last_print_n if at_end else time.time() >= self.last_print_t + self.mininterval:
            # The unit of a slow rate, and a time that nobody knows.
            note(" ".join(str(self).split()).replace("s/ ", "s/").replace(", ? left", ""))

    @property
    def format_dict(self) -> Json:
        """Fields of a line; some bars learn their total on the way, or never, and then show no time that is left."""
        known = self.total is not None
        counted, left = ("{n_fmt} of {total_fmt}", ", {remaining} left") if known else ("{n_fmt}", "")
        units = f"{self.unit}{'es' if self.unit.endswith('ch') else 's'}"
        return {**super().format_dict, "bar_format": f"{{desc}}{counted}{units}, {{rate_fmt}}{left}{{postfix}}"}

    def set_postfix(self, *values: Any, **named: Any) -> None:
        super().set_postfix(*values, **{**named, "refresh": False})


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings and log lines (below errors) of other packages; print this package's warnings as notes."""
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
def without_foreign_bars(*, downloads: bool = True) -> Iterator[None]:
    """Hide transformers' bars of loading weights and all FutureWarnings; bars of `downloads` stay if wanted."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

    transformers_logging = sys.modules.get("transformers.utils.logging")  # without it, nothing loads weights
    shown = transformers_logging is not None and transformers_logging.is_progress_bar_enabled()
    downloads = downloads and not are_progress_bars_disabled()
    if transformers_logging is not None:
        transformers_logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if transformers_logging is not None and shown:
            transformers_logging.enable_progress_bar()
