"""A decoder's forward over token rows, with nothing between the kernels but two buffers.

A step is a list of tokens, each with its slot (sequence) and position; prompts and generated tokens are alike. Rows
come sorted by falling depth, so that the rows of a layer are the first ones: a layer reads its weights once for exactly
the rows that need it, and mixed ages cost no gather.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipdecode.engine.compaction import compact
from skipdecode.engine.kernels import KernelChoice, backend_for
from skipdecode.engine.kernels.quantize import QUANTIZATIONS, Quantization
from skipdecode.engine.kernels.spec import StackInput
from skipdecode.engine.kv import KV, PagedKV
from skipdecode.engine.model_spec import ModelSpec, read_model, weights_of
from skipdecode.engine.quantized import QuantizedWeights
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

__all__ = ["FastModel", "TokenRows"]


class TokenRows(NamedTuple):
    """The rows of one forward; lists of one length.

    Parameters
    ----------
    tokens, slots, positions : list of int
        Token id, row of the KV table, position in its text.
    counts : list of int
        For each layer: the number of rows, from the first, that run it.
    wanted : list of int
        Rows whose logits are wanted.
    """

    tokens: list[int]
    slots: list[int]
    positions: list[int]
    counts: list[int]
    wanted: list[int]


class FastModel:
    """The fast path of a transformers model.

    Parameters
    ----------
    model : PreTrainedModel
        A causal LM of an architecture in `skipdecode.engine.model_spec.READERS`. Its projection weights are fused
        and moved in place; it stays usable.
    kernel : {"auto", "native", "torch"}
        The C++ kernels where possible, only those, or torch.
    quantization : {"int8", "int4"}, optional
        Read the projections and the output embedding from quantised copies (see `kernels.quantize`); by default, the
        model's own weights.

    Raises
    ------
    UnfitModelError
        If the fast path does not cover the model.
    UsageError
        If `quantization` is not known.

    Attributes
    ----------
    hint : str
        Why the C++ kernels are not used; "" if they are.
    quantization : {"int8", "int4"} or None
        As given.
    """

    def __init__(self, model: Any, kernel: KernelChoice = "auto", quantization: Quantization | None = None) -> None:
        if quantization is not None and quantization not in QUANTIZATIONS:
            raise UsageError(f"quantization {quantization!r} is not known: accepted are {', '.join(QUANTIZATIONS)}")
        self._model = model
        self.quantization = quantization
        self._quantized = None if quantization is None else QuantizedWeights(quantization)
        read_model(model, positions=1)  # refuses what does not fit before anything is moved
        weight = model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
        self._backend, self.hint = backend_for(self.device, self.dtype, kernel)
        self.kernel = self._backend.name
        if self.kernel == "native" and quantization is None:
            compact(model)
        self._spec = self._read(2048)
        self.num_layers = len(self._spec.layers)
        self.vocab_size = self._spec.head.weight.shape[0]
        self._positions = 2048
        self._rows = 0
        self._kind = self._backend.activation_dtype(self.dtype)
        self._logits = torch.empty(0, self.vocab_size, dtype=self._kind, device=self.device)
        self._bind()

    def new_kv(self) -> KV:
        """An empty KV store of this model's geometry, for its forwards."""
        attention = self._spec.layers[0].attention
        return PagedKV(self.num_layers, attention.kv_heads, attention.head_dim, self.dtype, self.device)

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

    def forward(self, rows: TokenRows, kv: Any) -> Tensor:
        """Logits (wanted rows, vocabulary), fp32, valid until the next forward; `kv` is from `new_kv`."""
        count = len(rows.tokens)
        if count > self._rows:
            self._allocate(count)
        hidden = self._embed(rows)
        slots = torch.tensor(rows.slots, dtype=torch.int32)
        positions = torch.tensor(rows.positions, dtype=torch.int32)
        self._stack(StackInput(hidden, kv.pages, kv.table, slots, positions, rows.counts))
        wanted = len(rows.wanted)
        if wanted != count or rows.wanted[-1] != count - 1:
            hidden = hidden[torch.tensor(rows.wanted, device=self.device)]
        if wanted > len(self._logits):
            self._logits = torch.empty(wanted, self.vocab_size, dtype=self._kind, device=self.device)
        self._head(hidden, self._logits, wanted, False)
        return self._logits[:wanted].float()

    def wait(self) -> None:
        """Until the device has done its forwards, so that their time can be told."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @property
    def records(self) -> bool:
        """Whether the first run of a step takes longer than those after it."""
        return False

    @property
    def name(self) -> str:
        """Of the engine on these weights: "fast", "fast-int8" or "fast-int4"."""
        return "fast" if self.quantization is None else f"fast-{self.quantization}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layers' projections and the output embedding, as they are read."""
        return sum(weight.nbytes for weight in weights_of(self._spec))

    def _read(self, positions: int) -> ModelSpec:
        spec = read_model(self._model, positions)
        return spec if self._quantized is None else self._quantized.apply(spec)

    def _embed(self, rows: TokenRows) -> Tensor:
        spec = self._spec
        ids = torch.tensor(rows.tokens, device=self.device)
        hidden = self._hidden[: len(rows.tokens)]
        hidden.copy_(spec.embedding.index_select(0, ids))
        if spec.position_embedding is not None:
            at = torch.tensor(rows.positions, device=self.device) + spec.position_offset
            hidden += spec.position_embedding.index_select(0, at)
        return hidden

    def _bind(self) -> None:
        """Prepare the calls; the weights' addresses are taken here."""
        spec: ModelSpec = self._spec
        self._stack = self._backend.stack(spec.layers)
        self._head = self._backend.linear(spec.head)

    def _allocate(self, rows: int) -> None:
        width = self._spec.embedding.shape[1]
        self._hidden = torch.empty(rows, width, dtype=self._kind, device=self.device)
        self._rows = rows
