"""The round for a GPU, rehearsed: every step leaves its file, and a second call has nothing to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from textgen_tools import subprocess_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_round.py"


@pytest.mark.slow
@pytest.mark.model
def test_a_rehearsal_does_every_step_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, SCRIPT, "--rehearse", "--minutes", "6", "--out", out, "--work", tmp_path / "work"]
    for state in ("done", "done before"):
        subprocess.run(list(map(str, command)), env=subprocess_environment(), check=True, timeout=600)
        steps = json.loads((out / "round.json").read_text())["steps"]
        assert {"gpu-tests", "tune-e2e", "eval-e2e"} < set(steps)
        assert {step["state"] for step in steps.values()} == {state}
    for name in steps:
        assert (out / f"{name}.{'xml' if name == 'gpu-tests' else 'json'}").stat().st_size > 0
    assert not any(file.suffix in (".safetensors", ".bin") for file in out.iterdir())
