"""`skipdecode info`: the report as text and as JSON."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import skipdecode
from skipdecode.cli import main
from skipdecode.models.families import FAMILIES, decoder_layers, projection
from skipdecode.models.loading.beside import add_model
from tiny import LAYERS, OPTIONS, tiny_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))


def report(capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["info"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_tells_versions_devices_families_and_an_empty_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys)
    assert found["skipdecode"] == skipdecode.__version__
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == str(torch.__version__)
    assert found["cpu"]["cores"] >= 1
    assert found["cpu"]["simd"] == torch.backends.cpu.get_cpu_capability()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["model_types"] == sorted(FAMILIES)
    assert set(found["fast_model_types"]) < set(FAMILIES)
    assert found["cache"] == {"path": str(tmp_path / "cache"), "models": []}
    assert not (tmp_path / "cache").exists()


def test_cached_models_are_listed_with_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    def build(folder: Path) -> str:
        (folder / "model.safetensors").write_bytes(bytes(3_000_000))
        return "somewhere"

    path = add_model("some-model", build)
    (model,) = report(capsys)["cache"]["models"]
    assert model == {"name": "some-model", "path": str(path), "bytes": 3_000_010, "source": "somewhere"}


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
    family: str, changes: dict[str, Any], engine: str, alone: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(family, **changes).config.save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model_type"], found["num_layers"], found["projects_alone"]) == (family, LAYERS, alone)
    assert found["engine"].startswith(engine)


def test_families_that_cannot_make_keys_and_values_alone_are_these() -> None:
    alone = {name: projection(decoder_layers(tiny_model(name))[0], "q_proj") is not None for name in OPTIONS}
    fused = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "persimmon", "phi3"}
    assert {name for name, is_alone in alone.items() if not is_alone} == fused
