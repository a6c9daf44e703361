"""`skipdecode.tune`: the same from Python as from the command line, with a loaded model and lists of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import skipdecode
from fits import random_fit
from skipdecode import LLM, Schedule
from skipdecode.cli import main
from skipdecode.errors import DataError, OptionError, UsageError
from skipdecode.generation.self_generated import TRAIN_FILE
from textgen_tools import save_tiny_model
from tuning_data import LAYERS, records, save_model, write_jsonl

FIELDS = {"prompt_template": "{colour} {thing}\n", "response_field": "ref"}
PACE: dict[str, Any] = {"steps": 3, "batch_size": 4, "precision": "fp32", "lora_rank": 2}
FLAGS = ["--steps", "3", "--batch-size", "4", "--precision", "fp32"]
TRAIN, DEV = records(12), records(6, seed=1)


def words(llm: LLM) -> list[Any]:
    return [llm.generate("red car", max_new_tokens=8)[0].tokens, *llm.loaded.model.state_dict().values()]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("engine", ["fast", "transformers"])
def test_a_loaded_model_is_tuned_as_by_the_command_line_and_stays_as_it_is(
    tmp_path: Path, engine: str, full: bool
) -> None:
    model = str(save_model(tmp_path / "model"))
    files = [str(write_jsonl(tmp_path / name, rows)) for name, rows in (("train", TRAIN), ("dev", DEV))]
    command = ["tune", model, "--train", files[0], "--dev", files[1], "--out", str(tmp_path / "a"), *FLAGS]
    fields = ["--prompt-template", "{colour} {thing}\\n", "--response-field", "ref", "--schedule", "2x"]
    kind = ["--full"] if full else ["--lora-rank", "2"]
    assert main([*command, *kind, *fields]) == 0
    llm = LLM(model, engine=engine)
    before = words(llm)
    pace = PACE | ({"full": True, "lora_rank": None} if full else {})
    tuned = skipdecode.tune(llm, TRAIN, DEV, out=tmp_path / "b", schedule="2x", **FIELDS, **pace)
    assert words(llm)[0] == before[0]
    assert all(map(torch.equal, words(llm)[1:], before[1:]))
    one, other = (json.loads((tmp_path / name / "recipe.json").read_text()) for name in "ab")
    for name in ("options", "schedule", "checkpoint", "base", "prompt"):
        assert one[name] == other[name]
    assert one["result"]["best_dev_loss"] == tuned.result["best_dev_loss"] == min(x for _, x in tuned.dev_losses)
    assert tuned.schedule.name == skipdecode.load(tuned.path).checkpoint.schedule.name == "skipdecode-2x"
    assert str(tmp_path / "b") in repr(tuned)


def test_a_fit_is_taken_as_an_object_or_from_beside_the_schedule(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    loaded = skipdecode.load(model, dtype="float32")
    schedule = Schedule.even(LAYERS, 2)
    fit = random_fit(loaded.model, [schedule.prompt_layers()])
    (tmp_path / "fit").mkdir()
    fit.save(tmp_path / "fit" / "skipdecode.fit")
    schedule.save(tmp_path / "fit" / "schedule.json")
    losses = []
    for name, how in (
        ("object", {"schedule": schedule, "fit": fit}),
        ("folder", {"schedule": schedule, "fit": tmp_path / "fit"}),
        ("beside", {"schedule": tmp_path / "fit" / "schedule.json"}),
    ):
        for of, start in (("loaded", loaded), ("name", model)):
            tuned = skipdecode.tune(start, TRAIN, DEV, out=tmp_path / name / of, **how, **FIELDS, **PACE)
            assert (tuned.path / "skipdecode.fit").is_file()
            losses.append(tuned.result["best_dev_loss"])
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-3)  # a file has the numbers in half precision
    assert skipdecode.models.fit.fit_of(loaded.model) is None  # type: ignore[attr-defined]


def test_own_answers_have_other_defaults_which_a_call_replaces(tmp_path: Path) -> None:
    llm = LLM(save_tiny_model(tmp_path / "model", context=512))
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"say {c}"} for c in "abcdefghij"])
    own = {"self": True, "prompts": str(prompts), "self_tokens": 400}
    tuned = skipdecode.tune(llm, out=tmp_path / "a", **own, **PACE)
    options = tuned.recipe["options"]
    assert (options["distill_weight"], options["sampled_speedups"]) == (1, [1, 1.25])
    assert tuned.schedule.nominal_speedup == pytest.approx(1.5, abs=0.2)
    again = skipdecode.tune(llm, out=tmp_path / "b", recipe=tmp_path / "a" / "recipe.json", sampled_speedups=())
    assert again.recipe["options"] == options | {"sampled_speedups": []}
    assert again.schedule == tuned.schedule
    assert (tmp_path / "a" / TRAIN_FILE).read_bytes() == (tmp_path / "b" / TRAIN_FILE).read_bytes()
    with pytest.raises(UsageError, match="`train` and `self` exclude each other"):
        skipdecode.tune(llm, TRAIN, out=tmp_path / "c", **own, **PACE)


def test_wrong_calls_are_refused_with_the_names_of_python(tmp_path: Path) -> None:
    model, call = str(save_model(tmp_path / "model")), {"out": tmp_path / "out", **PACE}
    with pytest.raises(UsageError, match="no option 'step'"):
        skipdecode.tune(model, TRAIN, DEV, **call, step=3)
    with pytest.raises(UsageError, match="`out` is missing"):
        skipdecode.tune(model, TRAIN, DEV, **call | {"out": None})
    with pytest.raises(OptionError, match=r"^steps=0 is not accepted"):
        skipdecode.tune(model, TRAIN, DEV, **call | {"steps": 0})
    with pytest.raises(UsageError, match="`response_field` is missing"):
        skipdecode.tune(model, TRAIN, DEV, **call, prompt_field="colour")
    with pytest.raises(DataError, match="line 2: missing field: 'ref'"):
        skipdecode.tune(model, [TRAIN[0], {"colour": "red", "thing": "x"}], DEV, **call, **FIELDS)
    assert not (tmp_path / "out").exists()
