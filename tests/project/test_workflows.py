"""The workflows of the repository's host, which cannot run here: they parse, and run what `.ci/run` runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def targets_of(script: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z][\w-]*)", script))


def commands(workflow: dict[str, Any]) -> list[str]:
    """What the jobs run, with the values of their matrix in place."""
    found = []
    for job in workflow["jobs"].values():
        variants = job.get("strategy", {}).get("matrix", {}).get("target", [""])
        steps = [step["run"] for step in job["steps"] if "run" in step]
        found += [step.replace("${{ matrix.target }}", variant) for step in steps for variant in variants]
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_names_targets_that_exist(path: Path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@v[\d.]+", step["uses"]) for step in job["steps"] if "uses" in step)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets_of("\n".join(commands(workflow))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_tests_are_those_of_the_script_on_every_supported_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    assert targets_of("\n".join(commands(workflow))) == targets_of((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classifiers = re.findall(r"Programming Language :: Python :: (3\.\d+)", pyproject)
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == classifiers


def test_the_form_for_reports_parses():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
