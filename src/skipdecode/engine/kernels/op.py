"""The skinny GEMM as a torch operator, `torch.ops.skipdecode.skinny_linear`, so that torch.compile can trace around it.

The engine does not go through it: torch's dispatcher costs several times what a direct call does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipdecode.engine.kernels import backend_for
from skipdecode.engine.kernels.spec import LinearSpec

__all__ = ["skinny_linear"]


@torch.library.custom_op("skipdecode::skinny_linear", mutates_args=())
def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for a few rows.

    Parameters
    ----------
    x : torch.Tensor
        (rows, in), fp32.
    weight : torch.Tensor
        (out, in), bf16 or fp32, contiguous.
    bias : torch.Tensor, optional
        (out,).

    Returns
    -------
    torch.Tensor
        (rows, out), fp32.
    """
    backend, _ = backend_for(x.device, weight.dtype)
    kind = backend.activation_dtype(weight.dtype)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=kind, device=x.device)
    backend.linear(LinearSpec(weight.contiguous(), bias))(x.to(kind).contiguous(), out, x.shape[0], False)
    return out.float()


@skinny_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
