"""Loads the library of the kernels: the one that the wheel has for this kind of processor, else a compiled one.

Kernels are compiled on first use by the system's compiler into the user's cache directory. The cache key is a hash of
the sources, the compiler's version, the flags and the CPU's features, so an upgrade or another machine on the same home
directory compiles its own. The name of a library has a digest of the content, which is checked before the library is
loaded: a damaged file is removed and compiled again. A library appears under its name by an atomic rename, so processes
that compile at the same time do no harm. Without a directory that can be written, each start compiles.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from skipdecode.common.files import cache_dir, write_whole
from skipdecode.common.progress import detail, note
from skipdecode.engine.kernels.targets import (
    AMX,
    HEADERS,
    LIBRARY_SUFFIX,
    NO_AMX,
    SOURCES,
    TARGETS,
    compile_command,
    find_compiler,
)
from skipdecode.errors import WriteError

_HINT = "install a C++ compiler (such as g++ with OpenMP; on macOS clang) or name one in the environment variable CXX"


class KernelBuildError(Exception):
    """The kernels could not be compiled or loaded; the message says why and what would help."""


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The loaded kernel library; compiled (about 3 s) if neither the wheel nor the cache has it.

    If CXX names a compiler, the wheel's library is not used: kernels are compiled for this very processor.

    Raises KernelBuildError: there is no compiler, the compiler fails, or the library does not load.
    """
    # torch brings its OpenMP runtime; loaded first, it also serves our library (same soname), so that one pool of
    # threads runs both and torch.set_num_threads governs it.
    import torch  # noqa: F401

    features = set(_cpu_features().split())
    has_amx = features >= AMX
    refused = has_amx and not _tiles_are_permitted()
    if refused:
        features -= AMX
    library = None
    if not os.environ.get("CXX") and (prebuilt := _prebuilt(features)) is not None:
        with contextlib.suppress(OSError):  # a wheel for a newer C library
            library = ctypes.CDLL(str(prebuilt))
    try:
        library = library or _compiled(_compiler(), NO_AMX if refused else ())
    except OSError as error:
        raise KernelBuildError(f"the CPU kernels could not be built or loaded ({error}): {_HINT}") from error
    if hasattr(library, "skipdecode_ask_threads"):
        library.skipdecode_ask_threads(_ASK_THREADS)
    detail(f"the CPU kernels use {instructions(library)}")
    if refused or (has_amx and instructions(library) != "AMX"):
        detail(f"this processor has AMX, which the {'system' if refused else 'compiler'} does not let them use")
    return library


def instructions(library: ctypes.CDLL) -> str:
    """The instructions that a library makes products with, such as "AVX2" or "AMX"."""
    library.skipdecode_instructions.restype = ctypes.c_char_p
    return str(library.skipdecode_instructions().decode())


def _torch_threads() -> int:
    """The number that torch.set_num_threads set."""
    import torch

    return torch.get_num_threads()


# Called by kernels without OpenMP, which have threads of their own.
_ASK_THREADS = ctypes.CFUNCTYPE(ctypes.c_int64)(_torch_threads)


def _tiles_are_permitted() -> bool:
    """Whether Linux gives this process and its threads the use of AMX's tiles, for which a process has to ask."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return not int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data))


def _prebuilt(features: set[str]) -> Path | None:
    """The wheel's best library for a processor; None without one."""
    paths = (
        Path(__file__).with_name(f"kernels-{name}{LIBRARY_SUFFIX}")
        for name, target in TARGETS.items()
        if target.needs <= features
    )
    return next(filter(Path.is_file, paths), None)


def _compiler() -> str:
    if (compiler := find_compiler()) is None:
        raise KernelBuildError(f"no C++ compiler was found: {_HINT}")
    return compiler


def _compiled(compiler: str, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library from the cache, or a compiled one, which goes into the cache if that can be written."""
    sources = Path(__file__).parent
    native = ("-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native", *extra_flags)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    text = "".join((sources / name).read_text() for name in SOURCES + HEADERS)
    flags = [word for word in compile_command(compiler, native, Path()) if word.startswith("-")]
    key = hashlib.sha256("\0".join([text, version, *flags, _cpu_features()]).encode()).hexdigest()[:20]
    for path in cache_dir().glob(f"kernels-{key}-*.so"):
        if path == _library_file(key, path.read_bytes()):
            return ctypes.CDLL(str(path))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        compiled = Path(folder) / "kernels.so"
        result = subprocess.run(compile_command(compiler, native, compiled), capture_output=True, text=True)
        if result.returncode:
            first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
            raise KernelBuildError(f"{compiler} could not build the CPU kernels ({first}): {_HINT}")
        content = compiled.read_bytes()
        path = _library_file(key, content)
        try:
            write_whole(path, content)
        except WriteError as error:
            note(f"the CPU kernels are compiled at each start: {error}; set SKIPDECODE_CACHE to a directory for them")
            path = compiled  # deleted once it is loaded
        return ctypes.CDLL(str(path))


def _library_file(key: str, content: bytes) -> Path:
    return cache_dir() / f"kernels-{key}-{hashlib.sha256(content).hexdigest()[:20]}.so"


def _cpu_features() -> str:
    """The CPU features that -march=native depends on, as far as the system reports them."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.optional.arm"]
        listed = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return "\n".join(
            line.removeprefix("hw.optional.arm.").removesuffix(": 1") for line in listed if line[-2:] != " 0"
        )
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
