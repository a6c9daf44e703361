"""The fit of a checkpoint: found in directories, adapters and on the hub, and noticed where it is missing."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import save_adapter, save_checkpoint
from fits import random_fit
from hub_server import hub_of, use_hub
from skipdecode import LLM, Schedule, attach
from skipdecode.cli import main
from skipdecode.errors import FitError, ModelLoadError
from skipdecode.learning.checkpoint import save_tuned
from skipdecode.models.carried import FIT_FILE, RECIPE_FILE, SCHEDULE_FILE
from skipdecode.models.fit import Fit, fit_of, keep_fit
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.base_weights import base_sample
from skipdecode.models.loading.beside import beside
from skipdecode.models.loading.hub import load_model
from skipdecode.models.loading.ref import ModelRef
from tiny import LAYERS, tiny_model

LOWER = (0, 1, 2)
SCHEDULE = replace(Schedule.even(LAYERS, (5,), name="half"), prompt=LOWER)
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, and an adapter of a base model, each tuned with a fit."""
    pytest.importorskip("peft")
    where = tmp_path_factory.mktemp("tuned")
    base = where / "base"
    save_checkpoint(base)
    for name in ("whole", "adapter"):
        loaded = load_model(str(base), device="cpu")
        keep_fit(loaded.model, random_fit(loaded.model, [LOWER], seed=len(name)))
        model = loaded.model if name == "whole" else adapted(loaded.model)
        save_tuned(model, loaded.tokenizer, SCHEDULE, where / name, base_name=str(base))
    return where


def adapted(model: Any, target: str = "q_proj") -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=[target], task_type="CAUSAL_LM", init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a head that shares its tensor
        return peft.get_peft_model(model, config)


@torch.no_grad()
def text(model: Any, schedule: Schedule | None = None, fit: Fit | None = None) -> list[int]:
    with attach(model, schedule, fit) as attached:
        return attached.model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()


@pytest.fixture(params=["whole", "adapter"])
def checkpoint(request: Any, tuned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tuned / request.param, tmp_path / "checkpoint"))


def test_a_missing_dangling_or_exchanged_fit_is_refused(checkpoint: Path, capsys: Any) -> None:
    file = checkpoint / FIT_FILE
    whole = file.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(FitError, match=words):
            load_model(str(checkpoint), device="cpu")
        assert main(["generate", str(checkpoint), "red", "--max-new-tokens", "2"]) == 2
        assert words in capsys.readouterr().err

    file.unlink()
    refused("is missing")
    file.symlink_to(checkpoint / "nowhere")
    refused("no such file")
    file.unlink()
    random_fit(tiny_model("llama"), [LOWER], seed=99).save(file)
    refused("is not the one")
    file.write_bytes(whole)
    load_model(str(checkpoint), device="cpu")


def test_a_recipe_that_began_with_a_fit_needs_one(checkpoint: Path) -> None:
    """Checkpoints of earlier versions have no digest in their config."""
    for name in ("config.json", "adapter_config.json"):
        if (file := checkpoint / name).is_file():
            file.write_text(file.read_text().replace('"skipdecode_fit"', '"another"'))
    load_model(str(checkpoint), device="cpu")
    (checkpoint / FIT_FILE).unlink()
    load_model(str(checkpoint), device="cpu")  # nothing says that there was a fit
    recipe = {"options": {}, "checkpoint": {"fit": "0123456789abcdef"}}
    (checkpoint / RECIPE_FILE).write_text(json.dumps(recipe))
    with pytest.raises(FitError, match="is missing"):
        load_model(str(checkpoint), device="cpu")
    (checkpoint / RECIPE_FILE).write_text(json.dumps(recipe | {"exported": {}}))
    load_model(str(checkpoint), device="cpu")


def test_another_fit_beside_the_schedule_is_used_where_the_own_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "fit").mkdir()
    SCHEDULE.save(tmp_path / "fit" / "schedule.json")
    random_fit(tiny_model("llama"), [LOWER], seed=99).save(tmp_path / "fit" / FIT_FILE)
    (checkpoint / FIT_FILE).unlink()
    loaded = load_model(ModelRef(str(checkpoint), (str(tmp_path / "fit" / "schedule.json"),)), device="cpu")
    assert fit_of(loaded.model).digest() == Fit.load(tmp_path / "fit" / FIT_FILE).digest()


