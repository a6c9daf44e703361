"""A decoder's forward over token rows, as one call of the C++ kernels.

A forward is a list of tokens, each with its slot (sequence) and position; prompt tokens and generated tokens share it.
Each token runs a layer, only stores keys and values in it, or skips it. The order of the rows (`token_rows`) makes the
rows that run a layer neighbours. A layer therefore reads its weights once for exactly the rows that need it, and no
gather is necessary.

The weights are the model's own, moved into one block of memory, or quantised copies. Separate tensors of a few
megabytes contain few huge pages. One block, in the order of a step's reads, consists almost entirely of huge pages. The
model's parameters become views of the block. Their old memory is freed tensor by tensor. The token embedding is not
quantised, even if it is tied to the output embedding, because only single rows of it are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.common.environment import read_in_turn
from skipdecode.common.types import PreTrainedModel
from skipdecode.engine.drafts import MOST_DRAFTS, Planner
from skipdecode.engine.kernels.head import Candidates, NativeHead
from skipdecode.engine.kernels.native import NativeKernels, NativeStack, native_kernels
from skipdecode.engine.kernels.spec import FitSpec, LinearSpec, ModelSpec, StackInput
from skipdecode.engine.kernels.weights import Arena, Quantization, QuantizedWeight, quantize, quantized_sizes
from skipdecode.engine.kv import PAGE_TOKENS, PagedKV
from skipdecode.engine.model_reader import matrices, read_model
from skipdecode.engine.requests import Request
from skipdecode.engine.rows import TokenRows
from skipdecode.errors import UnfitModelError, UsageError
from skipdecode.models.families import check_schedule
from skipdecode.models.fit import Fit, fit_of
from skipdecode.models.fit_maps import EPSILON
from skipdecode.schedule import Schedule


class FastModel:
    """The fast path of a transformers model, on the C++ kernels. Made by `open_model`.

    `model`: a causal LM of a family in `skipdecode.engine.model_reader.READERS`, on the CPU; its projection weights are
    fused and moved in place, and it stays usable. `quantization`: the kernels read the projections and the output
    embedding from quantised copies (`kernels.weights`).

    Attribute `spec`: the weights and sizes that the kernels read.

    Raises UnfitModelError if the fast path does not cover the model.
    """

    def __init__(
        self, model: PreTrainedModel, kernels: NativeKernels, quantization: Quantization | None = None
    ) -> None:
        self.quantization = quantization
        self._quantized = None if quantization is None else quantized_copies(model, quantization)
        self._kernels, self._model, self.fit = kernels, model, fit_of(model)
        if quantization is None:
            move_into_one_block(model)
        self.dtype = model.get_input_embeddings().weight.dtype
        self._positions = 2048
        self.spec = self._read(self._positions)
        self.planner = Planner()
        self.num_layers = len(self.spec.layers)
        self._attention = next(x.attention for x in self.spec.layers if x.attention.taps is None)
        self.rings = frozenset(n for n, x in enumerate(self.spec.layers) if x.attention.taps is not None)
        self.most_drafts = MOST_DRAFTS if not self.rings else min(MOST_DRAFTS, self._rejectable())
        self.vocab_size = self.spec.head.weight.shape[0]
        self.head = NativeHead(kernels, self.spec.head)
        self._bridges = {} if self.fit is None else _bridges(self.fit, self.dtype)
        self._stacks: dict[tuple[int, ...] | None, NativeStack] = {}
        self._stack_for(None)  # raises what does not fit together

    @property
    def name(self) -> str:
        """Name of the engine with these weights: "fast", or "fast-int8" and the like with quantised weights."""
        return "fast" if self.quantization is None else f"fast-{self.quantization}"

    @property
    def context_tokens(self) -> int:
        """Number of preceding tokens that a prompt map takes as input."""
        return 0 if self.fit is None else self.fit.context_tokens

    def check(self, schedule: Schedule, requests: Iterable[Request] = ()) -> None:
        """Raise ScheduleError if the model cannot run a schedule, UsageError for tokens outside its vocabulary."""
        check_schedule(self._model.config, schedule)
        for request in requests:
            request.check_vocabulary(self.vocab_size)

    def new_kv(self) -> PagedKV:
        """An empty KV store with the sizes of this model."""
        attention = self._attention
        return PagedKV(self.num_layers, attention.kv_heads, attention.head_dim, self.dtype, rings=self.rings)

    def _rejectable(self) -> int:
        """Tokens that may be taken back without a convolution's earlier inputs having left its page.

        Raises UnfitModelError if a page does not hold the inputs of one output.
        """
        taps = next(taps for x in self.spec.layers if (taps := x.attention.taps) is not None)
        room = 2 * self._attention.kv_heads * self._attention.head_dim * PAGE_TOKENS // taps.shape[1]
        if (left := room - (len(taps) - 1) + 1) < 1:
            raise UnfitModelError("its convolutions are too wide for the fast path")
        return left

    def ensure_positions(self, count: int) -> None:
        """Prepare for texts of `count` tokens; raises UsageError if the model has fewer learned positions."""
        most = self.spec.max_positions
        if most is not None and count > most:
            raise UsageError(f"prompt and new tokens together are {count}, but this model has {most} positions")
        if count > self._positions and most is None:
            self._positions = max(count, 2 * self._positions)
            self.spec, self._stacks = self._read(self._positions), {}

    def forward(self, rows: TokenRows, kv: PagedKV) -> Tensor | Candidates:
        """Compute logits (rows with logits, vocabulary), fp32, valid until the next forward; `kv` is from `new_kv`.

        With `rows.tops` the result may be `Candidates`: only the tokens that are enough for these.
        """
        hidden = self.spec.embed(torch.tensor(rows.tokens), torch.tensor(rows.positions), torch.float32)
        slots = torch.tensor(rows.slots, dtype=torch.int32)
        positions = torch.tensor(rows.positions, dtype=torch.int32)
        context = None if rows.context_rows is None else torch.tensor(rows.context_rows, dtype=torch.int32)
        stack_input = StackInput(hidden, kv.pages, kv.table, slots, positions, rows.layers, rows.bridged, context)
        self._stack_for(rows.prompt)(stack_input)
        hidden = hidden[len(rows.tokens) - rows.num_logits :]
        if (cap := self.spec.logit_cap) is not None:
            logits = self.head(hidden, None)
            return logits.div_(cap).tanh_().mul_(cap) if isinstance(logits, Tensor) else logits
        return self.head(hidden, rows.tops)

    def _stack_for(self, prompt: tuple[int, ...] | None) -> NativeStack:
        """The layers with the fit's maps for prompts that run the layers `prompt`; without maps if it has none."""
        if self.fit is None or prompt not in self.fit.prompt_sets:
            prompt = None
        if prompt not in self._stacks:
            self._stacks[prompt] = self._kernels.stack(self.spec.layers, self._fit_spec(prompt))
        return self._stacks[prompt]

    def _fit_spec(self, prompt: tuple[int, ...] | None) -> FitSpec | None:
        """The fit for the kernels, with the maps for prompts that run the layers `prompt`."""
        if (fit := self.fit) is None:
            return None
        maps, first, ones = {}, {}, torch.ones(fit.hidden_size)
        # Without preceding tokens the maps read the states directly.
        norm: dict[str, Any] = {} if fit.context_tokens else {"prologue": "rms_norm", "gamma": ones}
        prompt_maps = {} if prompt is None else fit.prompt_maps(prompt)
        for layer, prompt_map in prompt_maps.items():
            weight = prompt_map.weight.detach().to(self.dtype).contiguous()
            maps[layer] = LinearSpec(weight, prompt_map.bias, eps=EPSILON, **norm)
            first[layer] = prompt_map.first
        return FitSpec(self._bridges, maps, first, fit.context_tokens)

    def _read(self, positions: int) -> ModelSpec:
        if self._quantized is None:
            return read_model(self._model, positions)
        copies = iter(self._quantized)
        return read_model(self._model, positions, lambda parts: next(copies))


