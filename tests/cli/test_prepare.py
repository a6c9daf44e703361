"""`prepare`: from records to a tuned directory by one clock; what the same command finds again."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from matplotlib import image

import skipdecode
from checkpoints import save_adapter
from fits import random_fit
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.common.jsonl import prepared_use
from skipdecode.common.resume import ResumeLog
from skipdecode.cost.model import CostModel
from skipdecode.data.batches import collate
from skipdecode.data.examples import Example
from skipdecode.errors import OutputError, UsageError
from skipdecode.generation.self_generated import TEST_FILE, TRAIN_FILE
from skipdecode.generation.speed import squeezed
from skipdecode.learning.clock import Clock
from skipdecode.learning.fitting import make_fit
from skipdecode.learning.prepared import neighbours
from skipdecode.learning.settings import PREPARE_DIRECTORY, SHORT, FitOptions
from skipdecode.learning.stage_log import Stages
from skipdecode.learning.stages import Evaluation, FullDepth, Layers, Tuning
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.fit import Fit
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.hub import load_model
from textgen_tools import read_rows, save_tiny_model
from tiny import tiny_model
from tuning_data import LAYERS, records, save_model, tuning_model, write_jsonl


@pytest.fixture(autouse=True)
def every_score_counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models do no task."""
    if "scores_nothing" not in request.node.name:
        monkeypatch.setattr("skipdecode.evaluation.compare._CLEAR", 1e-9)
        monkeypatch.setattr("skipdecode.evaluation.compare.NEAR_ZERO", 0)


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
    return ["prepare", str(place / "model"), *files, *form, *other, "--json", *more]


