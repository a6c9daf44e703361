"""What a run did and cost, summed over its batches, and the speed of the schedule next to that of full depth."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from skipdecode.engine.backend import BatchResult

__all__ = ["Comparison", "RunSummary"]


@dataclass
class Comparison:
    """The same batches at full depth, for as many steps as the schedule took; the two in alternating order.

    Parameters
    ----------
    ratios : list of float
        Full-depth seconds / schedule seconds of the decode steps of each batch.
    tokens : int
        Tokens that each side's steps fed (rows times steps, rows that had ended included).
    full_s, schedule_s : float
        Seconds of the decode steps.
    layers, full_layers : int
        Layers that ran, summed over rows and steps.
    """

    ratios: list[float] = field(default_factory=list)
    tokens: int = 0
    full_s: float = 0.0
    schedule_s: float = 0.0
    layers: int = 0
    full_layers: int = 0

    def add(self, result: BatchResult, full: BatchResult) -> None:
        """Take in one batch; one without decode steps tells nothing."""
        if not result.steps or not result.decode_s:
            return
        rows = len(result.tokens)
        self.ratios.append(full.decode_s / result.decode_s)
        self.tokens += rows * result.steps
        self.full_s += full.decode_s
        self.schedule_s += result.decode_s
        self.layers += rows * result.step_layers
        self.full_layers += rows * full.step_layers

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
    """Sums over the batches of one run (rows taken over from an earlier run are only counted).

    Parameters
    ----------
    num_layers : int
        Decoder layers of the model.
    rows, bad_rows : int
        Rows of the input that are in the output now, and how many of them are error rows.
    rows_resumed : int
        How many of the rows an earlier run had done.
    prompt_tokens, new_tokens : int
        Of the rows generated now.
    """

    num_layers: int
    rows: int = 0
    bad_rows: int = 0
    rows_resumed: int = 0
    batches: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    row_steps: int = 0
    row_step_layers: int = 0
    kv_bytes: int = 0
    kv_bytes_full: int = 0
    kv_bytes_peak: int = 0
    comparison: Comparison | None = None

    def add(self, prompt_tokens: int, result: BatchResult) -> None:
        """Take in one batch."""
        rows = len(result.tokens)
        self.batches += 1
        self.prompt_tokens += prompt_tokens
        self.new_tokens += sum(map(len, result.tokens))
        self.prefill_s += result.prefill_s
        self.decode_s += result.decode_s
        self.decode_tokens += sum(len(t) - 1 for t in result.tokens)
        self.row_steps += rows * result.steps
        self.row_step_layers += rows * result.step_layers
        self.kv_bytes += result.kv_bytes
        self.kv_bytes_full += result.kv_bytes_full
        self.kv_bytes_peak = max(self.kv_bytes_peak, result.kv_bytes)

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second spent in the model, prompts included."""
        return _ratio(self.new_tokens, self.prefill_s + self.decode_s) or 0.0

    @property
    def mean_layers(self) -> float | None:
        """Layers that ran for a generated token that was fed back, on average; None if none was."""
        return _ratio(self.row_step_layers, self.row_steps)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        sums = {k: v for k, v in vars(self).items() if k != "comparison" and not k.startswith("row_")}
        return sums | {
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": _ratio(self.decode_tokens, self.decode_s),
            "mean_layers_per_token": self.mean_layers,
            "kv_saved_share": None if not self.kv_bytes_full else 1 - self.kv_bytes / self.kv_bytes_full,
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
        }


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None
