"""The fast path on GPUs: decode steps of fixed shape over slabs, recorded as CUDA graphs; prompts kernel by kernel.

The same steps run on a CPU, unrecorded, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skipdecode.engine.fast_model import FastModel, TokenRows
from skipdecode.engine.kernels.dense import DenseDecoder, Segment
from skipdecode.engine.kernels.graphs import Recorder, recorder_for
from skipdecode.engine.kernels.slabs import Slabs, token_bucket
from skipdecode.engine.static_kv import SlabKV
from skipdecode.schedule import Schedule
from skipdecode.schedule.levels import fewest_levels

__all__ = ["DenseModel"]


class DenseModel(FastModel):
    """The fast path of a transformers model, for devices that repeat recorded steps.

    A step is recorded for every number of places (powers of two), of columns that attention reads (see
    `skipdecode.engine.kernels.slabs.token_bucket`) and set of layers that some row runs, when it first comes up.

    Parameters
    ----------
    model : PreTrainedModel
        See `FastModel`.
    new_recorder : callable, optional
        Makes what records steps. Default: CUDA graphs on GPUs, nothing elsewhere.

    Raises
    ------
    UnfitModelError
        If the fast path does not cover the model.
    """

    def __init__(self, model: Any, new_recorder: Callable[[], Recorder] | None = None) -> None:
        # Kept when their KV store is gone, for the next one: what was recorded on them stays of use.
        self._users: dict[Slabs, weakref.ref[SlabKV]] = {}
        super().__init__(model, "torch")
        self.kernel = "dense"
        self._new_recorder = new_recorder or recorder_for(self.device)

    @property
    def records(self) -> bool:
        """Whether the first run of a step takes longer than those after it."""
        return self._new_recorder is not None

    def new_kv(self) -> SlabKV:
        """An empty KV store for this model's forwards, in slabs that no other store uses."""
        free = next((slabs for slabs, user in self._users.items() if user() is None), None)
        kv = SlabKV(free or self._new_slabs())
        self._users[kv.slabs] = weakref.ref(kv)
        return kv

    def suited(self, schedule: Schedule) -> Schedule:
        """The schedule with the fewest budgets that keep 98% of its saving: each takes graphs of its own."""
        return fewest_levels(schedule).schedule

    @torch.inference_mode()
    def forward(self, rows: TokenRows, kv: SlabKV) -> Tensor:
        """See `FastModel.forward`."""
        if len(set(rows.slots)) == len(rows.slots):
            return self._decode(rows, kv)
        return self._prompts(rows, kv)

    def _decode(self, rows: TokenRows, kv: SlabKV) -> Tensor:
        """One token a slot."""
        slabs, covered = kv.slabs, kv.close_ranks()
        places = kv.places(rows.slots)
        length = min(token_bucket(max(rows.positions) + 1), slabs.capacity)
        ran = tuple(index for index, count in enumerate(rows.counts) if count)
        slabs.load(places, rows.tokens, rows.positions, rows.counts, covered)
        slabs.graphs.run((covered, length, ran), partial(self._decoder.step, slabs, covered, length, ran))
        wanted = [places[row] for row in rows.wanted]
        if wanted == list(range(len(wanted))):
            return slabs.logits[: len(wanted)]
        return slabs.logits.index_select(0, self._ids(wanted))

    def _prompts(self, rows: TokenRows, kv: SlabKV) -> Tensor:
        segments: list[Segment] = []
        for row, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            if row and slot == rows.slots[row - 1]:
                segments[-1] = segments[-1]._replace(end=row + 1)
            else:
                segments.append(Segment(kv.places([slot])[0], row, row + 1, position))
        given = self._ids(rows.tokens), self._ids(rows.positions)
        return self._decoder.prompts(kv.slabs, *given, segments, rows.counts, self._ids(rows.wanted)).float()

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _hidden_of(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (rows, hidden) of tokens at positions (rows,)."""
        spec = self._spec
        hidden = spec.embedding.index_select(0, tokens)
        if spec.position_embedding is not None:
            hidden = hidden + spec.position_embedding.index_select(0, positions + spec.position_offset)
        return hidden

    def _bind(self) -> None:
        """Take the weights' addresses; steps recorded with others are of no use."""
        self._decoder = DenseDecoder(self._spec.layers, self._spec.head, self._hidden_of)
        for slabs in self._users:
            slabs.graphs.clear()

    def _new_slabs(self) -> Slabs:
        attention = self._spec.layers[0].attention
        shape = self.num_layers, attention.kv_heads, attention.head_dim
        return Slabs(shape, self.vocab_size, self.dtype, self.device, self._new_recorder)