def test_attach_finds_the_fit_of_a_model_that_transformers_loaded(tuned: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(shutil.copytree(tuned / "whole", tmp_path / "whole"))
    expected = text(load_model(str(folder), device="cpu").model)
    assert text(AutoModelForCausalLM.from_pretrained(folder)) == expected
    bare = AutoModelForCausalLM.from_pretrained(folder)
    keep_fit(bare, None)
    assert text(bare) != expected
    (folder / FIT_FILE).unlink()
    model = AutoModelForCausalLM.from_pretrained(folder)
    attach(model, Schedule.full(LAYERS)).detach()  # full depth needs no fit
    with pytest.raises(FitError, match="is missing"):
        attach(model)
    with attach(model, Schedule.full(LAYERS)) as attached, pytest.raises(FitError, match="is missing"):
        attached.schedule = SCHEDULE


def test_attach_says_that_peft_loads_no_fit(tuned: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    expected = text(load_model(str(tuned / "adapter"), device="cpu").model)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tuned / "base"), tuned / "adapter")
    with pytest.raises(FitError, match="was not loaded with it"):
        attach(model)
    with pytest.raises(FitError):
        attach(model, SCHEDULE)
    assert text(model, fit=Fit.load(tuned / "adapter" / FIT_FILE)) == expected


def test_an_adapter_without_a_schedule_takes_its_base_s_schedule_and_fit(tuned: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", str(tuned / "whole"))
    loaded = load_model(str(tmp_path / "adapter"), device="cpu")
    assert loaded.schedule == SCHEDULE
    assert fit_of(loaded.model).digest() == Fit.load(tuned / "whole" / FIT_FILE).digest()
    text(loaded.model)


def test_merged_and_saved_again_a_checkpoint_keeps_its_fit(tuned: Path, tmp_path: Path) -> None:
    loaded = load_model(str(tuned / "adapter"), device="cpu")
    expected = text(loaded.model)
    save_tuned(merge_adapter(loaded.model), loaded.tokenizer, SCHEDULE, tmp_path / "merged")
    merged = load_model(str(tmp_path / "merged"), device="cpu").model
    assert text(merged) == expected
    keep_fit(merged, None)
    save_tuned(merged, loaded.tokenizer, SCHEDULE, tmp_path / "without")
    assert fit_of(load_model(str(tmp_path / "without"), device="cpu").model) is None


def test_a_merge_that_unties_the_head_keeps_the_fit(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_model("llama", tie_word_embeddings=True)
    fit = random_fit(model, [LOWER])
    fit.about["base"] = base_sample(model)
    keep_fit(model, fit)
    tuned = adapted(model, "lm_head").eval()
    expected = text(tuned, SCHEDULE)
    save_tuned(merge_adapter(tuned), None, SCHEDULE, tmp_path / "merged")
    merged = load_model(str(tmp_path / "merged"), device="cpu", require_tokenizer=False).model
    assert not merged.config.tie_word_embeddings
    assert text(merged) == expected


@pytest.fixture
def hub(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with hub_of({"owner/whole": tuned / "whole", "owner/base": tuned / "base"}) as address:
        use_hub(address, tmp_path, monkeypatch)
        yield address


def test_a_hub_id_brings_its_fit_and_keeps_it_without_the_hub(hub: str, tuned: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = LLM(str(tuned / "whole"), device="cpu").generate("red", 8)[0].tokens
    assert LLM("owner/whole", device="cpu").generate("red", 8)[0].tokens == expected
    assert fit_of(load_model("owner/base", device="cpu").model) is None
    assert text(AutoModelForCausalLM.from_pretrained("owner/whole")) == text(load_model(str(tuned / "whole")).model)


def test_a_hub_that_stops_answering_is_not_a_checkpoint_without_a_fit(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_of({"owner/whole": tuned / "whole"}) as address:
        use_hub(address, tmp_path, monkeypatch)
        load_model("owner/whole", device="cpu")
        assert beside("owner/whole", SCHEDULE_FILE) is None
    assert beside("owner/whole", SCHEDULE_FILE) is None  # as the hub said before
    with pytest.raises(ModelLoadError, match="does not say"):
        beside("owner/other", SCHEDULE_FILE)
    again = load_model("owner/whole", device="cpu")
    assert fit_of(again.model) is not None
