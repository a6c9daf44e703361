"""What every room uses: processors, freed memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skipdecode.cli.options import EngineOptions
from skipdecode.common.environment import isolated_torch, usable_cores
from skipdecode.common.files import copy_files

# ---------------------------------------------------------------------- processors

QUOTAS: dict[str, tuple[str, dict[str, str], int]] = {
    "version 2, in a container": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    "version 2, no limit": ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
    "less than one processor": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    "a part of a processor": ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
    "a limit above": ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
    "the least of all": ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "100000 50000"}, 2),
    "a group beside": ("0::/a\n", {"b/cpu.max": "100000 100000\n"}, 8),
    "the host's path": ("0::/docker/0123\n", {"cpu.max": "200000 100000\n"}, 2),
    "version 1": (
        "5:memory:/x\n4:cpu,cpuacct:/a\n0::/\n",
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
        4,
    ),
    "version 1, no limit": ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    "a damaged file": ("0::/\n", {"cpu.max": "\n"}, 8),
    "a limit above all processors": ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_a_quota_limits_the_processors(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own, files, expected = QUOTAS[case]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path, tmp_path / "own") == expected
    assert usable_cores(tmp_path, tmp_path / "none") == 8


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs an affinity")
def test_threads_are_those_of_the_processors_unless_they_are_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(affinity)})
        usable_cores.cache_clear()
        torch.set_num_threads(3)
        with isolated_torch():  # as in a command
            EngineOptions(model="m", threads=3).use_threads()
            with isolated_torch():  # as when a model is loaded
                assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 3
        EngineOptions(model="m").use_threads()
        assert torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------- freed memory

USE_MEMORY = """
import ctypes, platform, resource
from skipdecode.common.environment import keep_freed_memory
done = keep_freed_memory()
import mmap
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    b = bytearray(64 << 20)
    return len(b)
use()
before = faults()
for _ in range(5):
    use()
print(done, faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc of the GNU C library")
def test_large_blocks_of_freed_memory_are_not_faulted_in_again():
    done, faults = subprocess.run(
        [sys.executable, "-c", USE_MEMORY], capture_output=True, text=True, check=True
    ).stdout.split()
    # 64 MiB are 16,384 pages; returned to the kernel in between, five uses would fault them all five times.
    assert done == "True"
    assert int(faults) < 2000


def test_what_is_copied_may_have_directories_in_it(tmp_path: Path):
    """As a tokenizer with several chat templates writes them."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "additional_chat_templates/rag.jinja"):
        (source / name).write_text(name)
    target.mkdir()
    for _ in range(2):
        copy_files(source, target)
    assert (target / "additional_chat_templates" / "rag.jinja").read_text() == "additional_chat_templates/rag.jinja"
    assert sorted(path.name for path in target.iterdir()) == ["additional_chat_templates", "tokenizer.json"]
