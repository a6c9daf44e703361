"""Weights of 8 and 4 bits: their error, the kernels on them, and models decoded with them."""

from __future__ import annotations

import shutil

import pytest
import torch

from skipdecode.kernels import backend_for
from skipdecode.kernels.quantize import QUANTIZATIONS, quantize
from skipdecode.kernels.reference import TorchBackend
from skipdecode.kernels.spec import LinearSpec

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


def run_linear(backend, spec, x):
    out = torch.zeros(x.shape[0], spec.weight.shape[0])
    backend.linear(spec)(x, out, x.shape[0], False)
    return out


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.01), ("int4", 0.09)])
@pytest.mark.parametrize("columns", [64, 100])
def test_error_is_small_and_zero_stays_zero(kind, most, columns):
    torch.manual_seed(0)
    weight = torch.randn(50, columns)
    weight[3] = 0
    back = quantize(weight, kind).dequantize()
    assert (back[3] == 0).all()
    assert (back - weight).norm() < most * weight.norm()


def test_int4_weights_are_exact_in_bf16_and_take_four_and_a_half_bits():
    weight = quantize(torch.randn(64, 128) * 3e-3, "int4")
    assert torch.equal(weight.dequantize(torch.bfloat16).float(), weight.dequantize())
    assert weight.nbytes * 8 == 4.5 * 64 * 128


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize(("rows", "out", "columns"), [(1, 7, 33), (3, 64, 576), (8, 33, 130), (33, 17, 6208)])
def test_kernels_match_the_dequantized_weights(kind, rows, out, columns, dtype):
    torch.manual_seed(0)
    weight = quantize(torch.randn(out, columns), kind)
    spec = LinearSpec(weight, torch.randn(out), activation="relu")
    x = torch.randn(rows, columns).to(dtype).float()
    native = backend_for(CPU, dtype, "native")[0]
    got = run_linear(native, spec, x)
    torch.testing.assert_close(got, run_linear(TorchBackend(), spec, x), rtol=1e-4, atol=2e-4)
    for few in (1, 2, 5):
        assert torch.equal(run_linear(native, spec, x[:few]), got[:few])
