"""The C++ kernels against plain torch, their batch invariance, where they serve and how they are built."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch

from kernel_reference import kernels_or_skip, reference_linear, reference_stack, run_linear, stack_case
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.kernels import library as kernel_library
from skipdecode.engine.kernels.native import greedy
from skipdecode.engine.kernels.spec import AttentionSpec, LayerRows, LinearSpec
from skipdecode.engine.kernels.weights import QUANTIZATIONS, quantize
from skipdecode.errors import UnfitModelError
from tiny import tiny_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def kernels():
    return kernels_or_skip()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "out", "columns"),
    [
        (1, 7, 33),
        (1, 5, 8),
        (2, 64, 576),
        (3, 13, 64),
        (5, 100, 130),
        (8, 33, 48),
        (17, 257, 576),
        (70, 70, 6200),
        (48, 7, 33),
    ],
)
def test_linear_is_exact_to_fp32(kernels, rows, out, columns, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns).to(dtype).float(), torch.randn(out, columns).to(dtype)
    exact = x.double() @ weight.double().T
    got = run_linear(kernels, LinearSpec(weight), x)
    assert (got - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("columns", [96, 1536])
def test_a_row_is_the_same_beside_any_number_of_others(kernels, columns):
    torch.manual_seed(0)
    call = kernels.linear(LinearSpec(torch.randn(96, columns).bfloat16()))
    x, alone = torch.randn(130, columns), torch.empty(130, 96)
    for row in range(130):
        call(x[row : row + 1], alone[row : row + 1], 1, False)
    for rows in range(1, 131):
        out = torch.empty(rows, 96)
        call(x, out, rows, False)
        assert torch.equal(out, alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *QUANTIZATIONS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "columns"), [(5, 37), (130, 200)])
def test_a_row_of_a_prompt_is_the_same_alone_bit_for_bit(dtype, kind, threads, out, columns):
    torch.manual_seed(0)
    weight = torch.randn(out, columns)
    held = quantize(weight, kind) if kind in QUANTIZATIONS else weight.to(getattr(torch, kind))
    spec = LinearSpec(
        held, torch.randn(out), "layer_norm", torch.randn(columns), torch.randn(columns), 1e-5, "gelu_tanh"
    )
    x, kernels = torch.randn(1030, columns), kernels_or_skip(dtype)
    if kind == "w8a8" and not kernels.multiplies_bytes:
        pytest.skip("no product of bytes on this CPU")
    chosen = torch.arange(0, 1030, 37)
    alone = torch.cat([run_linear(kernels, spec, x[row : row + 1]) for row in chosen])
    for rows in (3, 48, 49, 127, 512, 1030):
        some = chosen[chosen < rows]
        assert torch.equal(run_linear(kernels, spec, x[:rows])[some], alone[: len(some)]), f"{rows} rows"
    assert (alone - reference_linear(spec, x[chosen])).norm() < 0.03 * alone.norm()


@pytest.mark.parametrize(
    ("prologue", "activation"),
    itertools.product(["none", "rms_norm", "layer_norm", "swiglu", "geglu_tanh"], ["none", "relu", "gelu_tanh"]),
)
@pytest.mark.parametrize(("rows", "out", "columns"), [(1, 5, 37), (9, 33, 64), (35, 70, 100), (61, 50, 100)])
def test_prologues_and_epilogues_match_torch(kernels, prologue, activation, rows, out, columns):
    torch.manual_seed(0)
    beta = torch.randn(columns) if prologue == "layer_norm" else None
    weight, bias, gamma = torch.randn(out, columns), torch.randn(out), torch.randn(columns)
    spec = LinearSpec(weight, bias, prologue, gamma, beta, 1e-5, activation)
    x = torch.randn(rows, columns * (2 if "glu" in prologue else 1))
    before = torch.randn(rows, out)
    want = before + reference_linear(spec, x)
    torch.testing.assert_close(run_linear(kernels, spec, x, before), want, rtol=1e-4, atol=1e-4)


def test_gates_survive_extreme_inputs(kernels):
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, -88.5, 88.5, 1.0] + [1.0] * 8])
    for prologue in ("swiglu", "geglu_tanh"):
        spec = LinearSpec(torch.eye(8), prologue=prologue)
        got = run_linear(kernels, spec, x)
        torch.testing.assert_close(got, reference_linear(spec, x), rtol=1e-5, atol=1e-5)


def copied(given):
    return given._replace(hidden=given.hidden.clone(), pages=given.pages.clone())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"), [(4, 2, 16, 0), (4, 4, 64, 0), (6, 2, 20, 7), (3, 1, 128, 0), (2, 2, 8, 3)]
)
def test_layers_match_torch(kernels, heads, kv_heads, dim, window, dtype):
    torch.manual_seed(0)
    cos, sin = torch.randn(64, dim // 2), torch.randn(64, dim // 2)
    gammas = torch.randn(dim), torch.randn(dim)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, window, cos, sin, *gammas, 1e-6)
    # A prompt from its start, a prompt's later part, and a decode row. The second layer stores a part of the first one
    # and runs the second one.
    layers, given = stack_case(spec, dtype, [0] * 5 + [1] * 6 + [2], [*range(5), *range(20, 26), 33])
    given = given._replace(layers=[LayerRows(0, 0, 12), LayerRows(2, 5, 11)])
    want = copied(given)
    reference_stack(layers, want)
    kernels.stack(layers)(given)
    # Queries may meet bf16 keys as bf16.
    error = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(given.hidden, want.hidden, rtol=error, atol=error)
    stored = given.table[0].flatten().long()
    error = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(given.pages[stored], want.pages[stored], rtol=error, atol=1e-5)


@pytest.mark.parametrize(("heads", "dim"), [(4, 16), (1, 4)])
def test_what_sublayers_add_may_be_normed_first(kernels, heads, dim):
    torch.manual_seed(0)
    spec = AttentionSpec(heads, 1, dim, dim**-0.5)
    # Of one head of 4 columns, queries, keys and values are narrower than what attention and MLP add.
    layers, given = stack_case(spec, torch.float32, [0] * 5 + [1], [*range(5), 33])
    layers = [replace(layer, out_gamma=torch.randn(24), mlp_gamma=torch.randn(24), eps=0.1) for layer in layers]
    alone = copied(given)._replace(hidden=given.hidden[:1].clone(), layers=[LayerRows(0, 0, 1)] * 2)
    given = given._replace(layers=[LayerRows(0, 0, 6), LayerRows(0, 0, 5)])
    want = copied(given)
    reference_stack(layers, want)
    call = kernels.stack(layers)
    call(given)
    call(alone)
    torch.testing.assert_close(given.hidden, want.hidden, rtol=1e-4, atol=1e-4)
    assert torch.equal(alone.hidden, given.hidden[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 20), (9, 3, 64), (4, 4, 72)])
def test_layers_of_a_row_do_not_depend_on_its_batch_bit_for_bit(kernels, heads, kv_heads, dim, dtype):
    torch.manual_seed(0)
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    layers, given = stack_case(spec, dtype, [*range(10)], [15, 14, 9, 1, 0, 3, 8, 11, 13, 2])
    call, together = kernels.stack(layers), copied(given)
    call(together)
    for rows in (1, 3):
        few = copied(given)._replace(hidden=given.hidden[:rows].clone(), layers=[LayerRows(0, 0, rows)] * 2)
        call(few)
        assert torch.equal(few.hidden, together.hidden[:rows])


@pytest.mark.parametrize("vocabulary", [7, 64, 1003])
def test_likeliest_tokens_match_torch_and_ties_go_to_the_first(kernels, vocabulary):
    torch.manual_seed(0)
    logits = torch.randn(5, vocabulary) * 10
    logits[1, [3, 5]] = 100.0
    logits[2] = -torch.inf
    logits[2, 6] = 1.0
    tokens, logprobs = greedy(logits)
    assert tokens == logits.argmax(-1).tolist()
    assert tokens[1] == 3
    torch.testing.assert_close(torch.tensor(logprobs), logits.log_softmax(-1).max(-1).values, rtol=1e-5, atol=1e-5)


def test_where_they_cannot_serve_the_reason_is_told():
    with pytest.raises(UnfitModelError, match="float16"):
        open_model(tiny_model("llama").half())
    with pytest.raises(UnfitModelError, match="runs on CPUs, and the model is on meta"):
        open_model(tiny_model("llama").to("meta"))


@pytest.fixture
def builds(kernels, monkeypatch, tmp_path):
    """An empty cache, and a compiler that copies the library that is there; the file has a line for each build."""
    compiler, log = tmp_path / "compiler", tmp_path / "builds"
    real, library = kernel_library._compiler(), kernel_library.load_library()._name
    version = f'[ "$1" = --version ] && exec {real} --version'
    compiler.write_text(f'#!/bin/sh\n{version}\nfor last; do :; done\ncp {library} "$last" && echo built >> {log}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    mask = os.umask(0o022)
    kernel_library.load_library.cache_clear()
    yield log
    os.umask(mask)
    kernel_library.load_library.cache_clear()


def test_library_is_built_once_and_a_failed_build_leaves_nothing(builds, monkeypatch, tmp_path):
    for _ in range(2):
        kernel_library.load_library()
        kernel_library.load_library.cache_clear()
    assert builds.read_text() == "built\n"
    (path,) = (tmp_path / "cache").iterdir()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] || { echo 'fatal error: boom' >&2; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(kernel_library.KernelBuildError, match="boom"):
        kernel_library.load_library()
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_a_cache_that_cannot_be_written_costs_one_build_and_a_note(builds, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "file" / "cache"))
    model = tiny_model("llama")
    for _ in range(2):
        open_model(model)
        kernel_library.load_library()
    assert builds.read_text() == "built\n"
    (told,) = capsys.readouterr().err.splitlines()
    assert "SKIPDECODE_CACHE" in told
    assert str(tmp_path / "file") in told


def test_a_damaged_library_is_built_again_and_others_may_read_it(builds, tmp_path):
    kernel_library.load_library()
    (path,) = (tmp_path / "cache").iterdir()
    assert path.stat().st_mode & 0o777 == 0o644
    whole = path.read_bytes()
    for size in (len(whole) // 2, 0):
        path.unlink()  # this process has it mapped
        path.write_bytes(whole[:size])
        kernel_library.load_library.cache_clear()
        kernel_library.load_library()
        (path,) = (tmp_path / "cache").iterdir()
        assert path.read_bytes() == whole
    assert builds.read_text() == "built\n" * 3