def said(capsys: Any, command: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(command) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def enough(fitted: dict[str, Any]) -> float:
    """Minutes that leave some seconds to tune."""
    took = fitted["seconds"]
    return (took["layers"] + 2.2 * took["evaluation 0"] + 30) / 60


NAMES = ["Ada", "Ben", "Cem", "Dov", "Eva", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo"]


def named_records(path: Path) -> Path:
    rows = [{"colour": "red", "thing": name, "ref": f"a red {name}"} for name in NAMES * 2]
    return write_jsonl(path, rows)


def test_responses_are_learned_under_invented_names_too(place: Path, tmp_path: Path, capsys: Any) -> None:
    data = named_records(tmp_path / "named.jsonl")
    more = (f"--train={data}", f"--dev={data}", "--no-fit", "--out", str(tmp_path / "out"))
    said(capsys, arguments(place, "--minutes", "0", *more))
    learned = read_rows(tmp_path / "out" / "records" / "named-train.jsonl")
    assert [row["thing"] for row in learned[:24]] == NAMES * 2
    assert {row["thing"] for row in learned[24:]}.isdisjoint(NAMES)
    assert [row["ref"] for row in learned] == [f"a red {row['thing']}" for row in learned]


def test_a_directory_of_prepare_can_be_moved(place: Path, capsys: Any) -> None:
    said(capsys, arguments(place, "--minutes", "0", "--fit-rank", "4"))
    moved = (place / "out").rename(place / "moved")
    assert prepared_use(moved)["schedule"] == str(moved / "fit" / "schedule.json")


def test_minutes_are_shared_and_the_same_command_goes_on(place: Path, capsys: Any) -> None:
    rank = ("--fit-rank", "4", "--distill-weight", "0.5", "--sampled-speedups", "1", "--prompt-depths", "0-3")
    fitted = said(capsys, arguments(place, "--minutes", "0", *rank))
    assert {row["minutes"] for row in fitted["rows"]} == {0.0}
    assert any(row["full_depth"] and row["kept"] == pytest.approx(1) for row in fitted["rows"])
    assert Fit.load(place / "out" / "fit" / FIT_FILE).about["rank"] == 4
    by_speed = image.imread(place / "out" / "kept.png")

    minutes = f"{enough(fitted):.3f}"
    tuned = said(capsys, arguments(place, "--minutes", minutes, *rank))
    assert tuned["full_depth"]["scores"].keys() == {"bleu", "rougeL", "chrf"}  # the model did not do the task
    assert load_model(str(place / "out" / "full")).checkpoint.schedule.is_full
    assert tuned["minutes"] == pytest.approx(float(minutes))
    assert len({row["minutes"] for row in tuned["rows"]}) == len(tuned["kept_by_minutes"]) == 2
    assert tuned["dev_loss"]
    # Beside the scores by speed-up, the target's by minutes.
    assert image.imread(place / "out" / "kept.png").shape[1] == 2 * by_speed.shape[1]
    model = prepared_use(place / "out")["model"]
    assert load_model(model).checkpoint.schedule.name == tuned["target"]
    assert tuned["target"].startswith("calibrated-p4-")
    assert load_model(model).checkpoint.schedule.prompt_layers() == (0, 1, 2, 3)
    assert json.loads((Path(model) / "recipe.json").read_text())["options"]["distill_weight"] == 0.5
    assert {schedule.nominal_speedup > 1 for schedule in open_checkpoint(model).recipe.tuned_under} == {True, False}

    # Merged, as docs/vllm.md has it, the checkpoint keeps its fit, and what was measured.
    assert main(["export", model, "--format", "merged", "--out", str(place / "merged")]) == 0
    for each in (Path(model), place / "merged"):
        card = ModelCard.load(each / "README.md")
        assert re.search(tuned["target"] + r", after [\d.]+ min *\| \d\.\d\dx", card.text)
        assert "](kept.png)" in card.text and (each / "kept.png").is_file()  # noqa: PT018
        assert {"bleu", "rouge", "chrf"} <= {*card.data.metrics}
    assert "skipdecode prepare model --train=train.jsonl" in ModelCard.load(Path(model) / "README.md").text
    capsys.readouterr()
    prompt = ["--no-template", "red car\n", "--max-new-tokens", "12", "--dtype", "float32"]
    adapter, merged = (said(capsys, ["generate", where, *prompt]) for where in (model, str(place / "merged")))
    assert merged["text"] == adapter["text"]
    assert (place / "merged" / FIT_FILE).is_file()

    assert said(capsys, arguments(place, "--minutes", minutes, *rank)) == tuned  # nothing is done again
    # A kill behind the tuning's result, before the log has it.
    with closing(sqlite3.connect(place / "out" / "prepare.sqlite")) as log, log:
        (last,) = log.execute("SELECT rowid FROM entries WHERE key LIKE 'tuning%'").fetchone()
        log.execute("DELETE FROM entries WHERE rowid >= ?", (last,))
    again = said(capsys, arguments(place, "--minutes", minutes, *rank))
    assert again["dev_loss"] == tuned["dev_loss"]
    assert [row["scores"] for row in again["rows"]] == [row["scores"] for row in tuned["rows"]]
    none_left = said(capsys, arguments(place, "--minutes", "0.01", *rank))
    assert none_left["minutes"] == 0
    assert none_left["seconds"]["layers"] == tuned["seconds"]["layers"]  # the fit is taken over
    assert none_left["next"][1].endswith(f"--minutes {none_left['more_minutes']:g}")
    assert main(arguments(place, "--minutes", "0", "--seed", "1", *rank)) == 2
    assert "seed" in capsys.readouterr().err


def test_checkpoints_that_answer(place: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipdecode.learning.prepare._TO_LEARN", 0.9)  # no tuning takes off so much
    names = named_records(tmp_path / "named.jsonl")
    data = [f"--{name}={names}" for name in ("train", "dev")]
    command = arguments(place, *data, "--minutes", "0.7", "--no-fit", "--out", str(tmp_path / "out"))
    found = said(capsys, command)
    assert found["full_depth"]["scores"] is None
    assert not (tmp_path / "out" / "full").exists()
    learned = read_rows(tmp_path / "out" / "answers" / TRAIN_FILE)
    assert {row["ref"] for row in learned}.isdisjoint({row["ref"] for row in read_rows(names)})
    # Half of the prompts have names that no record has: they can only be copied.
    assert 0.3 < sum(row["thing"] in NAMES for row in learned) / len(learned) < 0.7
    copied = {row["name"]: row["names_copied"] for row in found["rows"]}
    assert copied["full"] is not None
    assert copied[found["target"]] is not None
    assert said(capsys, command) == found


def test_responses_are_learned_where_they_teach_more() -> None:
    falling, flat = [(0.0, 2.0), (0.5, 1.0), (1.0, 0.8)], [(0.0, 2.0), (0.5, 1.0), (1.0, 0.97)]
    determined = [(minutes, loss / 4) for minutes, loss in falling]
    assert FullDepth(6, determined, {"bleu": 1.0}).learns_responses
    assert not FullDepth(6, falling, {"bleu": 1.0}).learns_responses  # other writers had written other responses
    assert not FullDepth(6, flat, {"bleu": 1.0}).learns_responses
    assert not FullDepth(6, determined, None).learns_responses
    assert not FullDepth(6, falling, {"bleu": 1.0}).is_learned
    assert FullDepth(6, flat, {"bleu": 1.0}).is_learned  # so a BLEU of 1 is the task's
    assert not FullDepth(6, falling, {"bleu": 1.0}).serves(7)
    assert FullDepth(6, flat, {"bleu": 1.0}).serves(7)


def test_that_nothing_was_tuned_is_said_early_and_last(place: Path, tmp_path: Path, capsys: Any) -> None:
    command = arguments(place, "--minutes", "0.01", "--no-fit", "--out", str(tmp_path / "out"))
    assert main([word for word in command if word != "--json"]) == 0
    printed, notes = capsys.readouterr()
    assert "too few to tune at full depth" in notes
    assert notes.index("0.01 minutes may be too few to tune") < notes.index("0.01 minutes leave 0.0 to tune")
    last = printed.splitlines()[-1]
    assert last.startswith("nothing was tuned: 0.01 minutes left 0.0 for it; this tunes: skipdecode prepare")
    assert "more minutes" not in printed


def test_the_fastest_way_that_keeps_a_share_is_recommended(place: Path, tmp_path: Path, capsys: Any) -> None:
    more = ("--keep", "0.01", "--minutes", "0", "--fit-rank", "4", "--out", str(tmp_path / "out"))
    asked = arguments(place, *more)
    at = asked.index("--target-speedup")
    asked[at : at + 2] = []  # milder schedules are tried too
    found = said(capsys, asked)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["full, w8a8"]["quantization"] == "w8a8"
    assert {found["target"], f"{found['target']}, w8a8"} <= rows.keys()
    assert len([name for name in rows if name.startswith("calibrated-") and "w8a8" not in name]) > 1
    assert all(row["request_speedup_alone"] > 0 for row in rows.values())
    keeping = [row for row in rows.values() if not row["full_depth"] and row["kept"] >= 0.01]
    best, alone = (
        max((row for row in keeping if row[speed] > 1), key=lambda row: row[speed], default=None)
        for speed in ("request_speedup", "request_speedup_alone")
    )
    command = shlex.split(found["next"][0])
    assert ("quantization" in found["use"]) == ("quantization" in (best or {}))
    text = said(capsys, [*command[1:-2], "red hat", "--max-new-tokens", "4"])["text"]
    llm = skipdecode.LLM(tmp_path / "out")
    assert llm.generate(["red hat"], 4)[0].text == text
    assert llm.schedule_of(None).is_full == (found["use"].get("schedule") == "full")
    assert main([word for word in asked if word != "--json"]) == 0
    told = capsys.readouterr().out
    if best is not None:
        assert f"recommended to keep 1%: {best['name']}, {best['request_speedup']:.2f} times as fast" in told
    assert "in batches of 8" in told
    assert ("for one request at a time:" in told) == (alone is not None and alone is not best)


def test_8_bit_weights_count_towards_the_target_and_are_used(
    place: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipdecode.learning.request_target._request_times", lambda *_: (1 / 1.2, 1 / 1.6))
    command = arguments(place, "--quantization", "w8a8", "--minutes", "0.05", "--out", str(tmp_path / "out"))
    at = command.index("--cost")
    command[at : at + 2] = []  # measured
    found = said(capsys, command)
    assert found["target"].endswith(", w8a8")
    assert "0.0" in found["kept_by_minutes"]
    assert found["use"].items() >= {"quantization": "w8a8", "schedule": "./fit/schedule.json"}.items()
    assert skipdecode.LLM(tmp_path / "out").backend.name == "fast-w8a8"


@pytest.mark.parametrize("share", [0.125, 0.3, 0.9])
def test_texts_that_are_cut_run_the_depths_of_whole_ones(share: float) -> None:
    whole = Schedule.from_speedup(24, 1.5, seq_len=120)
    cut = squeezed(whole, share)
    assert cut.mean_budget(round(120 * share)) == pytest.approx(whole.mean_budget(120), rel=0.03)
    assert {cut.layers(i) for i in range(120)} <= {whole.layers(i) for i in range(120)}


@pytest.mark.parametrize("minutes", [0, 1])
def test_a_cost_for_other_layers_is_refused_before_any_work(place: Path, tmp_path: Path, minutes: float) -> None:
    cost, form = tmp_path / "cost.json", {"prompt_template": "{colour} {thing}\n", "response_field": "ref"}
    cost.write_text(json.dumps(CostModel.of_step(2 * LAYERS, 1, 0.001, 0.002).to_dict()))
    with pytest.raises(UsageError) as refused:
        skipdecode.prepare(place / "model", records(24), cost=cost, out=tmp_path / "out", minutes=minutes, **form)
    assert str(refused.value) == f"cost {cost} is for {2 * LAYERS} layers, but the model has {LAYERS}"
    assert not (tmp_path / "out").exists()


def test_in_python_records_and_models_are_objects(place: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", str(place / "model"), tuning_model())
    llm = skipdecode.LLM(tmp_path / "adapter", dtype="bfloat16")
    before = llm.generate(["red hat\n"], 8)
    cost = CostModel.of_step(LAYERS, 16, 0.001, 0.002)
    form = {"prompt_template": "{colour} {thing}\n", "response_field": "ref", "target_speedup": 1.3, "fit_rank": 4}
    call = functools.partial(
        skipdecode.prepare, llm, records(24), records(12, seed=1), cost=cost, out=tmp_path / "out", **form
    )
    fitted = call(minutes=0)
    assert llm.generate(["red hat\n"], 8) == before
    assert fitted.path is None
    assert str(fitted).splitlines()[-1] == "nothing was tuned: minutes 0"
    assert fitted._repr_html_().startswith("<pre>kept")
    target = next(row for row in fitted.rows if row["name"] == fitted.document["target"])
    assert target["name"] == fitted.schedule.name
    assert target["request_speedup"] > 0
    assert len(fitted.llm.generate(["red hat\n"], 8)[0].tokens) <= 8

    tuned = call(minutes=enough(fitted.document))
    with pytest.raises(OutputError, match="seed"):
        call(seed=1)
    # The adapter is merged, into weights of the type that they had.
    found = load_model(tuned.path)
    assert found.checkpoint.schedule == tuned.llm.schedule_of(None) == tuned.schedule
    assert found.model.dtype == torch.bfloat16
    assert tuned.llm.generate(["red hat\n"], 8, template=False)


@pytest.mark.parametrize("task", [False, True])
def test_own_answers_need_prompts_alone(place: Path, tmp_path: Path, task: bool) -> None:
    rows = [{"prompt": f"{row['colour']} {row['thing']} {n}", "ref": row["ref"]} for n, row in enumerate(records(24))]
    form = {"name": "t", "prompt": "{prompt}", "references": ["ref"], "metrics": ["chrf"], "max_new_tokens": 9}
    (tmp_path / "task.yaml").write_text(json.dumps(form))
    prompts: Any = write_jsonl(tmp_path / "rows.jsonl", rows) if task else [row["prompt"] for row in rows]
    cost = CostModel.of_step(LAYERS, 16, 0.001, 0.002)
    options = {"self_tokens": 100, "minutes": 0, "fit": False, "cost": cost, "target_speedup": 1.3}
    options |= {"task": str(tmp_path / "task.yaml")} if task else {}
    model = save_tiny_model(tmp_path / "model", context=512)
    ready, again = (skipdecode.prepare(model, prompts=prompts, out=tmp_path / "out", **options) for _ in range(2))
    assert "time: own answers" in str(ready)
    assert again.document == ready.document
    learned, tested = (
        {row["prompt"]: row for row in read_rows(tmp_path / "out" / "answers" / name)}
        for name in (TRAIN_FILE, TEST_FILE)
    )
    assert len(learned) + len(tested) == len(rows)
    assert len(tested) >= len(rows) / 2
    assert not learned.keys() & tested.keys()
    assert [*ready.rows[0]["scores"]] == ["chrf" if task else "1 / perplexity"]
    assert ("perplexity flatters" in str(ready)) == (not task)
    assert not task or all(tested[row["prompt"]]["ref"] == [row["ref"]] for row in rows if row["prompt"] in tested)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--self"], "--train"),
        (["--target-speedup", "1"], "--target-speedup"),
        (["--prompts", "x.jsonl"], "x.jsonl"),
        (["--prompt-depths", "99"], "99"),
        (["--sampled-speedups", "50"], "50"),
        (["--test", "absent.jsonl"], "absent.jsonl"),
        (["--test", os.devnull], "--test is read several times"),
        (["--quantization", "w8a8"], "leave out --cost"),
        (["--quantization", "w8a8", "--minutes", "0"], "--minutes"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(place: Path, capsys: Any, more: list[str], named: str) -> None:
    assert main([*arguments(place), *more, "--out", str(place / "refused")]) == 2
    assert named in capsys.readouterr().err
    assert not (place / "refused" / "fit").exists()


@pytest.mark.parametrize("name", ["train", "dev", "test"])
def test_a_bad_record_is_refused_or_left_out(place: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    rows = records(10, seed=2)
    bad = write_jsonl(tmp_path / "bad.jsonl", [*rows[:8], {"colour": 3, "ref": "x"}, *rows[8:]])
    out = tmp_path / "out"
    command = [*arguments(place, "--minutes", "0"), f"--{name}", str(bad), "--out", str(out), "--no-fit"]
    assert main(command) == 2
    assert "bad.jsonl: 1 record cannot be used" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--bad-records", "skip"]) == 0
    assert re.search("lines? 9", capsys.readouterr().err)


def test_the_evaluated_records_come_from_all_over_the_file(place: Path, tmp_path: Path) -> None:
    more = ["--minutes", "0", "--no-fit", "--test-records", "3", "--out", str(tmp_path / "out")]
    assert main(arguments(place, *more)) == 0
    runs = list((tmp_path / "out" / "eval-fit").glob("*/outputs.jsonl"))
    assert runs
    assert all(sorted(row["id"] for row in read_rows(run)) == ["r0", "r4", "r8"] for run in runs)  # of 12


def test_a_bad_prompt_is_refused_unless_it_is_to_be_left_out(place: Path, tmp_path: Path, capsys: Any) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [{"colour": "red", "thing": "hat"}])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"colour": "red", "thing": "hat"}, {"colour": 3}])
    form = ["--prompt-template", "{colour} {thing}\\n", "--response-field", "ref", "--test", str(good)]
    command = ["prepare", str(place / "model"), "--self", "--prompts", str(bad), *form, "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "1 record cannot be used" in capsys.readouterr().err


def test_a_model_that_scores_nothing_gets_its_table(place: Path, tmp_path: Path, capsys: Any) -> None:
    odd = write_jsonl(tmp_path / "odd.jsonl", [{**row, "ref": "日本語"} for row in records(6, seed=4)])
    command = arguments(place, "--minutes", "0", "--no-fit", "--dev", str(odd), "--out", str(tmp_path / "out"))
    document = said(capsys, command)
    assert {row["kept"] for row in document["rows"]} == {None}
    assert main([word for word in command if word != "--json"]) == 0
    told = capsys.readouterr().out
    assert "the model does not do this task yet: BLEU 0.0 of 100" in told
    assert "skipdecode generate" in told
    assert not (tmp_path / "out" / "kept.png").exists()


def test_other_records_or_weights_are_not_compared_with_earlier_ones(place: Path, tmp_path: Path, capsys: Any) -> None:
    dev = write_jsonl(tmp_path / "dev.jsonl", records(12, seed=1))
    model = shutil.copytree(place / "model", tmp_path / "model")
    more = ("--minutes", "0", "--no-fit", "--dev", str(dev), "--out", str(tmp_path / "out"))
    command = ["prepare", str(model), *arguments(place, *more)[2:]]
    said(capsys, command)
    write_jsonl(dev, records(3, seed=5))
    assert main(command) == 2
    assert "files.dev" in capsys.readouterr().err
    write_jsonl(dev, records(12, seed=1))
    save_model(model, seed=7)
    assert main(command) == 2
    assert "checkpoint" in capsys.readouterr().err


def evaluation(number: int) -> Evaluation:
    return Evaluation([{"number": number}])


def test_a_stage_whose_files_are_gone_or_changed_is_done_again(tmp_path: Path, capsys: Any) -> None:
    runs, file = [], tmp_path / "fit" / "schedule.json"

    def work() -> Evaluation:
        file.parent.mkdir(exist_ok=True)
        file.write_text("made")
        runs.append(1)
        return evaluation(len(runs))

    with closing(Stages(tmp_path, {})) as stages:

        def stage(reads: Any = None) -> int:
            return stages.run(Evaluation, work, directory=file.parent, reads=reads).rows[0]["number"]

        assert [stage(), stage()] == [1, 1]
        file.write_text("another")
        assert [stage(), stage()] == [2, 2]
        file.unlink()
        assert [stage(), stage()] == [3, 3]
        assert "is done again" in capsys.readouterr().err
        assert [stage(reads="another fit"), stage(reads="another fit")] == [4, 4]


@pytest.mark.parametrize("flat", [False, True])
def test_a_faster_schedule_lies_within_the_fit(tmp_path: Path, flat: bool) -> None:
    layers = 16
    model = tiny_model("llama", num_hidden_layers=layers)
    target = Schedule(layers, tuple(range(1, 12)), (8,) if flat else (16, 14, 12, 10, 8), name="target")
    bare = [schedule.name for schedule in neighbours(target, tmp_path)]
    assert bare[0] == "target"
    assert len(set(bare)) == 3
    assert all(re.fullmatch(r"target-\d+(to\d+)?", name) for name in bare[1:])
    random_fit(model).of_schedule(target).save(tmp_path / FIT_FILE)
    fit = Fit.load(tmp_path / FIT_FILE)
    found = {schedule.name: schedule for schedule in neighbours(target, tmp_path)}
    assert all(fit.serves(schedule) for schedule in found.values())
    faster = [schedule for schedule in found.values() if schedule.mean_budget() < target.mean_budget()]
    assert len(faster) == (not flat)
    if not flat:
        assert Schedule.load(tmp_path / "faster.json") == faster[0]


def test_a_stage_counts_the_time_of_all_its_processes(tmp_path: Path) -> None:
    def interrupted() -> Evaluation:
        time.sleep(0.3)
        raise KeyboardInterrupt

    for _ in range(2):
        with closing(Stages(tmp_path, {})) as stages, pytest.raises(KeyboardInterrupt):
            stages.run(Evaluation, interrupted, minutes=0.0)
    started = time.perf_counter()
    with closing(Stages(tmp_path, {}, started=started)) as stages:
        stages.run(Evaluation, lambda: evaluation(stages.spent() > 0.6), minutes=0.0)
        assert stages.find(Evaluation, 0.0) == evaluation(True)  # killed processes count while the stage runs
        assert 0.6 <= stages.done(Evaluation, 0.0).seconds < 60
        stages.run(Tuning, lambda: Tuning({}, []), minutes=1)
        assert stages.done(Tuning, 1).seconds < 0.6


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("loading", [0.0, 10.0, 40.0])
def test_tuning_gets_half_of_the_minutes(tmp_path: Path, own: bool, loading: float) -> None:
    started = time.perf_counter() - loading
    with closing(Stages(tmp_path, {}, started=started)) as stages:
        clock = Clock(stages, 6, own, loading)
        ends = [clock.until(label) - started for label in clock.shares]
        planned = loading + 360 * sum(clock.shares.values())
        assert max(ends) <= planned + 0.5
        assert clock.end - started == pytest.approx(360, abs=0.5)
        later = 60 * 6 * clock.shares["evaluation"] + 3 * loading
        full = 0 if own else 90  # of tuning, at full depth
        if loading < 40:
            assert 360 - planned - later + full >= 180 - 1
        else:  # a minute in six loads: the others shrink as far as they can
            assert sum(clock.shares.values()) - full / 360 < 0.1
        stages.run(Layers, lambda: Layers(SHORT, 1))
        assert clock.minutes_to_tune(20) == pytest.approx(6 - (loading * 4 + 21 + 5) / 60, abs=0.02)


def test_a_finished_directory_in_which_another_process_runs_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "prepared.json").write_text("{}")
    with closing(Stages(tmp_path, {})) as stages:
        stages.run(Tuning, lambda: Tuning({}, []), minutes=1)
        with pytest.raises(OutputError, match="another run"):
            Stages(tmp_path, {}, overwrite=True)
        assert (tmp_path / "prepared.json").exists()
    with closing(Stages(tmp_path, {})) as stages:
        assert [stage.key for stage in stages.finished()] == ["tuning 1"]
    with closing(Stages(tmp_path, {}, overwrite=True)) as stages:
        assert not stages.finished()
        assert not (tmp_path / "prepared.json").exists()


def test_a_run_that_failed_in_its_first_stage_is_continued(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "stage.json").write_text('{"stage": "layers", "seconds": 1.0, "cpu_seconds": 1.0}')
    PREPARE_DIRECTORY.check(out)
    assert main(arguments(place, "--minutes", "0", "--no-fit", "--out", str(out))) == 0


def test_a_refused_command_leaves_nothing(place: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(place / "bad.jsonl", [{"colour": "red"}])
    command = [*arguments(place, "--minutes", "0"), "--out", str(place / "corrected"), "--no-fit"]
    assert main([*command, "--train", str(place / "bad.jsonl")]) == 2
    assert "bad.jsonl" in capsys.readouterr().err
    assert main([*command, "--target-speedup", "50"]) == 2
    assert "50 is out of reach" in capsys.readouterr().err
    assert not list((place / "corrected").glob("[!.]*"))
    put, measured = ResumeLog.put, []

    def put_three(kept: ResumeLog, key: str, value: Any) -> None:
        if len(measured) == 3:
            raise KeyboardInterrupt
        put(kept, key, value)
        measured.append(key)

    monkeypatch.setattr(ResumeLog, "put", put_three)
    assert main(command) == 130
    monkeypatch.undo()
    assert main([*command, "--seed", "1"]) == 2  # another command
    assert "overwrite" in capsys.readouterr().err
    assert main(command) == 0
    assert main([*command, "--seed", "1", "--overwrite"]) == 0
    assert json.loads((place / "corrected" / "prepared.json").read_text())["minutes"] == 0


def test_a_fit_ends_at_the_clock_on_fewer_texts() -> None:
    model, rows = tiny_model("llama"), [Example(str(i), (3, 4, 5), tuple(range(6, 46))) for i in range(20)]
    batches, schedule = [collate([row]) for row in rows], Schedule(8, (2, 3), (6,))
    whole, cut = (make_fit(model, batches, FitOptions(fit_rank=8), [schedule], until) for until in (math.inf, 0.0))
    assert cut.bridges.keys() == whole.bridges.keys()
    assert cut.about["tokens"] < whole.about["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 9])  # seconds, which what follows makes up for
def test_the_minutes_are_the_time_of_the_whole_call(place: Path, tmp_path: Path, late: float) -> None:
    form = {"prompt_template": "{colour} {thing}\n", "response_field": "ref", "target_speedup": 1.3, "fit_rank": 4}
    form |= {"cost": place / "cost.json", "minutes": 1, "started": (start := time.perf_counter() - late)}
    ready = skipdecode.prepare(place / "model", records(24), records(12, seed=1), out=tmp_path / "out", **form)
    assert time.perf_counter() - start == pytest.approx(57, rel=0.1)
    assert ready.document["seconds"]["tuning 1"] > 10
