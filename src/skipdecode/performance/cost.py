"""What a decode step costs: a fixed part, a part per layer that runs, and the read of each layer's cached tokens.

Pure Python. All seconds are for one step of the whole batch. The *decode phase* of a generation of n tokens has n - 1
steps: the first token comes out of the prompt's forward, which is not part of it, and the last one is never fed back.

*Lockstep*: all rows have the same age, so the step at position i runs `budget(i)` layers. *Continuous*: each row of a
stream has an age of its own, taken as independent and evenly spread over the positions; a step runs a layer if any row
needs it, so one young row brings its deep layers into everybody's step.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from skipdecode.errors import DataError, UsageError
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.schedule import Schedule

__all__ = ["CostModel", "Machine", "Use"]

Use = Literal["lockstep", "continuous"]
_FORMAT = 1


@dataclass(frozen=True)
class Machine:
    """What a prediction needs to know of a machine.

    Parameters
    ----------
    bandwidth : float
        Bytes a second that a large read reaches.
    flops : float
        Floating-point operations a second of a matrix product in the model's dtype.
    launch_seconds : float
        Time that a layer (and the work outside the layers) takes whatever its size.
    """

    bandwidth: float
    flops: float = math.inf
    launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}={getattr(self, name)!r} is not accepted: give a number above 0")
        if not 0 <= self.launch_seconds < math.inf:
            raise UsageError(f"launch_seconds={self.launch_seconds!r} is not accepted: give a number of 0 or more")

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Roofline: the longer of the time to read `num_bytes` and the time to do `flops` operations."""
        return max(num_bytes / self.bandwidth, flops / self.flops)


