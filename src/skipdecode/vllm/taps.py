"""States of the prompt tokens before a row, for a fit whose maps of prompts take *taps* (`skipdecode.models.fit`).

The tokens before a row are rows of the same step, of an earlier step where a prompt comes in chunks, or of another
request where requests share a prefix. So states are kept for each block of the KV cache: those of the last prompt
tokens that were stored there. This is enough, because a prefix is shared by whole blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skipdecode.models.maps import normed
from skipdecode.schedule import Schedule
from skipdecode.vllm.step_rows import StepBatch


@dataclass(frozen=True)
class TapRows:
    """Where a step finds the states before its rows, and which it keeps.

    `rows` and `places`: (taps, num_rows): the row of the token that many tokens before, or its place in the memory; -1
    where it is not there. `kept` and `kept_at`: rows whose states later steps may need, and their places.
    """

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    kept: NDArray[np.int64]
    kept_at: NDArray[np.int64]


def tap_rows(batch: StepBatch, taps: int, blocks: NDArray[np.int32], block_size: int) -> TapRows:
    """The `TapRows` of a step; `blocks` (requests, blocks of a text) are the numbers of the blocks of the KV cache."""
    request = np.repeat(np.arange(len(batch.rows)), batch.rows)
    within = np.arange(batch.num_rows) - np.repeat(np.cumsum(batch.rows) - batch.rows, batch.rows)
    position = batch.start[request] + within

    def place(at: NDArray[np.int64]) -> NDArray[np.int64]:
        known: NDArray[np.int64] = blocks[request, np.maximum(at, 0) // block_size].astype(np.int64) * taps + at % taps
        return known

    back = np.arange(1, taps + 1)[:, None]
    here = within >= back
    rows = np.where(here, np.arange(batch.num_rows) - back, -1)
    earlier = np.stack([place(position - tap) for tap in range(1, taps + 1)])
    places = np.where(~here & (position >= back), earlier, -1)
    # The last prompt token runs the layers, so it is no tap of a token that does not.
    end = np.minimum(batch.start + batch.rows, batch.prompt - 1)[request]
    next_block = (position // block_size + 1) * block_size
    kept = np.flatnonzero((position < end) & (position + taps >= np.minimum(end, next_block)))
    kept_at = place(position)[kept]
    # vLLM shares a block from the step on that fills it.
    filled = {(at, position[row]): row for at, row in zip(kept_at.tolist(), kept.tolist(), strict=True)}
    for tap, row in zip(*np.nonzero(places >= 0), strict=True):
        found = filled.get((places[tap, row], position[row] - tap - 1))
        if found is not None:
            rows[tap, row], places[tap, row] = found, -1
    return TapRows(rows, places, kept, kept_at)


def stops_of(schedules: Sequence[Schedule], layers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each layer how many layers below it the prompts of each schedule run; where all are equal, so are states."""
    return {layer: tuple(bisect_left(s.prompt_layers(), layer) for s in schedules) for layer in layers}


class TapMemory:
    """The states of a model's last prompt tokens in each block, for each stop of its prompts.

    `taps`: tokens before a row that a map takes. `stops`: as `stops_of` gives them, for the layers with maps.
    """

    def __init__(self, taps: int, stops: dict[int, tuple[int, ...]]) -> None:
        self.taps, self._stops = taps, stops
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._written: dict[tuple[int, ...], Tensor] = {}
        self._found: dict[tuple[int, ...], Tensor] = {}
        self._step: dict[str, Tensor] | None = None
        self._most = 0  # places that the step needs

    def begin(self, rows: TapRows | None, device: torch.device) -> None:
        """Start a step; None: one that projects nothing, or that vLLM makes up (states before rows are zeros)."""
        self._step = None
        if rows is not None:
            self._step = {name: torch.from_numpy(of).to(device) for name, of in vars(rows).items()}
            self._most = 1 + max(rows.places.max(initial=0), rows.kept_at.max(initial=0))

    def before(self, layer: int, states: Callable[[], Tensor]) -> Tensor:
        """The normed states before each row, (rows, taps * width), at a layer; `states` gives those of all rows."""
        stop = self._stops[layer]
        if stop not in self._found:
            self._found[stop] = self._look_back(stop, states())
        return self._found[stop]

    def _look_back(self, stop: tuple[int, ...], states: Tensor) -> Tensor:
        if self._step is None:
            return states.new_zeros(len(states), self.taps * states.shape[1])
        made = normed(states).to(states.dtype)
        kept = self._grown(stop, made)
        self._written[stop] = made[self._step["kept"]]
        found = [
            _where(rows, made) + _where(places, kept)
            for rows, places in zip(self._step["rows"], self._step["places"], strict=True)
        ]
        return torch.cat(found, -1)

    def end(self) -> None:
        """The step is over: later steps see its states, which its own layers did not."""
        if self._step is not None:
            for stop, states in self._written.items():
                self._kept[stop][self._step["kept_at"]] = states
        self._step, self._written, self._found = None, {}, {}

    def _grown(self, stop: tuple[int, ...], like: Tensor) -> Tensor:
        """The memory of a stop, large enough for the step."""
        kept = self._kept.get(stop)
        if kept is None or len(kept) < self._most:
            larger = like.new_zeros(max(self._most, 0 if kept is None else 2 * len(kept)), like.shape[1])
            if kept is not None:
                larger[: len(kept)] = kept
            kept = self._kept[stop] = larger
        return kept


def _where(index: Tensor, states: Tensor) -> Tensor:
    """States by index, zeros where it is -1."""
    return states[index.clamp(min=0)].masked_fill(index.unsqueeze(-1) < 0, 0)
