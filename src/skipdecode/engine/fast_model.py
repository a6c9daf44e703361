"""A decoder's forward over token rows, with nothing between the kernels but what they pass on.

A step is a list of tokens, each with its slot (sequence) and position; prompts and generated tokens are alike. Rows
come sorted by falling depth, so that the rows of a layer are the first ones: a layer reads its weights once for exactly
the rows that need it, and mixed ages cost no gather.

The C++ kernels compute on CPUs (`NativeModel`), torch operators elsewhere (`DenseModel`): decode steps of fixed shape
over a static KV cache, captured as CUDA graphs on GPUs, and prompts operator by operator. `open_model` chooses.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from skipdecode.engine.feeds import TokenRows
from skipdecode.engine.kernels import KernelChoice, native_kernels
from skipdecode.engine.kernels.dense import DenseDecoder, Segment
from skipdecode.engine.kernels.graphs import GraphCapture, capture_for
from skipdecode.engine.kernels.head import Candidates, NativeHead
from skipdecode.engine.kernels.native import NativeKernels
from skipdecode.engine.kernels.quantize import QUANTIZATIONS, Quantization
from skipdecode.engine.kernels.spec import ModelSpec, StackInput
from skipdecode.engine.kernels.static_cache import StaticCache, token_bucket
from skipdecode.engine.kv import KV, PagedKV
from skipdecode.engine.model_spec import read_model
from skipdecode.engine.prefix import PrefixKV
from skipdecode.engine.static_kv import StaticKV
from skipdecode.engine.weights import QuantizedWeights, move_into_one_block
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule
from skipdecode.schedule.levels import fewest_levels

__all__ = ["DenseModel", "FastModel", "NativeModel", "open_model"]


class FastModel(ABC):
    """The fast path of a transformers model. Made by `open_model`.

    Parameters
    ----------
    model : PreTrainedModel
        A causal LM of a family in `skipdecode.engine.model_spec.READERS`. Its projection weights are fused
        and moved in place; it stays usable.

    Raises
    ------
    UnfitModelError
        If the fast path does not cover the model.

    Attributes
    ----------
    kernel : {"native", "dense"}
        What computes: the C++ kernels or torch operators.
    has_pages : bool
        Whether keys and values are pages of a few tokens and layers, not whole rows.
    hint : str
        Why the C++ kernels are not used; "" if they are, or were not wanted.
    quantization : {"int8", "int4", "w8a8"} or None
        Type of the weights that are read, where these are quantised copies.
    """

    kernel: ClassVar[str]
    has_pages: ClassVar[bool] = False
    hint: str = ""
    quantization: Quantization | None = None

    def __init__(self, model: Any) -> None:
        self._model = model
        weight = model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
        self._positions = 2048
        self._spec = self._read(self._positions)
        self.num_layers = len(self._spec.layers)
        self.vocab_size = self._spec.head.weight.shape[0]
        self._bind()

    @abstractmethod
    def new_kv(self, prefix_cache: bool = False) -> KV:
        """An empty KV store of this model's geometry, for its forwards; `prefix_cache` needs `has_pages`."""

    @abstractmethod
    def forward(self, rows: TokenRows, kv: Any) -> Tensor | Candidates:
        """Logits (wanted rows, vocabulary), fp32, valid until the next forward; `kv` is from `new_kv`.

        Where `rows.tops` are given, perhaps only the words that are enough for them.
        """

    @abstractmethod
    def _bind(self) -> None:
        """Take the weights' addresses."""

    @property
    def captures_graphs(self) -> bool:
        """Whether the first run of a step takes longer than those after it."""
        return False

    @property
    def shares(self) -> bool:
        """Whether rows that decode are best run in one forward with prompts: not where they are a graph's work."""
        return not self.captures_graphs

    def suited(self, schedule: Schedule) -> Schedule:
        """The schedule that a job is best run under here: as it is, unless distinct budgets cost something."""
        return schedule

    def ensure_positions(self, count: int) -> None:
        """Make ready for texts of `count` tokens; raises UsageError beyond what the model has learned positions for."""
        most = self._spec.max_positions
        if most is not None and count > most:
            raise UsageError(f"prompt and new tokens together are {count}, but this model has {most} positions")
        if count > self._positions and most is None:
            self._positions = max(count, 2 * self._positions)
            self._spec = self._read(self._positions)
            self._bind()

    @property
    def fell_back(self) -> bool:
        """Whether the last forward asked an 8-bit copy of the head, and took the full head."""
        return False

    def wait(self) -> None:
        """Until the device has done its forwards, so that their time can be told."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @property
    def name(self) -> str:
        """The engine on these weights: "fast", with quantised weights "fast-int8" and the like."""
        return "fast" if self.quantization is None else f"fast-{self.quantization}"

    def _read(self, positions: int) -> ModelSpec:
        return read_model(self._model, positions)


class NativeModel(FastModel):
    """The fast path on the C++ kernels, which read its type of weights.

    With a `quantization` they read the projections and the output embedding from quantised copies (`kernels.quantize`).
    """

    kernel = "native"
    has_pages = True
    head: NativeHead
    projects = True  # prompts' tokens but the last, in the top layer; the tests compare without

    def __init__(self, model: Any, kernels: NativeKernels, quantization: Quantization | None = None) -> None:
        self.quantization = quantization
        self._quantized = None if quantization is None else QuantizedWeights(quantization)
        self._kernels = kernels
        if quantization is None:
            move_into_one_block(model)
        super().__init__(model)

    def new_kv(self, prefix_cache: bool = False) -> PagedKV:
        attention = self._spec.layers[0].attention
        kind = PrefixKV if prefix_cache else PagedKV
        return kind(self.num_layers, attention.kv_heads, attention.head_dim, self.dtype, self.device)

    def forward(self, rows: TokenRows, kv: PagedKV) -> Tensor | Candidates:
        hidden = self._embed(rows)
        slots = torch.tensor(rows.slots, dtype=torch.int32)
        positions = torch.tensor(rows.positions, dtype=torch.int32)
        given = StackInput(hidden, kv.pages, kv.table, slots, positions, rows.counts, rows.stored)
        if self.projects and rows.stored is None and len(rows.wanted) < len(rows.tokens):
            hidden = self._wanted_alone_at_the_top(given, rows.wanted)
        else:
            self._stack(given)
            hidden = hidden if len(rows.wanted) == len(rows.tokens) else hidden[rows.wanted]
        return self._head(hidden, rows.tops)

    @property
    def fell_back(self) -> bool:
        return self.head.fell_back

    def _wanted_alone_at_the_top(self, given: StackInput, wanted: list[int]) -> Tensor:
        """Run the stack; returns the hidden states of the wanted rows.

        Nobody reads what the top layer makes of the others: they leave their keys and values there and do not run it.
        """
        top = max(layer for layer, count in enumerate(given.counts) if count)
        below, runs = list(given.counts), given.counts[top]
        below[top] = 0
        self._stack(given._replace(counts=below))
        first = [row for row in wanted if row < runs]
        chosen = set(first)
        order = torch.tensor(first + [row for row in range(runs) if row not in chosen])
        hidden, slots, positions = (each[order] for each in (given.hidden, given.slots, given.positions))
        counts, stored = ([number if i == top else 0 for i in range(self.num_layers)] for number in (len(first), runs))
        self._stack(StackInput(hidden, given.pages, given.table, slots, positions, counts, stored))
        return torch.cat((hidden[: len(first)], given.hidden[wanted[len(first) :]]))

    def _read(self, positions: int) -> ModelSpec:
        spec = super()._read(positions)
        return spec if self._quantized is None else self._quantized.apply(spec)

    def _embed(self, rows: TokenRows) -> Tensor:
        return self._spec.embed(torch.tensor(rows.tokens), torch.tensor(rows.positions), torch.float32)

    def _bind(self) -> None:
        self._stack = self._kernels.stack(self._spec.layers)
        self.head = self._head = NativeHead(self._kernels, self._spec.head, getattr(self, "head", None))


class DenseModel(FastModel):
    """The fast path of a transformers model in torch operators.

    Where steps can be captured, one is for every number of places (powers of two), of columns that attention reads (see
    `skipdecode.engine.kernels.static_cache.token_bucket`) and set of layers that some row runs, when it first comes up.
    `new_capture` makes what captures steps: by default CUDA graphs on GPUs, nothing elsewhere. `hint` says why the C++
    kernels do not serve, where they were wanted.
    """

    kernel = "dense"

    def __init__(self, model: Any, new_capture: Callable[[], GraphCapture] | None = None, hint: str = "") -> None:
        # Kept when their KV store is gone, for the next one: what was captured on them stays of use.
        self._users: dict[StaticCache, weakref.ref[StaticKV]] = {}
        super().__init__(model)
        self.hint = hint
        self._new_capture = new_capture or capture_for(self.device)

    @property
    def captures_graphs(self) -> bool:
        return self._new_capture is not None

    def new_kv(self, prefix_cache: bool = False) -> StaticKV:
        """An empty KV store for this model's forwards, in a static cache that no other store uses."""
        free = next((cache for cache, user in self._users.items() if user() is None), None)
        kv = StaticKV(free or self._new_cache())
        self._users[kv.cache] = weakref.ref(kv)
        return kv

    def suited(self, schedule: Schedule) -> Schedule:
        """The schedule with the fewest budgets that keep 98% of its saving: each takes graphs of its own."""
        return fewest_levels(schedule).schedule

    @torch.inference_mode()
    def forward(self, rows: TokenRows, kv: StaticKV) -> Tensor:
        if len(set(rows.slots)) == len(rows.slots) and rows.stored is None:
            return self._decode(rows, kv)
        return self._prompts(rows, kv)

    def _decode(self, rows: TokenRows, kv: StaticKV) -> Tensor:
        """One token a slot."""
        cache, covered = kv.cache, kv.close_ranks()
        places = kv.places(rows.slots)
        length = min(token_bucket(max(rows.positions) + 1), cache.capacity)
        ran = tuple(index for index, count in enumerate(rows.counts) if count)
        cache.load(places, rows.tokens, rows.positions, rows.counts, covered)
        cache.graphs.run((covered, length, ran), partial(self._decoder.step, cache, covered, length, ran))
        wanted = [places[row] for row in rows.wanted]
        if wanted == list(range(len(wanted))):
            return cache.logits[: len(wanted)]
        return cache.logits.index_select(0, self._ids(wanted))

    def _prompts(self, rows: TokenRows, kv: StaticKV) -> Tensor:
        segments: list[Segment] = []
        for row, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            if row and (slot, position - 1) == (rows.slots[row - 1], rows.positions[row - 1]):
                segments[-1] = segments[-1]._replace(end=row + 1)
            else:
                segments.append(Segment(kv.places([slot])[0], row, row + 1, position))
        given = self._ids(rows.tokens), self._ids(rows.positions)
        stored = rows.stored or rows.counts
        return self._decoder.prompts(kv.cache, *given, segments, rows.counts, stored, self._ids(rows.wanted)).float()

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _bind(self) -> None:
        """Take the weights' addresses; steps captured with others are of no use."""
        self._decoder = DenseDecoder(self._spec)
        for cache in self._users:
            cache.graphs.clear()

    def _new_cache(self) -> StaticCache:
        attention = self._spec.layers[0].attention
        shape = self.num_layers, attention.kv_heads, attention.head_dim
        return StaticCache(shape, self.vocab_size, self.dtype, self.device, self._new_capture)


