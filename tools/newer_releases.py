"""Says which packages have a newer release than the tested one, by asking pip's index. Not part of CI.

    python tools/newer_releases.py

The tested releases are those below the upper bounds of pyproject.toml. A line for each newer release says what to
change after `python tools/versions.py newest` has passed with it. Exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """See the module."""
    found = [line for each in bounded() if (line := newer(each))]
    print("\n".join(found) or "no package has a newer release than the tested ones")
    return int(bool(found))


def bounded() -> list[Requirement]:
    """The requirements of pyproject.toml that end below an untested release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    ranges = {each.name: each for each in map(Requirement, lines) if any(s.operator == "<" for s in each.specifier)}
    return list(ranges.values())


def newer(requirement: Requirement) -> str | None:
    """A line about a package's newest release; None if it is inside the range."""
    command = [sys.executable, "-m", "pip", "index", "versions", requirement.name]
    listed = subprocess.run(command, capture_output=True, text=True)
    published = re.search(r"^Available versions: (.+)$", listed.stdout, re.M)
    if published is None:
        return f"{requirement.name}: the index could not be asked"
    versions = [Version(each) for each in published[1].split(", ")]
    newest, inside = max(versions), [v for v in versions if v in requirement.specifier]
    if newest in inside:
        return None
    return f"{requirement}: the newest tested release is {max(inside, default='none')}, the index has {newest}"


if __name__ == "__main__":
    sys.exit(main())
