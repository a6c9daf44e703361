"""Tables in README and docs are those of the result files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from skipdecode.common.jsonl import read_result
from skipdecode.models.families import FAMILIES
from survey import faults, known

ROOT = Path(__file__).parents[2]


def test_tables_are_those_of_the_results():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_page_of_model_types_says_what_the_tables_of_the_package_say():
    found = read_result(ROOT / "results" / "families.json")
    assert [row["type"] for row in found["rows"]] == sorted(FAMILIES)
    assert all(row == row | known(row["type"]) for row in found["rows"])
    assert found["faults"] == faults()


def test_readme_opens_with_what_a_reader_needs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"For [{len(FAMILIES)} model types](docs/models.md)" in readme
    text = "\n".join(readme.splitlines()[:65])
    table = "<!-- table start results/"
    for needed in (
        table,
        "make demo",
        "make test",
        "skipdecode.attach",
        "skipdecode generate",
        "skipdecode prepare",
        "skipdecode serve",
    ):
        assert needed in text