def open_model(model: Any, kernel: KernelChoice = "auto", quantization: Quantization | None = None) -> FastModel:
    """The fast path.

    Parameters
    ----------
    model : PreTrainedModel
        See `FastModel`.
    kernel : {"auto", "native", "dense"}
        native: the C++ kernels. dense: torch operators, in steps that are captured as graphs on CUDA devices. auto: the
        C++ kernels where they can serve, else dense; its `hint` then says why, except on CUDA devices.
    quantization : {"int8", "int4", "w8a8"}, optional
        See `NativeModel`; only the C++ kernels read such weights.

    Raises
    ------
    UnfitModelError
        If the fast path does not cover the model.
    UsageError
        If the choice is not known or cannot be had here.
    """
    if kernel not in get_args(KernelChoice):
        raise UsageError(f"kernel {kernel!r} is not known: accepted are {', '.join(get_args(KernelChoice))}")
    if quantization not in (None, *QUANTIZATIONS):
        raise UsageError(f"quantization {quantization!r} is not known: accepted are {', '.join(QUANTIZATIONS)}")
    read_model(model, positions=1)  # refuses what does not fit before kernels are built
    weight = model.get_input_embeddings().weight
    if kernel == "dense" or (kernel == "auto" and weight.device.type == "cuda"):
        if quantization is not None:
            raise UsageError(f"{quantization} weights are read on CPUs only, the model is on {weight.device.type}")
        return DenseModel(model)
    kernels, reason = native_kernels(weight.device, weight.dtype)
    if kernels is not None:
        if quantization == "w8a8" and not kernels.multiplies_bytes:
            raise UsageError("w8a8 weights need a CPU that multiplies bytes (AVX512_VNNI): give int8 weights")
        return NativeModel(model, kernels, quantization)
    if quantization is not None:
        raise UsageError(f"{quantization} weights need the fast engine's kernels: {reason}")
    if kernel == "native":
        raise UsageError(reason)
    return DenseModel(model, hint=reason)
