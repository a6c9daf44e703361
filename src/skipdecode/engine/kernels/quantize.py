"""Quantised weights of 8 or 4 bits.

int8: each output row has one fp32 scale. A weight is its integer (-127 to 127) times the scale.

w8a8: the integers and scales of int8, in the order in which a CPU multiplies bytes by bytes. Activations are rounded to
127ths of the largest in their row. This is the same in every step, so a row does not depend on its batch.

int4: each group of 32 columns of a row has one 32-bit word. Its lower half is the scale in bf16. The whole word, read
as fp32, is the offset. A weight is its integer (0 to 15) times the scale plus the offset, truncated to bf16, so it is
exact in bf16. A weight takes 5 bits in all, as in llama.cpp's Q4_1. Several scales and offsets are tried, for the range
of the group and slightly smaller ranges; the pair with the least squared error is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["int8", "int4", "w8a8"]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4", "w8a8")

_STEP = 64  # columns that the kernels read at once; rows are padded to a multiple
_GROUP = 32
_BLOCK = 16  # rows of w8a8 in one block, 4 columns of each in turn
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
_CUT = 1 + 2**-9  # compensates the truncation
_CHUNK = 2**22  # weights quantised at once: bounds the fp32 copies


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantised (out, in) matrix.

    Parameters
    ----------
    kind : {"int8", "int4", "w8a8"}
    shape : tuple of int
        (out, in).
    codes : torch.Tensor
        uint8. int8: (out, padded in), two's complement. int4: (out, padded in / 2); 32 bytes hold 64 columns, the
        first 32 in the low halves. w8a8: (padded out, padded in), the integers plus 128, in blocks of 16 rows:
        [4 columns, row, column]. Padding rows and columns have no meaning.
    scales : torch.Tensor
        int8, w8a8: (out,) fp32. int4: (out, padded in / 32) int32, the words.
    """

    kind: Quantization
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, chosen: Tensor) -> QuantizedWeight:
        """Some of its rows; not of w8a8, whose rows lie in blocks."""
        return QuantizedWeight(self.kind, (len(chosen), self.shape[1]), self.codes[chosen], self.scales[chosen])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The (out, in) matrix. For int4 it is exact in bf16 and fp32; for the others the products are rounded."""
        rows, columns = self.shape
        if self.kind != "int4":
            codes = self.codes.view(torch.int8) if self.kind == "int8" else _in_rows(self.codes)
            return (codes[:rows, :columns] * self.scales[:, None]).to(dtype)
        halves = self.codes.view(rows, -1, _GROUP)
        codes = torch.stack((halves & 15, halves >> 4), dim=2).view(rows, -1, _GROUP)
        return _decode(codes.float(), self.scales[:, :, None]).flatten(1)[:, :columns].to(dtype)


def quantize(weight: Tensor, kind: Quantization) -> QuantizedWeight:
    """Quantise a (out, in) matrix; it is not changed."""
    rows = max(1, _CHUNK // weight.shape[1])
    one = _int4 if kind == "int4" else _int8
    codes, scales = zip(*(one(part.detach().float()) for part in torch.split(weight, rows)), strict=True)
    stored = in_blocks(torch.cat(codes), _BLOCK) if kind == "w8a8" else torch.cat(codes)
    return QuantizedWeight(kind, (weight.shape[0], weight.shape[1]), stored, torch.cat(scales))


def _padded(weight: Tensor) -> Tensor:
    missing = -weight.shape[1] % _STEP
    return torch.nn.functional.pad(weight, (0, missing)) if missing else weight


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1).clamp_min(1e-30) / 127
    codes = torch.round(weight / scale[:, None]).to(torch.int8)
    return _padded(codes).view(torch.uint8).contiguous(), scale


def in_blocks(codes: Tensor, rows: int) -> Tensor:
    """Codes of int8 plus 128 as bytes, in blocks of `rows` rows: [4 columns, row, column]."""
    count, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -count % rows)) ^ 128
    return padded.view(-1, rows, columns // 4, 4).transpose(1, 2).reshape(-1, columns)


def _in_rows(codes: Tensor) -> Tensor:
    blocks = codes.view(-1, codes.shape[1] // 4, _BLOCK, 4).transpose(1, 2)
    return (blocks.reshape(codes.shape) ^ 128).view(torch.int8)


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = _padded(weight).view(weight.shape[0], -1, _GROUP)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    best_error = torch.full_like(low, torch.inf)
    best_words, best_codes = torch.zeros_like(low, dtype=torch.int32), torch.zeros_like(groups)
    for shrink in _SHRINK:
        words = _word((high - low) * (shrink * _CUT / 15), low * (shrink * _CUT))
        scale, offset = _scale_and_offset(words)
        codes = torch.round((groups * _CUT - offset) / scale).nan_to_num_(0.0).clamp_(0, 15)
        error = (_decode(codes, words) - groups).square_().sum(2, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_words = torch.where(better, words, best_words)
        best_codes = torch.where(better, codes, best_codes)
    codes = best_codes.to(torch.uint8).view(weight.shape[0], -1, 2, _GROUP)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1), best_words.squeeze(2)


def _word(scale: Tensor, offset: Tensor) -> Tensor:
    halves = [t.bfloat16().view(torch.int16).to(torch.int32) for t in (scale, offset)]
    return halves[0] & 0xFFFF | halves[1] << 16


def _scale_and_offset(words: Tensor) -> tuple[Tensor, Tensor]:
    return (words << 16).view(torch.float32), words.view(torch.float32)


def _decode(codes: Tensor, words: Tensor) -> Tensor:
    scale, offset = _scale_and_offset(words)
    # The product is exact, so this rounds once, as a fused multiply and add does.
    return ((codes * scale + offset).view(torch.int32) & -0x10000).view(torch.float32)
