"""One checkpoint with recurrent layers through the verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skipdecode.cli import main
from skipdecode.models.families import FAMILIES
from tuning_data import records, save_model, write_jsonl


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "jamba", "lfm2"])
def test_a_model_goes_the_whole_way(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"vocab_size_per_layer_input": 259} if family == "gemma4_text" else {}
    model = str(save_model(tmp_path / "model", model_type=family, **words))
    train, dev = (str(write_jsonl(tmp_path / f"{n}.jsonl", records(n, n))) for n in (60, 16))
    form = ["--prompt-template", "{colour}-{thing}:", "--response-field", "ref"]
    asked = ["--target-speedup", "1.05", "--minutes", "0", "--train", train, "--dev", dev]
    assert main(["prepare", model, *asked, "--out", str(tmp_path / "ready"), *form, "--debug"]) == 0
    schedule, tuned = str(tmp_path / "ready" / "fit" / "schedule.json"), str(tmp_path / "tuned")
    asked = ["--schedule", schedule, "--steps", "2", "--train", train, "--dev", dev]
    assert main(["tune", model, *asked, "--out", tuned, *form]) == 0
    capsys.readouterr()
    assert main(["generate", tuned, "red-car:", "--no-template", "--max-new-tokens", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] > 0
    assert main(["generate", model, "red", "--schedule", "2x:p3"]) == 2
    assert "full or max_exit" in capsys.readouterr().err
    wanted = ["--schedule", "2x:flat:pmax_exit", "--out", str(tmp_path / "small")]
    assert main(["export", model, *wanted]) == 0


@pytest.mark.skipif("gemma4_text" not in FAMILIES, reason="this transformers has no Gemma 4")
def test_layers_that_lend_keys_are_dropped_after_their_readers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kind = {"model_type": "gemma4_text", "vocab_size_per_layer_input": 259}
    model, out = str(save_model(tmp_path / "model", **kind)), str(tmp_path / "out")
    train = str(write_jsonl(tmp_path / "train.jsonl", records(8, 1)))
    assert main(["plan", model, "--target-speedup", "1.05", "--json", "--seq-len", "8"]) == 0
    schedule = json.loads(capsys.readouterr().out)["schedule"]
    assert (schedule["prompt"], 1 in schedule["drop_order"]) == ("full", False)  # layer 7 reads the keys of 1
    prepare = ["prepare", "--train", train, "--out", out, "--prompt-depths", "3"]
    for words in (["plan", "--prompt-layers", "3"], prepare):
        assert main([words[0], model, "--target-speedup", "1.05", *words[1:]]) == 2
        assert "full or max_exit" in capsys.readouterr().err