def _bridges(fit: Fit, dtype: torch.dtype) -> dict[int, tuple[LinearSpec, LinearSpec]]:
    """The bridges of a fit for the kernels, with weights in the model's dtype."""
    bridges, ones = {}, torch.ones(fit.hidden_size)
    for layer, bridge in fit.bridges_over(range(fit.num_layers)).items():
        # A bridge of rank 0 is its bias: a row of zeros, for the kernels take no bridge without weights.
        no_rank = (0, int(not len(bridge.down)))
        down, up = functional.pad(bridge.down, (0, 0, *no_rank)), functional.pad(bridge.up, no_rank)
        bridges[layer] = (
            LinearSpec(down.detach().to(dtype).contiguous(), None, "rms_norm", ones, eps=EPSILON),
            LinearSpec(up.detach().to(dtype).contiguous(), bridge.bias),
        )
    return bridges


def open_model(model: PreTrainedModel, quantization: Quantization | None = None) -> FastModel:
    """The fast path of a model; arguments as in `FastModel`.

    Raises UnfitModelError if the fast path does not cover the model, or the C++ kernels cannot run here; UsageError if
    this CPU does not support the quantization.
    """
    matrices(model)  # refuses what does not fit before kernels are built
    weight = model.get_input_embeddings().weight
    kernels, reason = native_kernels(weight.device, weight.dtype)
    if kernels is None:
        raise UnfitModelError(reason)
    if quantization == "w8a8" and not kernels.multiplies_bytes:
        raise UsageError(
            "w8a8 weights need a CPU with AVX512_VNNI, with AVX2 and no AVX-512, or an ARM CPU with dotprod: "
            "give int8 weights"
        )
    return FastModel(model, kernels, quantization)


