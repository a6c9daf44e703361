"""The store of models: whole or not there, one builder at a time, honest listing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.beside import add_model, cached_models, find_model

# A builder that writes half of a model and then dies, or takes its time.
BUILDER = """
import os, sys, time
from skipdecode.models.loading.beside import add_model
def build(folder):
    (folder / "config.json").write_text("{}")
    with open(sys.argv[1], "a") as log: log.write("built\\n")
    if sys.argv[2] == "die": os._exit(9)
    time.sleep(1)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    return "a test"
print(add_model("some-model", build))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))


def start(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", BUILDER, str(tmp_path / "log"), how]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def files(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache" / "models").iterdir() if not p.name.endswith(".lock"))


def test_a_killed_build_never_shows_and_the_next_one_clears_it_away(tmp_path: Path) -> None:
    killed = start(tmp_path, "die")
    killed.communicate(timeout=60)
    assert killed.returncode == 9
    assert len(files(tmp_path)) == 1  # its leftover
    assert find_model("some-model") is None
    assert cached_models() == []
    second = start(tmp_path, "finish")
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert files(tmp_path) == ["some-model"]
    (model,) = cached_models()
    assert (model["name"], model["source"], model["path"]) == ("some-model", "a test", str(find_model("some-model")))
    assert model["bytes"] == sum(p.stat().st_size for p in Path(model["path"]).iterdir()) > 100


def test_of_two_processes_one_builds_and_both_get_the_model(tmp_path: Path) -> None:
    both = [start(tmp_path, "finish"), start(tmp_path, "finish")]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {out.strip() for out, _ in outputs} == {str(tmp_path / "cache" / "models" / "some-model")}
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> str:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_model("some-model", build)
    assert files(tmp_path) == []


def test_a_full_disk_names_the_cache_and_what_to_do(tmp_path: Path) -> None:
    def build(folder: Path) -> str:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelLoadError, match=r"cannot be stored in .*No space left on device.*SKIPDECODE_CACHE"):
        add_model("some-model", build)
    assert files(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="set SKIPDECODE_CACHE to a directory you can write to"):
        add_model("some-model", lambda folder: "never")


@pytest.mark.skipif(os.name == "nt", reason="file modes")
def test_all_files_of_a_model_have_the_usual_mode(tmp_path: Path) -> None:
    def build(folder: Path) -> str:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x")
        (folder / "model.safetensors").chmod(0o600)
        return "a test"

    path = add_model("some-model", build)
    assert len({p.stat().st_mode for p in path.iterdir()}) == 1