@dataclass(frozen=True)
class CostModel:
    """Seconds of one decode step of a model at one batch size on one machine.

    Parameters
    ----------
    num_layers : int
        Decoder layers of the model.
    batch : int
        Rows of a step.
    fixed_seconds : float
        Work that does not depend on depth: embeddings, head, sampling, the host's loop.
    layer_seconds : float
        One layer that runs, without the cache read.
    kv_seconds : float
        One layer's attention over one cached token of every row.
    window, window_share : int, float
        Sliding-window attention: the tokens it sees, and the share of layers that have it.
    source : {"predicted", "measured"}
        Where the figures come from.
    residual : float or None
        Measured: the largest relative distance between the fit and a measurement.
    """

    num_layers: int
    batch: int
    fixed_seconds: float
    layer_seconds: float
    kv_seconds: float = 0.0
    window: int = 0
    window_share: float = 0.0
    source: Literal["predicted", "measured"] = "predicted"
    residual: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "batch"):
            if not getattr(self, name) >= 1:
                raise UsageError(f"{name}={getattr(self, name)!r} is not accepted: give a whole number of 1 or more")
        for name in ("fixed_seconds", "layer_seconds", "kv_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r} is not accepted: give seconds, 0 or more")
        if self.layer_seconds + self.kv_seconds == 0:
            raise UsageError("a layer that takes no time leaves nothing to skip: give layer_seconds above 0")

    # ------------------------------------------------------------------ constructors

    @classmethod
    def predicted(cls, geometry: ModelGeometry, machine: Machine, batch: int = 1) -> Self:
        """From bytes and FLOPs: each part takes the longer of its read and its arithmetic (roofline)."""
        return cls(
            num_layers=geometry.num_layers,
            batch=batch,
            fixed_seconds=machine.seconds(geometry.fixed_bytes(batch), batch * geometry.fixed_flops())
            + machine.launch_seconds,
            layer_seconds=machine.seconds(geometry.layer_bytes(batch), batch * geometry.layer_flops())
            + machine.launch_seconds,
            kv_seconds=batch * machine.seconds(geometry.kv_bytes_per_token(), geometry.kv_flops_per_token()),
            window=geometry.window,
            window_share=len(geometry.windowed) / geometry.num_layers,
        )

    @classmethod
    def fitted(
        cls,
        num_layers: int,
        batch: int,
        by_layers: Mapping[int, float],
        kv_tokens: float,
        longer: tuple[float, float] | None = None,
        geometry: ModelGeometry | None = None,
    ) -> Self:
        """Least squares over measured steps.

        Parameters
        ----------
        num_layers, batch : int
            What was measured.
        by_layers : mapping
            Seconds of a step by the number of layers it ran; two entries or more, one of them `num_layers`.
        kv_tokens : float
            Cached tokens of a row during those steps.
        longer : (float, float), optional
            Cached tokens and seconds of a full-depth step over a longer text: gives the cost of the cache read.
        geometry : ModelGeometry, optional
            Gives the sliding window.
        """
        layers, seconds = list(by_layers), list(by_layers.values())
        if len(layers) < 2 or num_layers not in by_layers:
            raise UsageError(f"by_layers has {layers}: at least two depths, one of them {num_layers}, are needed")
        slope, fixed = statistics.linear_regression(layers, seconds)
        if fixed < 0:
            slope, fixed = statistics.linear_regression(layers, seconds, proportional=True)
        if slope <= 0:
            raise UsageError("steps with fewer layers took no less time: measure again on a quieter machine")
        window = geometry.window if geometry else 0
        share = len(geometry.windowed) / num_layers if geometry else 0.0
        read = _tokens_read(kv_tokens, window, share)
        kv = 0.0
        if longer is not None and (more := _tokens_read(longer[0], window, share) - read) > 0:
            kv = max(0.0, longer[1] - by_layers[num_layers]) / (num_layers * more)
        # Noise may not make the read dearer than the whole layer of which it is a part.
        kv = min(kv, slope / max(read, 1))
        return cls(
            num_layers=num_layers,
            batch=batch,
            fixed_seconds=fixed,
            layer_seconds=slope - kv * read,
            kv_seconds=kv,
            window=window,
            window_share=share,
            source="measured",
            residual=max(abs(fixed + slope * n - s) / s for n, s in by_layers.items()),
        )

    # ------------------------------------------------------------------ seconds

    def step_seconds(self, active_layers: float, kv_tokens: float = 0) -> float:
        """One step that runs `active_layers` layers, with `kv_tokens` cached tokens in every row."""
        return self.fixed_seconds + active_layers * self._one_layer(kv_tokens)

    def sequence_seconds(self, schedule: Schedule, prompt_len: int, new_tokens: int, use: Use = "lockstep") -> float:
        """The decode phase of `new_tokens` generated tokens: `new_tokens` - 1 steps, the prompt's forward not counted.

        In continuous use: the time between a row's first and last token in a stream of such rows. A layer that only
        some rows need is charged as if all had needed it, but for its cache read.

        Raises
        ------
        ScheduleError
            The schedule is for another number of layers.
        UsageError
            A length is out of range, or `use` is unknown.
        """
        schedule.check_fits(self.num_layers)
        steps = _decode_steps(prompt_len, new_tokens)
        reads = sum(schedule.budget(i) * self._read(prompt_len + i + 1) for i in range(steps))
        layers = steps * self.layers_per_step(schedule, new_tokens, use)
        return steps * self.fixed_seconds + layers * self.layer_seconds + reads * self.kv_seconds

    def layers_per_step(self, schedule: Schedule, new_tokens: int, use: Use = "lockstep") -> float:
        """Layers that a step runs for any of its rows, on average over the decode phase."""
        steps = _decode_steps(0, new_tokens)
        if use == "lockstep":
            return schedule.mean_budget(steps)
        if use != "continuous":
            raise UsageError(f"use={use!r} is not accepted: give 'lockstep' or 'continuous'")
        # Sets are nested, so a step runs the deepest row's set: E[max] = sum over depths of P(some row is that deep).
        listed = sorted(schedule.budgets[:steps] + (schedule.budgets[-1],) * (steps - schedule.seq_len))
        shares = _shares_at_least(listed, self.num_layers)
        return sum(1 - (1 - share) ** self.batch for share in shares)

    def speedup(self, schedule: Schedule, prompt_len: int, new_tokens: int, use: Use = "lockstep") -> float:
        """Wall-clock speed-up of the decode phase over full depth."""
        full = Schedule.full(self.num_layers)
        before = self.sequence_seconds(full, prompt_len, new_tokens, use)
        return before / self.sequence_seconds(schedule, prompt_len, new_tokens, use)

    def bound(self, budget: int, prompt_len: int, new_tokens: int) -> float:
        """Speed-up when every decode step runs `budget` layers: with the least budget, what no schedule exceeds."""
        return self.speedup(Schedule.constant(self.num_layers, budget, warmup_layers=0), prompt_len, new_tokens)

    def fixed_share(self, prompt_len: int, new_tokens: int) -> float:
        """Share of the full-depth decode phase that no schedule can leave out."""
        steps = _decode_steps(prompt_len, new_tokens)
        full = self.sequence_seconds(Schedule.full(self.num_layers), prompt_len, new_tokens)
        return steps * self.fixed_seconds / full

    def _one_layer(self, kv_tokens: float) -> float:
        return self.layer_seconds + self.kv_seconds * self._read(kv_tokens)

    def _read(self, kv_tokens: float) -> float:
        return _tokens_read(kv_tokens, self.window, self.window_share)

    # ------------------------------------------------------------------ JSON

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"format": _FORMAT} | asdict(self)

    def to_json(self, indent: int | None = None) -> str:
        """The cost model as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A cost model from `to_dict`'s dictionary; raises DataError on anything else."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise DataError(f"not a cost model: a JSON object with format {_FORMAT} is needed")
        values = {name: value for name, value in data.items() if name != "format"}
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise DataError(f"unknown cost model field {unknown[0]!r}")
        try:
            return cls(**values)
        except (TypeError, UsageError) as e:
            raise DataError(f"not a cost model: {e}") from None

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A cost model from JSON text; raises DataError on wrong JSON."""
        try:
            data = json.loads(text)
        except ValueError as e:
            raise DataError(f"a cost model must be JSON: {e}") from None
        return cls.from_dict(data)


def _tokens_read(kv_tokens: float, window: int, window_share: float) -> float:
    """Cached tokens that a layer reads, averaged over full and sliding-window attention."""
    return kv_tokens - window_share * max(0, kv_tokens - window)


def _decode_steps(prompt_len: int, new_tokens: int) -> int:
    if prompt_len < 0:
        raise UsageError(f"prompt_len={prompt_len} is not accepted: give 0 or more tokens")
    if new_tokens < 2:
        raise UsageError(
            f"new_tokens={new_tokens} is not accepted: give 2 or more (the first comes out of the prompt's forward)"
        )
    return new_tokens - 1


def _shares_at_least(ascending: Sequence[int], num_layers: int) -> list[float]:
    """Share of the values that are at least 1, 2, …, `num_layers`."""
    shares, below = [], 0
    for depth in range(1, num_layers + 1):
        while below < len(ascending) and ascending[below] < depth:
            below += 1
        shares.append(1 - below / len(ascending))
    return shares
