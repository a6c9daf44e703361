"""The kinds of processors that a wheel brings kernels for, and the compiler's command line.

Standard library alone: setup.py runs this file before the package is installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

SOURCES = ("skinny_gemm.cpp", "paged_attention.cpp", "stack.cpp", "greedy.cpp", "head.cpp", "read.cpp")
HEADERS = ("amx.h", "amx_gemm.h", "kernels.h", "prologue.h", "team.h", "vectors.h", "weights.h", "wide_gemm.h")
_MAC = sys.platform == "darwin"
LIBRARY_SUFFIX = ".dylib" if _MAC else ".so"
# macOS: Apple's compiler has no OpenMP, and a second OpenMP runtime beside torch's stops the process. The kernels have
# threads of the standard library there (team.h).
_OPENMP = () if _MAC else ("-fopenmp",)
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", *_OPENMP, "-shared", "-fPIC")


class Target(NamedTuple):
    """A kind of processor: the flags that compile for it, and what the system lists of one.

    Linux lists features in /proc/cpuinfo; macOS in `sysctl hw.optional.arm`.
    """

    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
_X86 = {  # the best first
    "x86-64-v4-amx": Target((*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"), _VNNI | {"avx512_bf16"} | AMX),
    "x86-64-v4-bf16": Target(_BF16, _VNNI | {"avx512_bf16"}),
    "x86-64-v4-vnni": Target(("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
    "x86-64-v4": Target(("-march=x86-64-v4",), _V4),
    "x86-64-v3": Target(("-march=x86-64-v3",), _V3),
}
_DOTPROD, _I8MM, _ARM_BF16 = ("FEAT_DotProd", "FEAT_I8MM", "FEAT_BF16") if _MAC else ("asimddp", "i8mm", "bf16")
_ARM = {  # the best first
    # The two are part of armv8.6-a, of which Graviton 3 lacks others.
    "armv8.2-a+i8mm+bf16": Target(("-march=armv8.2-a+dotprod+i8mm+bf16",), frozenset({_DOTPROD, _I8MM, _ARM_BF16})),
    "armv8.2-a+dotprod": Target(("-march=armv8.2-a+dotprod",), frozenset({_DOTPROD})),
    "armv8-a": Target(("-march=armv8-a",), frozenset()),
}
ALL_TARGETS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
TARGETS: dict[str, Target] = ALL_TARGETS.get(platform.machine().lower(), {})


def find_compiler() -> str | None:
    """The C++ compiler that CXX names, else the system's; None without one."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def compile_command(compiler: str, flags: tuple[str, ...], output: Path) -> list[str]:
    """The command that makes the kernels' library of this directory's sources."""
    sources = (str(Path(__file__).with_name(name)) for name in SOURCES)
    # gcc does not link it by itself, and some packages set CXX to gcc, such as PEFT for BOFT.
    library = ("-lstdc++",) if sys.platform == "linux" else ()
    return [compiler, *_FLAGS, *flags, *sources, *library, "-o", str(output)]
