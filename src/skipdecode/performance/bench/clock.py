"""A clock for transformers' `generate`: a stopping criterion that never stops, and notes the time after every token."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers.generation import StoppingCriteria

from skipdecode.performance.machine import synchronize

__all__ = ["TokenClock"]


class TokenClock(StoppingCriteria):  # type: ignore[misc]
    """Notes when `generate` had its tokens.

    Attributes
    ----------
    times : list of float
        Seconds, one entry a call: a token of every row, or of a drafting method a group of tokens.
    lengths : list of int
        Tokens of a row at those times, the prompt's included.
    """

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self.lengths: list[int] = []
        self._device = device

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        synchronize(self._device)
        self.times.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
