"""Freed memory stays with the process where the C library can be told so."""

import subprocess
import sys

import pytest

CODE = """
import ctypes, platform, resource
from skipdecode.common.allocator import keep_freed_memory
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
def test_large_blocks_are_not_faulted_in_again():
    done, faults = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
    ).stdout.split()
    # 64 MiB are 16,384 pages; returned to the kernel in between, five uses would fault them all five times.
    assert done == "True"
    assert int(faults) < 2000
