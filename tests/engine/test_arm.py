"""The kernels for Arm, under emulation, and those without OpenMP, on this processor: macOS has both."""

from __future__ import annotations

import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emulated import COMPILER, EMULATOR, EmulatedKernels
from kernel_reference import compiled_with, kernels_or_skip, reference_linear, reference_stack, run_linear, stack_case
from skipdecode.engine.kernels import library as kernel_library
from skipdecode.engine.kernels import targets
from skipdecode.engine.kernels.native import NativeKernels, greedy
from skipdecode.engine.kernels.spec import AttentionSpec, LayerRows, LinearSpec
from skipdecode.engine.kernels.targets import ALL_TARGETS
from skipdecode.engine.kernels.weights import QUANTIZATIONS, quantize

MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
emulated = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} missing: Debian's g++-aarch64-linux-gnu, qemu-user"),
]
# Rows, outputs, columns: tails of each, groups of 256 columns, rows packed by several threads, and a second chunk.
SIZES = [(1, 5, 37), (2, 16, 64), (3, 33, 130), (4, 16, 256), (33, 100, 31), (49, 70, 1130), (513, 40, 300)]
I8MM = "armv8.2-a+i8mm+bf16"


@pytest.fixture(scope="module", params=[(I8MM, "-fopenmp"), ("armv8.2-a+dotprod", "-fno-openmp")], ids=" ".join)
def arm(request, tmp_path_factory) -> EmulatedKernels:
    """A target's kernels under emulation, with or without OpenMP."""
    target, threads = request.param
    flags = (*ALL_TARGETS["aarch64"][target].flags, threads)
    made = EmulatedKernels(kernels_or_skip(), tmp_path_factory.mktemp("arm"), flags)
    made.rounds = target == I8MM  # activations of bf16 and int8 weights
    return made


def held_as(kind, weight):
    return quantize(weight, kind) if kind in QUANTIZATIONS else weight.to(getattr(torch, kind))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "out", "columns"), SIZES)
class TestProducts:
    pytestmark = emulated

    def test_bytes_are_those_of_x86_bit_for_bit(self, arm, rows, out, columns, threads):
        here = kernels_or_skip()
        if not here.multiplies_bytes:
            pytest.skip("no product of bytes on this CPU")
        torch.manual_seed(0)
        spec = LinearSpec(quantize(torch.randn(out, columns), "w8a8"), torch.randn(out), activation="relu")
        x, before = torch.randn(rows, columns) * torch.rand(rows, 1) * 9, torch.randn(rows, out)
        arm.threads = threads
        assert torch.equal(arm.linear(spec, x, before), run_linear(here, spec, x, before))

    @pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
    def test_others_are_exact_to_fp32(self, arm, rows, out, columns, threads, kind):
        """Sums off by at most 1e-5 of the sum of the sizes of what is added."""
        torch.manual_seed(0)
        held, x = held_as(kind, torch.randn(out, columns)), torch.randn(rows, columns)
        wide = (held.dequantize() if kind == "int8" else held).double()
        met = (x.bfloat16() if arm.rounds and kind != "float32" else x).double()
        arm.threads = threads
        off = (arm.linear(LinearSpec(held), x, torch.zeros(rows, out)) - met @ wide.T).abs()
        assert (off <= 1e-5 * (met.abs() @ wide.abs().T)).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *QUANTIZATIONS])
@pytest.mark.parametrize("prologue", ["layer_norm", "swiglu"])
class TestRows:
    pytestmark = emulated

    def test_a_row_is_the_same_alone_and_in_any_batch(self, arm, kind, prologue):
        torch.manual_seed(0)
        out, columns = 130, 200
        beta = torch.randn(columns) if prologue == "layer_norm" else None
        spec = LinearSpec(
            held_as(kind, torch.randn(out, columns)),
            torch.randn(out),
            prologue,
            torch.randn(columns),
            beta,
            1e-5,
            "relu",
        )
        x, before = torch.randn(520, columns * (2 if prologue == "swiglu" else 1)), torch.zeros(520, out)
        arm.threads = 3
        together = arm.linear(spec, x, before)
        for rows in (1, 2, 3, 7, 33, 47, 48, 50):
            assert torch.equal(arm.linear(spec, x[:rows], before[:rows]), together[:rows]), f"{rows} rows"
        want = reference_linear(spec, x)
        assert (together - want).norm() < 0.03 * want.norm()


