#!/usr/bin/env bash
# Guess: in a fresh process, resource.getrusage(RUSAGE_SELF).ru_maxrss is the peak memory of that process.
# Instead: Linux keeps the largest value across exec, so a process that a large one started reports its parent's memory; psutil has no peak on Linux. VmHWM in /proc/self/status starts anew.
# A benchmark that loads a model, then measures others in child processes, gives all of them at least its own peak.
# Versions: Linux 6.18, Python 3.11, NumPy 2.4.6 (the parent's array).
# Users should: read VmHWM inside the child, or start children before anything is loaded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'numpy==2.4.6'
venv/bin/python - <<'END'
import os
import platform
import subprocess
import sys

import numpy as np

CHILD = """
import re, resource
status = open("/proc/self/status").read()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, re.search(r"VmHWM:\\s+(\\d+)", status)[1])
"""


def measured():
    out = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True).stdout
    return [int(kib) // 1024 for kib in out.split()]


print("Linux", platform.release().split(".fc")[0].split("-")[0], "Python", platform.python_version(), "NumPy", np.__version__)
small = measured()
weights = np.ones(2**27)  # 1 GiB
large = measured()
print("child of a small process: ru_maxrss, VmHWM in MiB:", small)
print("child of a process of 1 GiB:                       ", large)
assert large[0] > 1000 > 100 > large[1] and abs(large[1] - small[1]) < 10, "the behaviour has changed"
END
