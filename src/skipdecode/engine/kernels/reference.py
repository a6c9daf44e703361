"""The kernels' work in plain torch: for machines without a compiler, other devices, and as the kernels' test oracle."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.engine.kernels.spec import (
    AttentionCall,
    AttentionSpec,
    LayerSpec,
    LinearCall,
    LinearSpec,
    StackCall,
    StackInput,
)
from skipdecode.engine.kernels.torch_ops import apply_linear, heads_of, plain_weight, rotation_at

__all__ = ["TorchBackend"]


class TorchBackend:
    """Activations in the weights' type, as transformers has them.

    Parameters
    ----------
    dtype : torch.dtype
        Of the model: quantised weights become this.
    """

    name = "torch"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """The weights' own."""
        return weight_dtype

    def linear(self, spec: LinearSpec) -> LinearCall:
        """See `Backend`; quantised weights are kept dequantised."""
        weight = plain_weight(spec, self._dtype)

        def call(x: Tensor, out: Tensor, rows: int, accumulate: bool) -> None:
            y = apply_linear(spec, x[:rows], weight)
            if accumulate:
                out[:rows] += y
            else:
                out[:rows] = y

        return call

    def attention(self, spec: AttentionSpec) -> AttentionCall:
        """See `Backend`."""

        def call(
            qkv: Tensor, out: Tensor, pages: Tensor, table: Tensor, slots: Tensor, positions: Tensor, rows: int
        ) -> None:
            device = qkv.device
            where, at = slots[:rows].to(device, torch.long), positions[:rows].to(device, torch.long)
            q, k, v = heads_of(spec, qkv[:rows], rotation_at(spec, at, qkv.dtype))
            size = pages.shape[3]
            ids = table.to(device, torch.long)
            pages[ids[where, at // size], 0, :, at % size] = k.to(pages.dtype)
            pages[ids[where, at // size], 1, :, at % size] = v.to(pages.dtype)
            result = out[:rows].view(rows, spec.heads, spec.head_dim)
            # Rows of one slot share its keys: a prompt is one call with many queries, a step one with many slots.
            for members in _groups(slots[:rows].tolist()):
                chosen = torch.tensor(members, device=device)
                result[chosen] = _attend(spec, q[chosen], pages, ids, where[chosen], at[chosen])

        return call

    def stack(self, layers: list[LayerSpec]) -> StackCall:
        """See `Backend`."""
        calls = [
            (
                self.linear(layer.qkv),
                self.attention(layer.attention),
                self.linear(layer.out),
                self.linear(layer.mlp_in),
                self.linear(layer.mlp_out),
            )
            for layer in layers
        ]
        first = layers[0]
        widths = first.qkv.weight.shape[0], first.out.weight.shape[1], first.mlp_in.weight.shape[0]

        def call(given: StackInput) -> None:
            x = given.hidden
            qkv, attended, wide = (x.new_empty(x.shape[0], width) for width in widths)
            for (project, attend, out, mlp_in, mlp_out), table, n in zip(calls, given.table, given.counts, strict=True):
                if n:
                    project(x, qkv, n, False)
                    attend(qkv, attended, given.pages, table, given.slots, given.positions, n)
                    out(attended, x, n, True)
                    mlp_in(x, wide, n, False)
                    mlp_out(wide, x, n, True)

        return call


def _groups(slots: list[int]) -> list[list[int]]:
    """Rows of slots with several rows, slot by slot; then all rows that are alone in their slot."""
    rows: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        rows.setdefault(slot, []).append(row)
    alone = [r[0] for r in rows.values() if len(r) == 1]
    return [r for r in rows.values() if len(r) > 1] + ([alone] if alone else [])


def _attend(spec: AttentionSpec, q: Tensor, pages: Tensor, ids: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """q (n, heads, dim): n rows of one slot, or of n slots."""
    size = pages.shape[3]
    length = int(positions.max()) + 1
    shared = bool((slots == slots[0]).all())
    held = pages[ids[slots[:1] if shared else slots, : -(-length // size)]]  # (slots, pages, 2, kv_heads, size, dim)
    keys, values = held.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., :length, :].to(q.dtype).unbind(0)
    column = torch.arange(length, device=q.device)
    mask = column <= positions[:, None]
    if spec.window:
        mask &= column > positions[:, None] - spec.window
    if shared:
        query, mask = q.transpose(0, 1).unsqueeze(0), mask[None, None]
    else:
        query, mask = q.unsqueeze(2), mask[:, None, None]
    # Columns past a row's end may hold anything, NaN too, which neither a mask nor a factor of zero undoes.
    unseen = ~mask.any(2).unsqueeze(-1)
    keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
    repeat = spec.heads // spec.kv_heads
    keys, values = (t.repeat_interleave(repeat, dim=1) for t in (keys, values))
    y = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    return y[0].transpose(0, 1) if shared else y.squeeze(2)