def layers_case(dtype, layer_rows):
    """Two layers and rows of two texts, of a prompt's later part and of a decode step."""
    torch.manual_seed(0)
    cos, sin = torch.randn(64, 10), torch.randn(64, 10)
    spec = AttentionSpec(4, 2, 20, 20**-0.5, 0, cos, sin)
    layers, given = stack_case(spec, dtype, [0] * 9 + [1], [*range(20, 29), 33])
    rows = layer_rows[0].end
    return layers, given._replace(hidden=given.hidden[:rows], layers=layer_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestLayers:
    pytestmark = emulated

    def test_they_match_torch_and_a_row_does_not_depend_on_its_batch(self, arm, dtype):
        arm.threads = 3
        error = 1e-4 if dtype == torch.float32 else 3e-2  # queries may meet bf16 keys as bf16
        some = [LayerRows(0, 0, 10), LayerRows(2, 5, 9)]
        (layers, got), (_, want) = layers_case(dtype, some), layers_case(dtype, some)
        arm.stack(layers, got)
        reference_stack(layers, want)
        torch.testing.assert_close(got.hidden, want.hidden, rtol=error, atol=error)
        (_, together), (_, few) = (layers_case(dtype, [LayerRows(0, 0, rows)] * 2) for rows in (10, 3))
        arm.stack(layers, together)
        arm.stack(layers, few)
        assert torch.equal(few.hidden, together.hidden[:3])


@pytest.mark.slow
def test_without_openmp_results_are_the_same_bit_for_bit(threads):
    def results():
        kernels = NativeKernels()
        torch.manual_seed(0)
        made = []
        for kind in ("float32", "bfloat16", "int8", *(["w8a8"] if kernels.multiplies_bytes else [])):
            spec = LinearSpec(held_as(kind, torch.randn(130, 200)), torch.randn(130))
            made += [run_linear(kernels, spec, torch.randn(rows, 200)) for rows in (1, 5, 40, 600)]
        layers, given = layers_case(torch.bfloat16, [LayerRows(0, 0, 10)] * 2)
        kernels.stack(layers)(given)
        tokens, logprobs = greedy(torch.randn(5, 1003))
        return [*made, given.hidden, given.pages, torch.tensor(tokens), torch.tensor(logprobs)]

    kernels_or_skip()
    want = results()
    with compiled_with("-fno-openmp"):
        library = kernel_library.load_library()
        assert hasattr(library, "skipdecode_ask_threads")
        got = results()
    assert all(map(torch.equal, got, want))


def on_mac(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    return SimpleNamespace(**runpy.run_path(targets.__file__))


LINUX = "Features\t: fp asimd evtstrm atomics fphp asimdhp"
MAC = "machdep.cpu.brand_string: Apple M2\nhw.optional.arm.FEAT_SHA3: 1\nhw.optional.arm.FEAT_DotProd: 1\n"


@pytest.mark.parametrize(
    ("system", "features", "chosen"),
    [
        ("linux", LINUX, "armv8-a"),
        ("linux", f"{LINUX} asimddp", "armv8.2-a+dotprod"),
        ("linux", f"{LINUX} asimddp i8mm", "armv8.2-a+dotprod"),
        ("linux", f"{LINUX} asimddp i8mm bf16", I8MM),
        ("darwin", f"{MAC}hw.optional.arm.FEAT_BF16: 0\nhw.optional.arm.FEAT_I8MM: 0\n", "armv8.2-a+dotprod"),
        ("darwin", f"{MAC}hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_I8MM: 1\n", I8MM),
        ("darwin", "machdep.cpu.brand_string: Apple M1\n", "armv8-a"),
    ],
)
def test_the_wheels_best_library_for_the_processor_is_chosen(system, features, chosen, monkeypatch, tmp_path):
    suffix, wanted = ".so", ALL_TARGETS["aarch64"]
    if system == "darwin":
        mac = on_mac(monkeypatch)
        suffix, wanted = mac.LIBRARY_SUFFIX, mac.TARGETS
        assert "-fopenmp" not in mac.compile_command("c++", (), tmp_path)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=features))
    else:
        monkeypatch.setattr(Path, "read_text", lambda _: features)
    for name in wanted:
        (tmp_path / f"kernels-{name}{suffix}").touch()
    monkeypatch.setattr(kernel_library, "TARGETS", wanted)
    monkeypatch.setattr(kernel_library, "LIBRARY_SUFFIX", suffix)
    monkeypatch.setattr(kernel_library, "__file__", str(tmp_path / "__init__.py"))
    assert kernel_library._prebuilt(set(kernel_library._cpu_features().split())).name == f"kernels-{chosen}{suffix}"
