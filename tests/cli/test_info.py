"""`skipdecode info`: the report as text and as JSON."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import save_adapter
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.engine.kernels import targets
from skipdecode.engine.kernels.library import instructions, load_library
from skipdecode.engine.kernels.targets import find_compiler
from skipdecode.models.families import FAMILIES, decoder_layers, projection
from skipdecode.models.loading.store import add_model
from textgen_tools import save_tiny_model
from tiny import LAYERS, OPTIONS, tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")


def report(capsys: Any, *arguments: str) -> Any:
    assert main(["info", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report_fits_a_screen(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["info"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 24
    found = report(capsys)
    assert found["python"].startswith(platform.python_version())
    assert f"torch {torch.__version__}" in found["packages"]
    assert torch.backends.cpu.get_cpu_capability() in found["cpu"]
    assert found["cache"] == str(tmp_path / "cache")
    assert found["C++ compiler"] == find_compiler()
    assert found["CPU kernels"].startswith(f"{instructions(load_library())}; int8")
    monkeypatch.setattr(targets, "find_compiler", lambda: None)
    assert "g++" in report(capsys)["C++ compiler"]


def test_types_are_listed_on_request(capsys: Any) -> None:
    assert {name for names in report(capsys, "--types").values() for name in names.split(", ")} == {*FAMILIES}


def test_cached_models_are_listed_with_their_size(capsys: Any) -> None:
    def build(folder: Path) -> str:
        (folder / "model.safetensors").write_bytes(bytes(3_000_000))
        return "somewhere"

    add_model("some-model", build)
    assert report(capsys)["  some-model"] == "3 MB, somewhere"


def test_what_prepare_made_is_described(tmp_path: Path, capsys: Any) -> None:
    base, ready = save_tiny_model(tmp_path / "base"), tmp_path / "ready"
    save_adapter(ready / "tuned-6", base)
    schedule = Schedule.from_speedup(LAYERS, 2, 5)
    schedule.save(ready / "tuned-6" / "skipdecode.json")
    recipe = {"options": {}, "schedule": schedule.to_dict(), "prompt": {"template": "{mr}"}}
    (ready / "tuned-6" / "recipe.json").write_text(json.dumps(recipe))
    row = {"name": "full"}, {"name": schedule.name, "request_speedup": 1.5, "kept": 0.97}
    document = {"rows": row, "use": {"model": str(ready / "tuned-6")}}
    (ready / "prepared.json").write_text(json.dumps(document))
    for name in (ready, ready / "tuned-6"):
        found = report(capsys, str(name))
        assert (found["base"], found["template"], found["tuned_under"]) == (base, "{mr}", schedule.name)
        assert schedule.name in found["schedule"]
        assert f"{schedule.name} 1.50x, keeps 97.0%" in found["result"]


@pytest.mark.parametrize(
    ("family", "changes", "engine", "alone"),
    [
        ("llama", {}, "fast", True),
        ("apertus", {}, "fast", True),
        ("gpt2", {}, "fast", False),
        ("bloom", {}, "transformers (no fast path for model type 'bloom'", False),
        ("lfm2", {}, "fast", None),
        ("gemma3_text", {"use_bidirectional_attention": True}, "transformers (its attention to later tokens", True),
    ],
)
def test_a_model_has_its_engine_and_what_prompts_compute_in_layers_that_they_do_not_run(
    family: str, changes: dict[str, Any], engine: str, alone: Any, tmp_path: Path, capsys: Any
) -> None:
    tiny_model(family, **changes).config.save_pretrained(tmp_path)
    found = report(capsys, str(tmp_path))
    assert (found["model_type"], found["num_layers"], found["projects_alone"]) == (family, LAYERS, alone)
    assert found["engine"].startswith(engine)


def test_families_that_cannot_make_keys_and_values_alone_are_these() -> None:
    alone = {name: projection(decoder_layers(tiny_model(name))[0], "q_proj") is not None for name in OPTIONS}
    fused = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "persimmon", "phi3"}
    assert {name for name, is_alone in alone.items() if not is_alone} == fused
