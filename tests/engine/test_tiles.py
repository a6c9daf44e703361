"""Products by AMX's tiles: on the tiles where this processor has them, else on their emulation in plain C++."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine_tools import always_drafts
from kernel_reference import compiled_with, kernels_or_skip, reference_linear, run_linear
from skipdecode import Schedule
from skipdecode.common.progress import detailed
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.kernels import library as kernel_library
from skipdecode.engine.kernels.head import ShortHead
from skipdecode.engine.kernels.native import NativeKernels
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.engine.kernels.targets import AMX, NO_AMX
from skipdecode.engine.kernels.weights import quantize
from tiny import LAYERS, tiny_model

# Rows, outputs, columns: of one tile and of tiles with tails, of many strips, and of rows that are read in parts.
SIZES = [(1, 5, 37), (3, 16, 32), (16, 32, 64), (17, 33, 130), (33, 100, 31), (70, 300, 96), (513, 270, 1130)]


@pytest.fixture(scope="module")
def plain() -> NativeKernels:
    """The kernels without tiles."""
    kernels = kernels_or_skip()
    if not kernels.multiplies_bytes:
        pytest.skip("no product of bytes on this CPU")
    if kernels.instructions != "AMX":
        return kernels
    with compiled_with(*NO_AMX):
        return NativeKernels()


@pytest.fixture(scope="module", autouse=True)
def tiles(plain: NativeKernels) -> Iterator[NativeKernels]:
    """The kernels with tiles, which all of this module uses."""
    flags = () if kernels_or_skip().instructions == "AMX" else ("-DSKIPDECODE_EMULATE_TILES",)
    with compiled_with(*flags):
        yield NativeKernels()


def spec_of(weight, kind, prologue="layer_norm"):
    held = quantize(weight, "w8a8") if kind == "w8a8" else weight.bfloat16()
    out, columns = weight.shape
    beta = torch.randn(columns) if prologue == "layer_norm" else None
    return LinearSpec(held, torch.randn(out), prologue, torch.randn(columns), beta, 1e-5, "relu")


@pytest.mark.parametrize("prologue", ["none", "layer_norm", "swiglu"])
@pytest.mark.parametrize(("rows", "out", "columns"), SIZES)
def test_products_of_bytes_are_those_of_other_instructions_bit_for_bit(plain, tiles, rows, out, columns, prologue):
    torch.manual_seed(0)
    spec = spec_of(torch.randn(out, columns), "w8a8", prologue)
    x, before = torch.randn(rows, columns * (2 if prologue == "swiglu" else 1)), torch.randn(rows, out)
    assert torch.equal(run_linear(tiles, spec, x, before), run_linear(plain, spec, x, before))


@pytest.mark.parametrize(("rows", "out", "columns"), SIZES)
def test_products_of_bf16_are_those_of_rounded_activations(tiles, rows, out, columns):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns), torch.randn(out, columns).bfloat16()
    rounded, wide = x.bfloat16().double(), weight.double()
    off = (run_linear(tiles, LinearSpec(weight), x) - rounded @ wide.T).abs()
    assert (off <= 1e-6 * (rounded.abs() @ wide.abs().T)).all()


def test_what_is_not_a_number_stays_in_its_row_and_output(tiles):
    x, weight = torch.randn(20, 40), torch.randn(24, 40).bfloat16()
    weight[7, 3], x[11, 39] = torch.nan, torch.inf
    lost = ~run_linear(tiles, LinearSpec(weight), x).isfinite()
    assert lost[:, 7].all()
    assert lost[11].all()
    assert lost.sum() == 20 + 24 - 1


@pytest.mark.parametrize("kind", ["bf16", "w8a8"])
@pytest.mark.parametrize(("out", "columns"), [(5, 37), (130, 200), (64, 2100)])
def test_a_row_is_the_same_alone_and_in_any_batch(tiles, threads, kind, out, columns):
    torch.manual_seed(0)
    spec, x = spec_of(torch.randn(out, columns), kind), torch.randn(600, columns)
    chosen = torch.arange(0, 600, 37)
    alone = torch.cat([run_linear(tiles, spec, x[row : row + 1]) for row in chosen])
    for rows in (2, 15, 16, 17, 31, 32, 33, 49, 127, 512, 600):
        some = chosen[chosen < rows]
        assert torch.equal(run_linear(tiles, spec, x[:rows])[some], alone[: len(some)]), f"{rows} rows"
    assert (alone - reference_linear(spec, x[chosen])).norm() < 0.03 * alone.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "words", "columns"), [(1, 70, 40), (7, 2000, 96), (8, 301, 200), (32, 1000, 64)])
def test_the_short_head_finds_the_words_of_the_full_one(tiles, threads, rows, words, columns, dtype):
    torch.manual_seed(0)
    weight, gamma = torch.randn(words, columns).to(dtype), torch.rand(columns) + 0.5
    weight[words // 2] = weight[words // 3]  # a tie
    spec = LinearSpec(weight, torch.randn(words), "rms_norm", gamma, eps=1e-5)
    x = torch.randn(rows, columns) * 7
    x[0, 3] *= 1e3  # a column that needs both parts of a state
    found, logits = ShortHead(tiles, spec)(x, [3] * rows), run_linear(tiles, spec, x)
    assert found is not None
    assert found.best == logits.argmax(-1).tolist()
    for row, (ids, count) in enumerate(zip(found.token_ids, found.counts, strict=True)):
        assert set(logits[row].topk(3).indices.tolist()) <= set(ids[:count].tolist())
        assert torch.equal(found.logits[row, :count], logits[row, ids[:count]])


@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("prompt", ["full", (0, 1, 2)])
def test_texts_are_the_same_alone_in_a_batch_and_with_drafts(quantization, prompt, monkeypatch):
    prompts, new = [(5, 6, 7, 8) * 5, (9, 3), tuple(i % 90 + 3 for i in range(60)), (4,) * 30], 12
    schedule = replace(Schedule.from_speedup(LAYERS, 2, new), prompt=prompt)
    fast = open_model(tiny_model("llama").bfloat16(), quantization=quantization)

    def texts(some, exact=False):
        return [row.tokens for row in FastEngine(fast, schedule).decode([Request(p, new, exact=exact) for p in some])]

    alone = [texts([one])[0] for one in prompts]
    assert texts(prompts) == alone
    always_drafts(monkeypatch)
    assert texts(prompts, exact=True) == alone


def test_without_the_systems_permission_the_next_kernels_are_taken(monkeypatch, tmp_path, capsys):
    log, library = tmp_path / "arguments", kernel_library.load_library()._name
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nfor last; do :; done\n[ $# = 1 ] || cp {library} "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_library, "_cpu_features", lambda: " ".join(AMX))
    monkeypatch.setattr(kernel_library, "_tiles_are_permitted", lambda: False)
    with detailed():
        kernel_library.load_library.__wrapped__()
    assert "-mno-amx-tile" in log.read_text()
    assert "the system does not let them" in " ".join(capsys.readouterr().err.split())
