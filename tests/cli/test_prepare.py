"""`skipdecode prepare`: from records to a tuned directory by one clock; what the same command finds again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skipdecode.cli import main
from skipdecode.common.journal import KeptValues
from skipdecode.models.fit import FIT_FILE, Fit
from skipdecode.models.loading.hub import load_model
from skipdecode.models.loading.ref import ModelRef
from skipdecode.performance.cost import CostModel
from tuning_data import LAYERS, records, save_model, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("prepare")
    save_model(where / "model")
    write_jsonl(where / "train.jsonl", records(24))
    write_jsonl(where / "dev.jsonl", records(12, seed=1))
    cost = CostModel.of_step(LAYERS, 16, 0.001, 0.002)
    (where / "cost.json").write_text(json.dumps(cost.to_dict()))
    return where


def arguments(place: Path, *more: str) -> list[str]:
    files = [f"--{name}={place / name}.jsonl" for name in ("train", "dev")]
    form = ["--prompt-template", "{colour} {thing}\\n", "--response-field", "ref"]
    other = ["--target-speedup", "1.3", "--cost", str(place / "cost.json"), "--out", str(place / "out")]
    return ["prepare", str(place / "model"), *files, *form, *other, "--json", "--resume", *more]


def said(capsys: Any, command: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(command) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_minutes_are_shared_and_the_same_command_goes_on(place: Path, capsys: Any) -> None:
    rank = ("--fit-rank", "4", "--distill-weight", "0.5", "--sampled-speedups", "1", "--prompt-depths", "0-3")
    fitted = said(capsys, arguments(place, "--minutes", "0", *rank))
    assert {row["minutes"] for row in fitted["rows"]} == {0.0}
    assert any(row["full_depth"] and row["kept"] == pytest.approx(1) for row in fitted["rows"])
    assert Fit.load(place / "out" / "fit" / FIT_FILE).about["rank"] == 4
    took = fitted["seconds"]["fit"]

    minutes = f"{took / 60 + 0.08:.3f}"
    tuned = said(capsys, arguments(place, "--minutes", minutes, *rank))
    assert tuned["seconds"]["fit"] == took  # the fit is taken over
    assert tuned["minutes"] == pytest.approx(float(minutes))
    assert len({row["minutes"] for row in tuned["rows"]}) == 2
    assert len(tuned["kept_by_minutes"]) == 2
    assert all(speedup >= 1 for speedup in tuned["speedup_that_keeps"].values())
    assert tuned["dev_loss"]
    assert (place / "out" / "kept.png").read_bytes().startswith(b"\x89PNG")
    model = tuned["next"][0].split()[2]
    assert load_model(model).schedule.name == "calibrated-1.3x-wall"
    assert load_model(model).schedule.prompt_layers() == (0, 1, 2, 3)
    assert json.loads((Path(model) / "recipe.json").read_text())["options"]["distill_weight"] == 0.5
    assert {schedule.nominal_speedup > 1 for schedule in ModelRef(model).recipe.tuned_under} == {True, False}

    assert said(capsys, arguments(place, "--minutes", minutes, *rank)) == tuned  # nothing is done again
    assert said(capsys, arguments(place, "--minutes", str(took / 60), *rank))["minutes"] == 0  # none are left

    assert main(arguments(place, "--minutes", "0", "--seed", "1", *rank)) == 2
    assert "seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--self"], "--train"),
        (["--dev", ""], "--dev"),
        (["--target-speedup", "1"], "--target-speedup"),
        (["--prompts", "x.jsonl"], "--prompts"),
        (["--prompt-depths", "99"], "99"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(place: Path, capsys: Any, more: list[str], named: str) -> None:
    assert main([*arguments(place), *more, "--out", str(place / "refused")]) == 2
    assert named in capsys.readouterr().err
    assert not (place / "refused" / "fit").exists()


def test_a_refused_command_leaves_nothing_behind_and_an_interrupted_fit_is_continued(
    place: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(place / "bad.jsonl", [{"colour": "red"}])
    command = [*arguments(place, "--minutes", "0"), "--out", str(place / "corrected"), "--no-fit"]
    command.remove("--resume")
    assert main([*command, "--train", str(place / "bad.jsonl")]) == 2
    assert "bad.jsonl" in capsys.readouterr().err
    put, measured = KeptValues.put, []

    def put_three(kept: KeptValues, key: str, value: Any) -> None:
        if len(measured) == 3:
            raise KeyboardInterrupt
        put(kept, key, value)
        measured.append(key)

    monkeypatch.setattr(KeptValues, "put", put_three)
    assert main(command) == 130
    monkeypatch.undo()
    assert main(command) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
