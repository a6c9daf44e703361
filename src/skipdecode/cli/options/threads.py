"""The option for the number of CPU threads, the same for every verb that takes it."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode.cli.options.option import option
from skipdecode.errors import UsageError

__all__ = ["ThreadOptions"]


@dataclass(frozen=True, kw_only=True)
class ThreadOptions:
    """Base of a verb's `Config`."""

    threads: int | None = option("CPU threads (default: torch's choice)", default=None)

    def check_threads(self) -> None:
        """Raise UsageError for a number that makes no sense; loads nothing."""
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads {self.threads} is not accepted: give 1 or more")

    def use_threads(self) -> None:
        """Tell torch."""
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
