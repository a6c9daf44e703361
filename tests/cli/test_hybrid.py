"""One checkpoint with recurrent layers through the verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skipdecode.cli import main
from skipdecode.models.families import FAMILIES
from tuning_data import records, save_model, write_jsonl


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "lfm2"])
def test_a_hybrid_goes_the_whole_way(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_model(tmp_path / "model", model_type=family))
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
def test_layers_that_share_keys_are_planned_for_or_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The search of an order, and export, know nothing of layers that read the keys and values of others."""
    kind = {"model_type": "gemma4_text", "vocab_size_per_layer_input": 259}
    model, out = str(save_model(tmp_path / "model", **kind)), str(tmp_path / "out")
    train = str(write_jsonl(tmp_path / "train.jsonl", records(8, 1)))
    assert main(["info", model]) == 0
    assert json.loads(capsys.readouterr().out)["num_layers"] == 8
    assert main(["plan", model, "--target-speedup", "1.05", "--json", "--seq-len", "8"]) == 0
    schedule = json.loads(capsys.readouterr().out)["schedule"]
    assert schedule["prompt"] == "full"
    assert 1 not in schedule["drop_order"]  # layer 7 reads its keys
    for words, reason in (
        (["plan", model, "--target-speedup", "1.05", "--prompt-layers", "3"], "full or max_exit"),
        (["prepare", model, "--target-speedup", "1.05", "--train", train, "--out", out], "read the keys and values"),
        (["export", model, "--schedule", "1.6x:flat:pmax_exit", "--out", out], "depend on their number"),
    ):
        assert main(words) == 2
        assert reason in capsys.readouterr().err
