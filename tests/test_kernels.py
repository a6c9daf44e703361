"""The C++ kernels against torch in double precision, their batch invariance, their build, and the torch operator."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch

from skipdecode.engine.kernels import backend_for, build
from skipdecode.engine.kernels.greedy import greedy
from skipdecode.engine.kernels.reference import TorchBackend
from skipdecode.engine.kernels.spec import AttentionSpec, LinearSpec
from skipdecode.errors import UsageError

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
pytestmark = needs_compiler
DTYPES = [torch.float32, torch.bfloat16]


def native():
    return backend_for(CPU, torch.bfloat16, "native")[0]


def run_linear(backend, spec, x, accumulate=False, out=None):
    out = torch.zeros(x.shape[0], spec.weight.shape[0]) if out is None else out
    backend.linear(spec)(x, out, x.shape[0], accumulate)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "out", "columns"),
    [(1, 7, 33), (1, 5, 8), (2, 64, 576), (3, 13, 64), (5, 100, 130), (8, 33, 48), (17, 257, 576), (70, 70, 6200)],
)
def test_linear_is_exact_to_fp32(rows, out, columns, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns).to(dtype).float(), torch.randn(out, columns).to(dtype)
    exact = x.double() @ weight.double().T
    got = run_linear(native(), LinearSpec(weight), x)
    assert (got - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch_bit_for_bit(dtype):
    torch.manual_seed(0)
    spec = LinearSpec(torch.randn(37, 600).to(dtype), torch.randn(37), "rms_norm", torch.randn(600), eps=1e-5)
    x = torch.randn(40, 600)
    together = run_linear(native(), spec, x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 33):
        assert torch.equal(run_linear(native(), spec, x[:rows]), together[:rows]), rows


@pytest.mark.parametrize(
    ("prologue", "activation"),
    itertools.product(["none", "rms_norm", "layer_norm", "swiglu", "geglu_tanh"], ["none", "relu", "gelu_tanh"]),
)
@pytest.mark.parametrize(("rows", "out", "columns"), [(1, 5, 37), (9, 33, 64), (35, 70, 100)])
def test_prologues_and_epilogues_match_torch(prologue, activation, rows, out, columns):
    torch.manual_seed(0)
    beta = torch.randn(columns) if prologue == "layer_norm" else None
    weight, bias, gamma = torch.randn(out, columns), torch.randn(out), torch.randn(columns)
    spec = LinearSpec(weight, bias, prologue, gamma, beta, 1e-5, activation)
    x = torch.randn(rows, columns * (2 if "glu" in prologue else 1))
    before = torch.randn(rows, out)
    want = run_linear(TorchBackend(), spec, x, True, before.clone())
    torch.testing.assert_close(run_linear(native(), spec, x, True, before.clone()), want, rtol=1e-4, atol=1e-4)


def test_gates_survive_extreme_inputs():
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, -88.5, 88.5, 1.0] + [1.0] * 8])
    for prologue in ("swiglu", "geglu_tanh"):
        spec = LinearSpec(torch.eye(8), prologue=prologue)
        got = run_linear(native(), spec, x)
        torch.testing.assert_close(got, run_linear(TorchBackend(), spec, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"), [(4, 2, 16, 0), (4, 4, 64, 0), (6, 2, 20, 7), (3, 1, 128, 0), (2, 2, 8, 3)]
)
def test_attention_matches_torch(heads, kv_heads, dim, window, dtype):
    torch.manual_seed(0)
    cos, sin, q_gamma, k_gamma = (
        torch.randn(64, dim // 2),
        torch.randn(64, dim // 2),
        torch.randn(dim),
        torch.randn(dim),
    )
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, window, cos, sin, q_gamma, k_gamma, 1e-6)
    pages = torch.randn(40, 2, kv_heads, 4, dim).to(dtype)
    table = torch.randperm(40)[:30].view(3, 10).int()
    # A prompt from its start, a prompt's later part, and a decode row, in one call.
    slots = torch.tensor([0] * 5 + [1] * 6 + [2], dtype=torch.int32)
    positions = torch.tensor([*range(5), *range(20, 26), 33], dtype=torch.int32)
    qkv = torch.randn(12, (heads + 2 * kv_heads) * dim)
    results = []
    for backend in (native(), TorchBackend()):
        out, held = torch.zeros(12, heads * dim), pages.clone()
        backend.attention(spec)(qkv.clone(), out, held, table, slots, positions, 12)
        results.append((out, held))
    (out, held), (want, want_held) = results
    # Queries may meet bf16 keys as bf16.
    error = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out, want, rtol=error, atol=error)
    torch.testing.assert_close(held, want_held)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 20), (9, 3, 64), (4, 4, 72)])
def test_attention_of_a_row_does_not_depend_on_its_batch_bit_for_bit(heads, kv_heads, dim, dtype):
    torch.manual_seed(0)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    pages = torch.randn(40, 2, kv_heads, 4, dim).to(dtype)
    table = torch.arange(40).view(10, 4).int()
    slots, positions = torch.arange(10).int(), torch.tensor([15, 14, 9, 1, 0, 3, 8, 11, 13, 2], dtype=torch.int32)
    qkv = torch.randn(10, (heads + 2 * kv_heads) * dim)
    call = native().attention(spec)
    together = torch.zeros(10, heads * dim)
    call(qkv.clone(), together, pages.clone(), table, slots, positions, 10)
    for rows in (1, 3):
        out = torch.zeros(rows, heads * dim)
        call(qkv[:rows].clone(), out, pages.clone(), table, slots, positions, rows)
        assert torch.equal(out, together[:rows])


@pytest.mark.parametrize("vocabulary", [7, 64, 1003])
def test_likeliest_tokens_match_torch_and_ties_go_to_the_first(vocabulary):
    native()
    torch.manual_seed(0)
    logits = torch.randn(5, vocabulary) * 10
    logits[1, [3, 5]] = 100.0
    logits[2] = -torch.inf
    logits[2, 6] = 1.0
    tokens, logprobs = greedy(logits)
    assert tokens == logits.argmax(-1).tolist()
    assert tokens[1] == 3
    torch.testing.assert_close(torch.tensor(logprobs), logits.log_softmax(-1).max(-1).values, rtol=1e-5, atol=1e-5)


def test_operator_compiles_and_matches():
    from skipdecode.engine.kernels.op import skinny_linear

    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 40).bfloat16().float(), torch.randn(11, 40).bfloat16(), torch.randn(11)
    torch.library.opcheck(skinny_linear, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))
    want = x @ weight.float().T + bias
    torch.testing.assert_close(torch.ops.skipdecode.skinny_linear(x, weight, bias), want, rtol=1e-5, atol=1e-5)


def test_choice_is_checked_and_explained(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="accepted are auto, native, torch"):
        backend_for(CPU, torch.float32, "fast")
    backend, reason = backend_for(CPU, torch.float16)
    assert backend.name == "torch"
    assert "float16" in reason
    assert backend_for(CPU, torch.float32, "torch")[1] == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.load_library.cache_clear()
    try:
        backend, reason = backend_for(CPU, torch.float32)
        assert backend.name == "torch"
        assert "no C++ compiler was found" in reason
        with pytest.raises(UsageError, match="CXX"):
            backend_for(CPU, torch.float32, "native")
    finally:
        build.load_library.cache_clear()


def test_library_is_built_once_and_a_failed_build_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    build.load_library.cache_clear()
    try:
        build.load_library()
        (path,) = (tmp_path / "cache").iterdir()
        before = path.stat().st_mtime_ns
        build.load_library.cache_clear()
        build.load_library()
        assert path.stat().st_mtime_ns == before
        broken = tmp_path / "broken"
        broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] || { echo 'fatal error: boom' >&2; exit 1; }\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
        build.load_library.cache_clear()
        with pytest.raises(build.KernelBuildError, match="boom"):
            build.load_library()
        assert list((tmp_path / "cache").iterdir()) == [path]
    finally:
        build.load_library.cache_clear()
