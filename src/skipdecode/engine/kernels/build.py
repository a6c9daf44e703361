"""Builds the C++ kernels on first use with the system's compiler, into the user's cache directory, and loads them.

The cache key is a hash of the sources, the compiler's version, the flags and this CPU's features, so an upgrade or
another machine on the same home directory builds its own. The file's name holds a digest of its content, which is
checked before it is loaded: a damaged file is removed and built again. It appears under its name by an atomic rename,
so processes that build at the same time do no harm.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from skipdecode.common.files import cache_dir, write_whole
from skipdecode.errors import WriteError

__all__ = ["KernelBuildError", "load_library"]

_SOURCES = ("skinny_gemm.cpp", "paged_attention.cpp", "stack.cpp", "greedy.cpp", "head.cpp", "read.cpp")
_HEADERS = ("kernels.h", "prologue.h", "team.h", "vectors.h", "weights.h", "wide_gemm.h")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_HINT = "install a C++ compiler with OpenMP (for example g++) or name one in the environment variable CXX"


class KernelBuildError(Exception):
    """The kernels could not be built or loaded; the message gives the reason and a remedy."""


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The loaded kernel library, built when the cache does not hold it (about 3 s).

    Raises
    ------
    KernelBuildError
        If there is no compiler, it fails, or its result does not load.
    """
    # torch brings its OpenMP runtime; loaded first, it also serves our library (same soname), so that one pool of
    # threads runs both and torch.set_num_threads governs it.
    import torch  # noqa: F401

    try:
        path = _built(_compiler())
        return ctypes.CDLL(str(path))
    except (OSError, WriteError) as error:
        raise KernelBuildError(f"the CPU kernels could not be built or loaded ({error}): {_HINT}") from error


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise KernelBuildError(f"no C++ compiler was found: {_HINT}")


def _built(compiler: str) -> Path:
    sources = Path(__file__).parent
    target = ("-march=native",) if platform.machine().lower() in ("x86_64", "amd64") else ("-mcpu=native",)
    command = [compiler, *_FLAGS, *target, *(str(sources / name) for name in _SOURCES)]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    text = "".join((sources / name).read_text() for name in _SOURCES + _HEADERS)
    key = hashlib.sha256("\0".join([text, version, *_FLAGS, *target, _cpu_features()]).encode()).hexdigest()[:20]
    for path in cache_dir().glob(f"kernels-{key}-*.so"):
        if path == _place(key, path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernels.so"
        result = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
        if result.returncode:
            first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
            raise KernelBuildError(f"{compiler} could not build the CPU kernels ({first}): {_HINT}")
        content = built.read_bytes()
    path = _place(key, content)
    write_whole(path, content)
    return path


def _place(key: str, content: bytes) -> Path:
    return cache_dir() / f"kernels-{key}-{hashlib.sha256(content).hexdigest()[:20]}.so"


def _cpu_features() -> str:
    """The CPU features that -march=native depends on, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
