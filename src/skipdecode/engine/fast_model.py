"""A decoder's forward over token rows, with nothing between the kernels but what they pass on.

A step is a list of tokens, each with its slot (sequence) and position; prompts and generated tokens are alike. Rows
come sorted by falling depth, so that the rows of a layer are the first ones: a layer reads its weights once for exactly
the rows that need it, and mixed ages cost no gather.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from skipdecode.engine.kernels.native import NativeKernels
from skipdecode.engine.kernels.quantize import Quantization
from skipdecode.engine.kernels.spec import ModelSpec, StackInput
from skipdecode.engine.kv import KV, PagedKV
from skipdecode.engine.model_spec import read_model
from skipdecode.engine.weights import QuantizedWeights, move_into_one_block
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

__all__ = ["FastModel", "NativeModel", "TokenRows"]


class TokenRows(NamedTuple):
    """The rows of one forward: each token's id, its row of the KV store (slot) and its position in its text.

    `counts` says how many rows, from the first, run each layer, `wanted` of which rows logits are wanted.
    """

    tokens: list[int]
    slots: list[int]
    positions: list[int]
    counts: list[int]
    wanted: list[int]


class FastModel(ABC):
    """The fast path of a transformers model. Made by `open_model`.

    Parameters
    ----------
    model : PreTrainedModel
        A causal LM of an architecture in `skipdecode.engine.model_spec.READERS`. Its projection weights are fused
        and moved in place; it stays usable.

    Raises
    ------
    UnfitModelError
        If the fast path does not cover the model.

    Attributes
    ----------
    kernel : {"native", "dense"}
        What computes: the C++ kernels or torch operators.
    hint : str
        Why the C++ kernels are not used; "" if they are, or were not wanted.
    quantization : {"int8", "int4"} or None
        Type of the weights that are read, where these are quantised copies.
    """

    kernel: ClassVar[str]
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
    def new_kv(self) -> KV:
        """An empty KV store of this model's geometry, for its forwards."""

    @abstractmethod
    def forward(self, rows: TokenRows, kv: Any) -> Tensor:
        """Logits (wanted rows, vocabulary), fp32, valid until the next forward; `kv` is from `new_kv`."""

    @abstractmethod
    def _bind(self) -> None:
        """Take the weights' addresses."""

    @property
    def captures_graphs(self) -> bool:
        """Whether the first run of a step takes longer than those after it."""
        return False

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

    def wait(self) -> None:
        """Until the device has done its forwards, so that their time can be told."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @property
    def name(self) -> str:
        """The engine on these weights: "fast", "fast-int8" or "fast-int4"."""
        return "fast" if self.quantization is None else f"fast-{self.quantization}"

    def _read(self, positions: int) -> ModelSpec:
        return read_model(self._model, positions)


class NativeModel(FastModel):
    """The fast path on the C++ kernels, which read its type of weights.

    With a `quantization` they read the projections and the output embedding from quantised copies (`kernels.quantize`).
    """

    kernel = "native"

    def __init__(self, model: Any, kernels: NativeKernels, quantization: Quantization | None = None) -> None:
        self.quantization = quantization
        self._quantized = None if quantization is None else QuantizedWeights(quantization)
        self._kernels = kernels
        if quantization is None:
            move_into_one_block(model)
        super().__init__(model)
        self._logits = torch.empty(0, self.vocab_size)

    def new_kv(self) -> PagedKV:
        attention = self._spec.layers[0].attention
        return PagedKV(self.num_layers, attention.kv_heads, attention.head_dim, self.dtype, self.device)

    def forward(self, rows: TokenRows, kv: PagedKV) -> Tensor:
        count = len(rows.tokens)
        hidden = self._embed(rows)
        slots = torch.tensor(rows.slots, dtype=torch.int32)
        positions = torch.tensor(rows.positions, dtype=torch.int32)
        self._stack(StackInput(hidden, kv.pages, kv.table, slots, positions, rows.counts))
        wanted = len(rows.wanted)
        if wanted != count or rows.wanted[-1] != count - 1:
            hidden = hidden[rows.wanted]
        if wanted > len(self._logits):
            self._logits = torch.empty(wanted, self.vocab_size)
        self._head(hidden, self._logits, wanted, False)
        return self._logits[:wanted]

    def _read(self, positions: int) -> ModelSpec:
        spec = super()._read(positions)
        return spec if self._quantized is None else self._quantized.apply(spec)

    def _embed(self, rows: TokenRows) -> Tensor:
        return self._spec.embed(torch.tensor(rows.tokens), torch.tensor(rows.positions), torch.float32)

    def _bind(self) -> None:
        self._stack = self._kernels.stack(self._spec.layers)
        self._head = self._kernels.linear(self._spec.head)
