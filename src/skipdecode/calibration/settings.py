"""What a calibration is asked for. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skipdecode.errors import UsageError
from skipdecode.performance.cost import Use

__all__ = ["Method", "Settings"]

Method = Literal["greedy", "block-influence"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a calibration.

    Parameters
    ----------
    target_speedup, nominal_speedup : float, optional
        One of the two: wall-clock speed-up of the decode phase on texts as long as the records; or the cost in layers
        of the paper's schedule with this nominal speed-up on such texts.
    use : {"lockstep", "continuous"}
        Continuous asks for a flat curve.
    method : {"greedy", "block-influence"}
        Of the drop order.
    candidates : int
        Layers tried in each greedy round after the first.
    least : int, optional
        Layers at which the order stops. Default: half of what a flat curve would run, and no more than the least of
        the paper's curve.
    buckets : int
        Groups of positions whose budgets are solved for.
    warmup_layers : int
        First layers that always run.
    seq_len : int, optional
        Positions of the paper's curve. Default: the 95th percentile of the responses' lengths.
    batch_size : int
        Records in a forward pass.

    Raises
    ------
    UsageError
        Names the value that is out of range.
    """

    target_speedup: float | None = None
    nominal_speedup: float | None = None
    use: Use = "lockstep"
    method: Method = "greedy"
    candidates: int = 6
    least: int | None = None
    buckets: int = 8
    warmup_layers: int = 1
    seq_len: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        given = [name for name in ("target_speedup", "nominal_speedup") if getattr(self, name) is not None]
        if len(given) != 1:
            raise UsageError("give one target: --target-speedup (wall-clock) or --nominal-speedup (layers)")
        if not 1 <= getattr(self, given[0]) < float("inf"):
            raise UsageError(f"{_flag(given[0])} {getattr(self, given[0])} is not accepted: give a number of 1 or more")
        for name in ("candidates", "buckets", "batch_size", "least", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_flag(name)} {value} is not accepted: give 1 or more")
        if self.warmup_layers < 0:
            raise UsageError(f"--warmup-layers {self.warmup_layers} is not accepted: give 0 or more")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
