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
from skipdecode.models.families import FAMILIES, decoder_layers
from skipdecode.models.gate import query_projection
from skipdecode.models.loading.store import add_model
from tiny import LAYERS, tiny_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))


def report(capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["info", "--json"]) == 0
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


def test_extras_are_those_of_the_package_with_absent_ones_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    real = importlib.metadata.version

    def without_peft(package: str) -> str:
        if package == "peft":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", without_peft)
    extras = report(capsys)["extras"]
    assert {"gguf", "peft", "plot"} <= set(extras)
    assert "dev" not in extras
    assert extras["peft"] == {"peft": None}
    assert extras["plot"] == {"matplotlib": real("matplotlib")}
    main(["info"])
    assert "absent: peft (pip install 'skipdecode[peft]')" in capsys.readouterr().out


def test_cached_models_are_listed_with_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    def build(folder: Path) -> str:
        (folder / "model.safetensors").write_bytes(bytes(3_000_000))
        return "somewhere"

    path = add_model("some-model", build)
    (model,) = report(capsys)["cache"]["models"]
    assert model == {"name": "some-model", "path": str(path), "bytes": 3_000_010, "source": "somewhere"}
    main(["info"])
    assert "some-model   3 MB, somewhere" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "parts"), [("llama", "keys and values"), ("gpt2", "queries, keys and values")])
def test_a_model_s_line_says_what_prompts_pay_in_layers_that_they_do_not_run(
    family: str, parts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(family).config.save_pretrained(tmp_path / family)
    assert main(["info", str(tmp_path / family)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{family}, {LAYERS} layers" in line
    assert f"makes {parts} of them" in line
    assert main(["info", str(tmp_path / family), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["projects_alone"] == (family == "llama")


@pytest.mark.parametrize(
    ("family", "changes", "engine"),
    [
        ("gpt2", {}, "fast"),
        ("bloom", {}, "transformers (no fast path for model type 'bloom'"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "transformers (its final_logit_softcapping of 30.0"),
    ],
)
def test_a_model_s_line_says_which_engine_decodes_it(
    family: str, changes: dict[str, Any], engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(family, **changes).config.save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    assert f"; engine {engine}" in capsys.readouterr().out
    assert main(["info", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"].startswith(engine)


def test_families_that_cannot_make_keys_and_values_alone_are_these() -> None:
    alone = {name: query_projection(decoder_layers(tiny_model(name))[0]) is not None for name in FAMILIES}
    fused = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "persimmon", "phi3"}
    assert {name for name, is_alone in alone.items() if not is_alone} == fused


def test_text_names_what_a_bug_report_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for said in (
        f"skipdecode {skipdecode.__version__}",
        f"torch {torch.__version__}",
        "cores",
        str(tmp_path / "cache"),
    ):
        assert said in text
    assert all(family in text for family in FAMILIES)
    assert max(map(len, text.splitlines())) < 200
