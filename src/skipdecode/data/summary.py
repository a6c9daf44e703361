"""What a run did and cost, and the speed of the schedule next to that of full depth."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from skipdecode.engine.base import EngineStats

__all__ = ["RunSummary", "SpeedComparison"]


@dataclass
class SpeedComparison:
    """The same batches under the schedule and at full depth, for as many steps, in alternating order.

    Parameters
    ----------
    ratios : list of float
        Full-depth seconds / schedule seconds of the decode steps of each batch.
    tokens : int
        Tokens that each side's steps fed.
    full_s, schedule_s : float
        Seconds of the decode steps.
    layers, full_layers : int
        Layers that ran, summed over the fed tokens.
    """

    ratios: list[float] = field(default_factory=list)
    tokens: int = 0
    full_s: float = 0.0
    schedule_s: float = 0.0
    layers: int = 0
    full_layers: int = 0

    def add(self, ours: EngineStats, full: EngineStats) -> None:
        """Take in one batch."""
        self.ratios.append(full.after_prompts / ours.after_prompts)
        self.tokens += ours.fed_tokens
        self.full_s += full.after_prompts
        self.schedule_s += ours.after_prompts
        self.layers += ours.token_layers
        self.full_layers += full.token_layers

    def to_dict(self) -> dict[str, Any] | None:
        """JSON-ready; None if no batch had a decode step."""
        if not self.ratios:
            return None
        return {
            "batches": len(self.ratios),
            "full_decode_tokens_per_s": self.tokens / self.full_s,
            "decode_tokens_per_s": self.tokens / self.schedule_s,
            "measured_decode_speedup": statistics.median(self.ratios),
            "nominal_speedup": self.full_layers / self.layers,
        }


@dataclass
class RunSummary:
    """A run's rows and the engine's totals (rows taken over from an earlier run are only counted).

    Parameters
    ----------
    num_layers : int
        Decoder layers of the model.
    stats : EngineStats
        Of the rows generated now.
    rows, bad_rows : int
        Rows of the input that are in the output now, and how many of them are error rows.
    rows_resumed : int
        How many of the rows an earlier run had done.
    seconds : float
        From the first row read to the output in place.
    """

    num_layers: int
    stats: EngineStats
    rows: int = 0
    bad_rows: int = 0
    rows_resumed: int = 0
    seconds: float = 0.0
    comparison: SpeedComparison | None = None

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second spent in the model, prompts included."""
        return _ratio(self.stats.new_tokens, self.stats.seconds) or 0.0

    @property
    def kv_saved(self) -> float | None:
        """Share of the keys and values that full depth would have held; None if nothing was held."""
        stats = self.stats
        return 1 - stats.kv_bytes_peak / stats.kv_bytes_full_peak if stats.kv_bytes_full_peak else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        stats = self.stats
        return {
            "num_layers": self.num_layers,
            "rows": self.rows,
            "bad_rows": self.bad_rows,
            "rows_resumed": self.rows_resumed,
            "steps": stats.steps,
            "prompt_tokens": stats.prompt_tokens,
            "new_tokens": stats.new_tokens,
            "seconds": self.seconds,
            "prefill_s": stats.prompt_seconds,
            "decode_s": stats.after_prompts,
            "decode_tokens": stats.fed_tokens,
            "kv_bytes_peak": stats.kv_bytes_peak,
            "kv_bytes_full_peak": stats.kv_bytes_full_peak,
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": _ratio(stats.fed_tokens, stats.after_prompts),
            "mean_layers_per_token": stats.mean_layers,
            "kv_saved_share": self.kv_saved,
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
        }


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None
