"""Weights of 8 or 4 bits, symmetric: what is stored, and how it is chosen.

int8: one fp32 scale for each output row; a weight is its integer (-127 to 127) times the scale.

int4: one bf16 scale for each 32 columns of a row; a weight is its integer (-8 to 7) times the scale. Scales have five
significant bits, so that every weight is exact in bf16. 4.5 bits a weight, as in llama.cpp's Q4_0. A group's scale is
the one of a few around its largest weight that leaves the least squared error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["QUANTIZATIONS", "Quantization", "QuantizedWeight", "quantize"]

Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")

_STEP = 64  # columns that the kernels read at once; rows are padded to whole steps
_GROUP = 32
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_CHUNK = 2**22  # weights quantised at a time: bounds the fp32 copies


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantised (out, in) matrix.

    Parameters
    ----------
    kind : {"int8", "int4"}
    shape : tuple of int
        (out, in).
    codes : torch.Tensor
        uint8. int8: (out, padded in), two's complement. int4: (out, padded in / 2); 32 bytes hold 64 columns, the
        first 32 in the low halves, plus 8. Padding is zeros (of int4: code 8).
    scales : torch.Tensor
        int8: (out,) fp32. int4: (out, padded in / 32) bf16.
    """

    kind: Quantization
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The (out, in) matrix; int4 is exact in bf16 and fp32, int8 in neither (its products are rounded)."""
        rows, columns = self.shape
        if self.kind == "int8":
            return (self.codes.view(torch.int8)[:, :columns] * self.scales[:, None]).to(dtype)
        halves = self.codes.view(rows, -1, _GROUP)
        codes = torch.stack((halves & 15, halves >> 4), dim=2).view(rows, -1, _GROUP)
        wide = (codes.float() - 8) * self.scales.float()[:, :, None]
        return wide.flatten(1)[:, :columns].to(dtype)


def quantize(weight: Tensor, kind: Quantization) -> QuantizedWeight:
    """Quantise a (out, in) matrix; it is not changed."""
    rows = max(1, _CHUNK // weight.shape[1])
    one = _int8 if kind == "int8" else _int4
    codes, scales = zip(*(one(part.detach().float()) for part in torch.split(weight, rows)), strict=True)
    return QuantizedWeight(kind, (weight.shape[0], weight.shape[1]), torch.cat(codes), torch.cat(scales))


def _padded(weight: Tensor) -> Tensor:
    missing = -weight.shape[1] % _STEP
    return torch.nn.functional.pad(weight, (0, missing)) if missing else weight


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1).clamp_min(1e-30) / 127
    codes = torch.round(weight / scale[:, None]).to(torch.int8)
    return _padded(codes).view(torch.uint8).contiguous(), scale


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = _padded(weight).view(weight.shape[0], -1, _GROUP)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best_error = torch.full_like(largest, torch.inf)
    best_scale, best_codes = torch.zeros_like(largest), torch.zeros_like(groups)
    for end in (-8, 7):  # the largest weight at either end of the range
        for shrink in _SHRINK:
            scale = _five_bits(largest * (shrink / end))
            codes = torch.round(groups / scale).clamp_(-8, 7).nan_to_num_(0.0)
            error = (codes * scale - groups).square_().sum(2, keepdim=True)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale = torch.where(better, scale, best_scale)
            best_codes = torch.where(better, codes, best_codes)
    codes = (best_codes + 8).to(torch.uint8).view(weight.shape[0], -1, 2, _GROUP)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1), best_scale.squeeze(2).bfloat16()


def _five_bits(scale: Tensor) -> Tensor:
    """Rounded to five significant bits."""
    fraction, exponent = torch.frexp(scale)
    return torch.ldexp(torch.round(fraction * 32), exponent - 5)
