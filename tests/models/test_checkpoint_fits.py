"""The fit of a checkpoint: found in directories, adapters and on the hub, and noticed where it is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import save_adapter, save_checkpoint
from fits import random_fit
from hub_server import hub_of, use_hub
from skipdecode import Schedule, attach
from skipdecode.cli import main
from skipdecode.errors import FitError, ModelLoadError
from skipdecode.models.checkpoint_schedule import ADAPTER_SCHEDULE_FILE, FIT_FILE
from skipdecode.models.fit import Fit, fit_of, set_fit
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.hub import load_model
from skipdecode.models.loading.hub_files import find_file
from skipdecode.models.loading.saving import save_tuned
from skipdecode.models.loading.weights_sample import base_sample
from tiny import LAYERS, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, of a head that shares its tensor
LOWER = (0, 1, 2)
SCHEDULE = replace(Schedule.even(LAYERS, (5,), name="half"), prompt=LOWER)
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, and an adapter of a base model, each tuned with a fit."""
    where = tmp_path_factory.mktemp("tuned")
    base = where / "base"
    save_checkpoint(base)
    for name in ("whole", "adapter"):
        loaded = load_model(str(base), device="cpu")
        set_fit(loaded.model, random_fit(loaded.model, [LOWER], seed=len(name)))
        model = loaded.model if name == "whole" else adapted(loaded.model)
        save_tuned(model, loaded.tokenizer, SCHEDULE, where / name, base_name=str(base))
    return where


def adapted(model: Any, target: str = "q_proj") -> Any:
    config = peft.LoraConfig(r=2, target_modules=[target], task_type="CAUSAL_LM", init_lora_weights=False)
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


def test_another_fit_beside_the_schedule_is_used_where_the_own_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "fit").mkdir()
    SCHEDULE.save(tmp_path / "fit" / "schedule.json")
    random_fit(tiny_model("llama"), [LOWER], seed=99).save(tmp_path / "fit" / FIT_FILE)
    (checkpoint / FIT_FILE).unlink()
    loaded = load_model(open_checkpoint(checkpoint, schedules=[tmp_path / "fit" / "schedule.json"]), device="cpu")
    assert fit_of(loaded.model).digest() == Fit.load(tmp_path / "fit" / FIT_FILE).digest()


def test_attach_finds_the_fit_of_a_model_that_transformers_loaded(tuned: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tuned / "whole", tmp_path / "whole"))
    expected = text(load_model(str(folder), device="cpu").model)
    assert text(AutoModelForCausalLM.from_pretrained(folder)) == expected
    bare = AutoModelForCausalLM.from_pretrained(folder)
    set_fit(bare, None)
    assert text(bare) != expected
    (folder / FIT_FILE).unlink()
    model = AutoModelForCausalLM.from_pretrained(folder)
    attach(model, Schedule.full(LAYERS)).detach()  # full depth needs no fit
    with pytest.raises(FitError, match="is missing"):
        attach(model)
    with attach(model, Schedule.full(LAYERS)) as attached, pytest.raises(FitError, match="is missing"):
        attached.schedule = SCHEDULE


def test_attach_says_that_peft_loads_no_fit(tuned: Path) -> None:
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
    assert loaded.checkpoint.schedule == SCHEDULE
    assert fit_of(loaded.model).digest() == Fit.load(tuned / "whole" / FIT_FILE).digest()
    text(loaded.model)


def test_a_merge_that_unties_the_head_keeps_the_fit(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    fit = random_fit(model, [LOWER])
    fit.about["base"] = base_sample(model)
    set_fit(model, fit)
    tuned = adapted(model, "lm_head").eval()
    expected = text(tuned, SCHEDULE)
    save_tuned(merge_adapter(tuned), None, SCHEDULE, tmp_path / "merged")
    merged = load_model(str(tmp_path / "merged"), device="cpu", require_tokenizer=False).model
    assert not merged.config.tie_word_embeddings
    assert text(merged) == expected


def test_a_hub_id_keeps_its_fit_without_the_hub(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_of({"owner/whole": tuned / "whole"}) as address:
        use_hub(address, tmp_path, monkeypatch)
        expected = text(load_model(str(tuned / "whole"), device="cpu").model)
        assert text(AutoModelForCausalLM.from_pretrained("owner/whole")) == expected
        load_model("owner/whole", device="cpu")
    assert text(load_model("owner/whole", device="cpu").model) == expected
    with pytest.raises(ModelLoadError, match="does not say"):
        find_file("owner/other", ADAPTER_SCHEDULE_FILE)
