"""The package's own engines as peers: the fast one, and the one on transformers' forward with gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from skipdecode.engine.base import Engine
from skipdecode.engine.batch import TokenRows
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kernels.quantize import Quantization
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.engine.kv import PagedKV
from skipdecode.errors import UnfitModelError, UsageError
from skipdecode.models.plan import PROMPT
from skipdecode.performance.bench.peers import Peer, Rows, replaced
from skipdecode.performance.cost import CostModel, StepCost
from skipdecode.schedule import Schedule

__all__ = ["FastPeer", "GatedPeer", "repeat_first"]


class FastPeer(Peer):
    """The fast engine.

    Parameters
    ----------
    fast : FastModel, optional
        Its fast path, where it is open already.
    quantization : {"int8", "int4", "w8a8"}, optional
        Type of the weights that the fast path is to read. Default: the model's own.

    Raises UsageError if the model has no fast path.
    """

    skips = True

    def __init__(self, model: Any, fast: FastModel | None = None, quantization: Quantization | None = None) -> None:
        super().__init__(model)
        self.name = "fast" if quantization is None else f"fast-{quantization}"
        self.weights = quantization or self.weights
        self.arithmetic = "w8a8" if quantization == "w8a8" else self.arithmetic
        try:
            self.fast = open_model(model, quantization=quantization) if fast is None else fast
        except UnfitModelError as e:
            raise UsageError(
                f"the engine {self.name!r} does not cover this model: {e}; leave it out of --engines"
            ) from None

    def engine(self, schedule: Schedule, rows: Rows) -> FastEngine:
        """See `Peer`; all prompts in one forward, so that rows that begin together stay together."""
        self.reads(1)  # which makes the 8-bit copy of the head, that no step is timed with it
        return FastEngine(self.fast, schedule, max_rows=rows.batch, prompt_tokens=rows.batch * rows.prompt)

    @contextmanager
    def made_up(self, engine: Engine) -> Iterator[None]:
        """See `Peer`: zeros."""
        forward = self.fast.forward

        def made_up(rows: TokenRows, kv: PagedKV) -> torch.Tensor | Candidates:
            if len(rows.wanted) == len(rows.tokens):
                return forward(rows, kv)
            kv.fill()
            return torch.zeros(len(rows.wanted), self.fast.vocab_size)

        with replaced([(self.fast, "forward", made_up)]):
            yield

    def reads(self, batch: int) -> CostModel:
        """See `Peer`; of the weights as the engine holds them."""
        spec, geometry = self.fast._spec, self._geometry
        layers = sum(_bytes(linear) for x in spec.layers for linear in (x.qkv, x.out, x.mlp_in, x.mlp_out))
        rows = batch * spec.embedding.shape[1] * spec.embedding.element_size()
        head = _bytes(spec.head)
        head += self.fast.head.bytes_read(batch) - spec.head.weight.nbytes
        step = StepCost(batch, head + rows, layers / geometry.num_layers, geometry.kv_bytes_per_token())
        return replace(super().reads(batch), steps=(step,))


class GatedPeer(Peer):
    """transformers' forward under the schedule."""

    name = "gated"
    skips = True

    def engine(self, schedule: Schedule, rows: Rows) -> GatedEngine:
        return GatedEngine(self.model, schedule, max_rows=rows.batch)

    @contextmanager
    def made_up(self, engine: Any) -> Iterator[None]:
        """See `Peer`: the keys and values of the first token, over and over."""
        logits: Callable[[Any], torch.Tensor] = engine._logits

        def made_up(wave: Any) -> torch.Tensor:
            if wave.position:
                return logits(wave)
            ids, mask = wave.ids, wave.mask
            wave.ids, wave.mask = ids[:, :1], mask[:, :1]
            found = logits(wave)
            wave.ids, wave.mask = ids, mask
            repeat_first(wave.cache, ids.shape[1] - 1)
            wave.cache.advance([PROMPT] * (ids.shape[1] - 1))
            return found

        with replaced([(engine, "_logits", made_up)]):
            yield


def repeat_first(cache: Any, times: int) -> None:
    """Append the keys and values of the one token that a cache holds."""
    for index, layer in enumerate(cache.layers):
        if times:
            first = (part[:, :, :1].expand(-1, -1, times, -1) for part in (layer.keys, layer.values))
            cache.update(*first, index)


def _bytes(spec: LinearSpec) -> int:
    vectors = (spec.bias, spec.gamma, spec.beta)
    return spec.weight.nbytes + sum(t.nbytes for t in vectors if t is not None)
