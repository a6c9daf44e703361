"""The kernels of another processor, run by qemu on copies of this process's memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from skipdecode.engine.kernels import native
from skipdecode.engine.kernels.native import NativeKernels
from skipdecode.engine.kernels.spec import LayerSpec, LinearSpec, StackInput
from skipdecode.engine.kernels.targets import SOURCES
from skipdecode.engine.kernels.weights import QuantizedWeight

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-static", "-pthread")
_LINEAR, _STACK = 0, 1  # see run_kernels.cpp
_LAYER_ROWS_BYTES = 12


class EmulatedKernels:
    """Products and stacks by a program for Arm, on so many `threads`; `kernels` prepare the arguments."""

    def __init__(self, kernels: NativeKernels, folder: Path, flags: Iterable[str]) -> None:
        self.threads = 1
        self._kernels, self._program, self._file = kernels, folder / "program", folder / "memory"
        sources = [*map(Path(native.__file__).with_name, SOURCES), Path(__file__).with_name("run_kernels.cpp")]
        subprocess.run([COMPILER, *_FLAGS, *flags, *sources, "-o", self._program], check=True, capture_output=True)

    def linear(self, spec: LinearSpec, x: Tensor, add_to: Tensor) -> Tensor:
        """A linear operation; its results come on top of `add_to`."""
        owners: list[object] = []
        args, out = self._kernels.linear_args(spec, owners), add_to.clone()
        args.x, args.y, args.m = x.data_ptr(), out.data_ptr(), len(x)
        args.ldx, args.ldy, args.accumulate = x.stride(0), out.stride(0), True
        self._run(_LINEAR, [args], _blocks([*owners, x, out]))
        return out

    def stack(self, layers: list[LayerSpec], given: StackInput) -> None:
        """A stack of layers; changes hidden states and pages."""
        stack = self._kernels.stack(layers)

        def call(_: int) -> None:
            rows = stack._args.layer_rows, len(layers) * _LAYER_ROWS_BYTES
            inputs = [given.hidden, given.pages, given.table, given.slots, given.positions]
            self._run(
                _STACK, [stack._args, stack._layers], [rows, *_blocks([*stack._owners, *stack._buffers, *inputs])]
            )

        stack._function = call
        stack(given)

    def _run(self, function: int, structures: list, memory: list[tuple[int, int]]) -> None:
        blocks = [*((ctypes.addressof(each), ctypes.sizeof(each)) for each in structures), *memory]
        pointers = [_place(blocks, address) for each in structures for pair in _pointers(each) for address in pair]
        with self._file.open("wb") as file:
            array("q", (function, len(blocks), len(pointers) // 2)).tofile(file)
            for address, size in blocks:
                array("q", (size,)).tofile(file)
                file.write(ctypes.string_at(address, size))
            for place in pointers:
                array("q", place).tofile(file)
        variables = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        subprocess.run([EMULATOR, "-cpu", "max", self._program, self._file], check=True, env=variables)
        results = memoryview(self._file.read_bytes())[24:]
        for index, (address, size) in enumerate(blocks):
            if index >= len(structures):  # those hold addresses of this process
                ctypes.memmove(address, bytes(results[8 : 8 + size]), size)
            results = results[8 + size :]


def _blocks(objects: Iterable[object]) -> list[tuple[int, int]]:
    """Address and size of each tensor."""
    pairs = [(each.codes, each.scales) if isinstance(each, QuantizedWeight) else (each,) for each in objects]
    return [(t.data_ptr(), t.nbytes) for pair in pairs for t in pair if isinstance(t, Tensor) and t.nbytes]


def _pointers(structure: ctypes.Structure | ctypes.Array) -> Iterator[tuple[int, int]]:
    """Where each pointer that is not null lies, and what it points to."""
    if isinstance(structure, ctypes.Array):
        for each in structure:
            yield from _pointers(each)
        return
    for name, kind in structure._fields_:
        value = getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield from _pointers(value)
        elif kind is ctypes.c_void_p and value:
            yield ctypes.addressof(structure) + getattr(type(structure), name).offset, value


def _place(blocks: list[tuple[int, int]], address: int) -> tuple[int, int]:
    return next((i, address - begin) for i, (begin, size) in enumerate(blocks) if begin <= address < begin + size)