def move_into_one_block(model: PreTrainedModel) -> None:
    """Move the projections and the output embedding of a model into one block; a second call does nothing.

    Parameters that are read as one matrix become neighbours.
    """
    parameters = defaultdict(list)
    for parameter in model.parameters():
        # Transposed parameters stay, because transformers saves them only from separate memory.
        if parameter.is_contiguous():
            parameters[parameter.data_ptr()].append(parameter)
    moved = {parts[0].data_ptr(): parts for parts in matrices(model) if all(p.data_ptr() in parameters for p in parts)}
    if len({part.untyped_storage().data_ptr() for parts in moved.values() for part in parts}) == 1:
        return
    first = next(model.parameters())
    arena = Arena((sum(part.nbytes for part in parts) for parts in moved.values()), first.device)

    def moves() -> Iterator[tuple[Tensor, Tensor]]:
        for parts in moved.values():
            rest = arena.take(sum(part.nbytes for part in parts)).view(first.dtype).view(-1, parts[0].shape[1])
            for part in parts:
                target, rest = rest[: len(part)], rest[len(part) :]
                yield target, part.detach()

    for target, weight in read_in_turn(moves()):
        target.copy_(weight)
        for parameter in parameters[weight.data_ptr()]:
            parameter.data = target


def quantized_copies(model: PreTrainedModel, kind: Quantization) -> list[QuantizedWeight]:
    """Quantised copies of a model's `matrices`, one for each, in their order; the model keeps its own."""
    read = matrices(model)
    shapes = {parts[0].data_ptr(): (sum(map(len, parts)), parts[0].shape[1]) for parts in read}
    sizes = (size for shape in shapes.values() for size in quantized_sizes(shape, kind))
    arena, copies = Arena(sizes, next(model.parameters()).device), dict[int, QuantizedWeight]()
    for parts, part in read_in_turn((group, matrix) for group in read for matrix in group):
        if part is parts[-1] and (address := parts[0].data_ptr()) not in copies:
            copies[address] = quantize(torch.cat(parts) if len(parts) > 1 else part, kind, arena.take)
    return [copies[parts[0].data_ptr()] for parts in read]
