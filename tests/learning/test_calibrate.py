"""`skipdecode.calibrate` on tiny models: losses equal the parallel form, runs resume, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import skipdecode
from skipdecode import Schedule, attach
from skipdecode.cli import main
from skipdecode.common.resume import ResumeLog
from skipdecode.cost.model import CostModel, PromptCost
from skipdecode.data.batches import batches_of, collate
from skipdecode.data.examples import Example
from skipdecode.errors import DataError, DivergedError, OptionError, OutputError, ScheduleError, TargetError, UsageError
from skipdecode.learning.calibrate import Calibrated, records_for_fit
from skipdecode.learning.fitting import make_fit
from skipdecode.learning.goal import set_goal
from skipdecode.learning.objective import Objective
from skipdecode.learning.search import LossMeter, groups_by_fit, search
from skipdecode.learning.settings import CalibrationSettings, FitOptions
from skipdecode.models.families import decoder_layers
from skipdecode.models.fit import Fit, fit_of
from tuning_data import LAYERS, byte_tokenizer, records, save_model, tuning_model, write_jsonl

USELESS = 5
Files = dict[str, str]


def examples(count: int = 7, seed: int = 0, longest: int = 9) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        length = int(torch.randint(least, most + 1, (), generator=generator))
        return tuple(torch.randint(3, 259, (length,), generator=generator).tolist())

    return [Example(f"e{n}", tokens(3, 12), tokens(2, longest)) for n in range(count)]


def test_fit_takes_records_up_to_its_tokens_and_enough_for_its_columns():
    rows = [Example(f"e{n}", (n,) * 90, (1,) * 10) for n in range(50)]
    learn = rows[40:44]

    def taken(tokens: int, columns: int, most: int = 256) -> list[str]:
        settings = FitOptions(fit_tokens=tokens, fit_records=most)
        return [row.id for row in records_for_fit(rows, learn, settings, columns)]

    assert set(taken(1000, 2)) == {f"e{n}" for n in range(10)}, "schedules are compared on the others"
    assert len(taken(10, 200)) == 8  # 100 tokens each, four for each column
    assert len(taken(10**6, 2)) == 50
    assert taken(10**6, 2, most=8) == [f"e{n}" for n in range(8)]


def log_in(folder: Path) -> ResumeLog:
    return ResumeLog(folder / "m.jsonl", {"model": "tiny"}, what="measurements", remedy="")


def meter_of(
    attachment: Any, rows: list[Example], log: ResumeLog, advance: Callable[[int], object] = lambda batches: None
) -> LossMeter:
    return LossMeter(attachment, batches_of(rows, 3), log, advance)


def plant_useless_layer(model: Any, index: int = USELESS) -> Any:
    """A layer whose output projections are zero passes on what it gets."""
    layer = decoder_layers(model)[index]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(("self_attn.o", "mlp.down_proj", "fc2")):
                parameter.zero_()
    return model


# ---------------------------------------------------------------------- measuring


def test_a_loss_is_of_all_batches_and_not_measured_twice(tmp_path: Path) -> None:
    model, rows = tuning_model(), examples()
    schedule = Schedule.constant(LAYERS, 4)
    with attach(model, schedule) as attachment:
        first = meter_of(attachment, rows, log_in(tmp_path)).loss(schedule)
        with torch.no_grad():
            whole = Objective()(model, collate(rows)).cross_entropy.item()
        assert first == pytest.approx(whole / sum(len(row.response) for row in rows), rel=1e-4)
        size = (tmp_path / "m.jsonl").stat().st_size
        with torch.no_grad():
            model.lm_head.weight.zero_()  # would show if anything ran again
        again = meter_of(attachment, rows, log_in(tmp_path))
        assert again.loss(Schedule.constant(LAYERS, 4)) == first
    assert (tmp_path / "m.jsonl").stat().st_size == size


# ---------------------------------------------------------------------- the function


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    where = tmp_path_factory.mktemp("calibrate")
    model = plant_useless_layer(tuning_model())
    model.save_pretrained(where / "model")
    byte_tokenizer().save_pretrained(where / "model")
    rows = [r | {"thing": f"{r['thing']} {n // 2}"} for n, r in enumerate(records(40))]
    cost = CostModel.of_step(LAYERS, 2, 1.0, 1.0)
    (where / "cost.json").write_text(json.dumps({"cost": cost.to_dict()}))
    return {
        "model": str(where / "model"),
        "data": str(write_jsonl(where / "data.jsonl", rows)),
        "short": str(write_jsonl(where / "short.jsonl", [r | {"ref": "x"} for r in rows])),
        "cost": str(where / "cost.json"),
    }


def learned(files: Files, out: Path | None = None, data: str = "data", **options: Any) -> Calibrated:
    form = {"prompt_template": "{colour} {thing}\n", "response_field": "ref"}
    size = {"records": 10, "batch_size": 4}
    if "target_speedup" in options:
        options = {"cost": files["cost"]} | options
    return skipdecode.calibrate(files["model"], files[data], out=out, **form | size | options)


def test_a_schedule_is_measured_with_its_fit(tmp_path: Path) -> None:
    model = tuning_model("opt")
    rows = greedy_texts(model)
    settings = CalibrationSettings(nominal_speedup=2.0)
    goal = set_goal(settings, None, 8, [len(e.response) for e in rows], LAYERS)
    fit = partial(make_fit, model, [collate(rows)], FitOptions(fit_rank=0))
    with attach(model, Schedule.full(LAYERS)) as attachment, closing(log_in(tmp_path)) as log:
        meter = meter_of(attachment, rows, log)
        result = search(settings, goal, range(LAYERS), meter.loss, fit)
        assert result.fit is not None
        assert result.fit.serves(result.schedule)
        assert result.candidates[0].loss < meter.loss(result.schedule)


def test_prompts_that_run_the_first_tokens_layers_have_a_fit_of_their_own(tmp_path: Path) -> None:
    model = tuning_model("opt")
    rows = greedy_texts(model)
    settings = CalibrationSettings(target_speedup=1.6, prompt_depths=("5", "max_exit"))
    goal = set_goal(settings, request_cost(), 30, [len(e.response) for e in rows], LAYERS)
    fit, fits = partial(make_fit, model, [collate(rows)], FitOptions(fit_rank=0)), dict[bool, Fit | None]()
    with attach(model, Schedule.full(LAYERS)) as attachment, closing(log_in(tmp_path)) as log:
        meter = meter_of(attachment, rows, log)

        def measure(schedule: Schedule, fit: Fit | None) -> float:
            fits[schedule.prompt == "max_exit"] = fit
            return meter.loss(schedule, fit)

        result = search(settings, goal, range(LAYERS), measure, fit)
        assert fits.keys() == {True, False}
        at_exit, loss = result.schedule.prompt == "max_exit", result.candidates[0].loss
        assert loss == meter.loss(result.schedule, fits[at_exit])
        assert loss != meter.loss(result.schedule, fits[not at_exit])


@pytest.mark.parametrize(("loss", "is_chosen"), [(1.04, True), (1.2, False)])
def test_of_like_losses_the_schedule_with_most_layers_is_chosen(loss: float, is_chosen: bool) -> None:
    settings = CalibrationSettings(target_speedup=1.6, prompt_depths=("3", "max_exit"))
    goal = set_goal(settings, request_cost(), 30, [8] * 4, LAYERS)
    losses = {True: 1.0, False: loss}
    result = search(settings, goal, range(LAYERS), lambda schedule, fit: losses[schedule.prompt == "max_exit"])
    layers = {candidate.schedule.prompt == "max_exit": candidate.mean_layers for candidate in result.candidates}
    assert layers[True] < layers[False]
    assert (result.schedule.prompt != "max_exit") == is_chosen
    assert result.candidates[0].schedule == result.schedule


@pytest.mark.parametrize("best", ["paper", "calibrated"])
def test_the_drop_order_that_loses_less_is_chosen(best: str) -> None:
    settings = CalibrationSettings(target_speedup=1.6)
    goal = set_goal(settings, request_cost(), 30, [8] * 4, LAYERS)

    def loss(schedule: Schedule, fit: Fit | None) -> float:
        is_bottom_up = schedule.drop_order[0] == settings.warmup_layers
        return 1.0 if is_bottom_up == (best == "paper") else 2.0

    result = search(settings, goal, range(LAYERS, 0, -1), loss)
    assert result.schedule.name.startswith(f"{best}-p")


def test_the_time_of_a_fit_is_part_of_the_target() -> None:
    settings, cost = CalibrationSettings(target_speedup=1.6, prompt_depths=("full",)), request_cost()
    costs = cost, replace(cost, bridge_share=0.3)
    bare, fitted = (set_goal(settings, each, 1, [20] * 8, LAYERS) for each in costs)
    schedules = [goal.schedule(range(1, LAYERS - 1), "full") for goal in (bare, fitted)]
    assert schedules[1].mean_budget() < schedules[0].mean_budget()
    assert fitted.workload.speedup(schedules[1]) >= 1.6 > fitted.workload.speedup(schedules[0])


def request_cost(layers: int = LAYERS) -> CostModel:
    """Of steps where nothing but layers takes time; a prompt's token takes as much as a row, its projection a tenth."""
    prompts = (PromptCost(1, 1.0, 0.1), PromptCost(1000, 1000.0, 100.0))
    return replace(CostModel.of_step(layers, 1, 0.0, 1.0), prompts=prompts)


def greedy_texts(model: Any) -> list[Example]:
    """Records whose responses full depth would write itself, so that it loses least."""
    rows = []
    for example in examples():
        ids = torch.tensor([example.prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        rows.append(Example(example.id, example.prompt, tuple(out[0, ids.shape[1] :].tolist())))
    return rows


@pytest.mark.parametrize(("target", "depths"), [(1.0, {8}), (2.2, {1})])
def test_prompts_run_as_many_layers_as_the_target_leaves(target: float, depths: set[int], tmp_path: Path) -> None:
    model = tuning_model()
    rows, measured = greedy_texts(model), []
    settings = CalibrationSettings(target_speedup=target)
    goal = set_goal(settings, request_cost(), 30, [len(e.response) for e in rows], LAYERS)
    with attach(model, Schedule.full(LAYERS)) as attachment:
        meter = meter_of(attachment, rows, log_in(tmp_path), measured.append)
        result = search(settings, goal, [0.0] * LAYERS, meter.loss)
    assert {len(result.schedule.prompt_layers())} == depths
    assert request_cost().text(30, 8, whole=True).speedup(result.schedule) >= target
    assert all(candidate.speedup >= target - 1e-9 for candidate in result.candidates)
    assert result.candidates[0].loss == min(candidate.loss for candidate in result.candidates)
    candidates = sum(len(prompts) for _, prompts in groups_by_fit(goal.prompts))
    assert sum(measured) == candidates * len(batches_of(rows, 3))


@pytest.mark.slow
def test_the_files_that_come_out_can_be_used(files: Files, tmp_path: Path, capsys: Any) -> None:
    result = learned(files, tmp_path, target_speedup=1.6)
    document = json.loads((tmp_path / "calibration.json").read_text())
    assert document == json.loads(json.dumps(result.document))
    schedule = Schedule.load(tmp_path / "schedule.json")
    assert schedule == result.schedule == Schedule.from_dict(document["schedule"])
    candidates = {candidate["name"]: candidate for candidate in document["candidates"]}
    assert all(candidate["speedup"] >= 1.6 - 1e-9 for candidate in candidates.values())
    assert not schedule.is_flat
    assert {a - b for a, b in pairwise(schedule.budgets)} <= {0, 1}
    alike = [each for each in candidates.values() if each["loss"] <= 1.05 * min(result.losses.values())]
    assert candidates[schedule.name]["mean_layers"] == max(each["mean_layers"] for each in alike)
    assert "decode speed-up" in str(result)
    assert "100%" not in capsys.readouterr().err


def test_a_server_gets_a_flat_schedule(files: Files) -> None:
    assert learned(files, nominal_speedup=2, flat=True, data="short").schedule.is_flat
    at_exit = learned(files, target_speedup=1.9, prompt_depths=("max_exit",), flat=True).schedule
    assert at_exit.prompt_layers() == at_exit.layers(0)


def test_layers_go_by_block_influence_and_the_table_is_for_people(files: Files, tmp_path: Path) -> None:
    result = learned(files, tmp_path, nominal_speedup=2)
    assert f"in the order {result.schedule.drop_order[0]} " in str(result)
    assert "decode speed-up" not in str(result)
    assert "mean layers" in result._repr_html_()
    document = result.document
    influence = document["block_influence"]
    assert document["order"][0] == USELESS
    assert document["order"] == sorted(document["order"], key=lambda layer: influence[layer])


def test_a_loaded_model_is_left_as_it_is_and_records_may_be_a_list(files: Files) -> None:
    rows = [json.loads(line) for line in Path(files["data"]).read_text().splitlines()]
    llm = skipdecode.LLM(files["model"])
    before = llm.generate("red car 1\n", 12)
    options = {"nominal_speedup": 2, "records": 18}
    form = {"prompt_field": "thing", "response_field": "ref"}
    result = skipdecode.calibrate(llm, rows, **form, **options)
    assert fit_of(llm.loaded.model) is None
    assert llm.generate("red car 1\n", 12) == before
    assert result.schedule == skipdecode.calibrate(files["model"], files["data"], **form, **options).schedule
    assert result.document["records"] == 18


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, UsageError, "give one target"),
        ({"nominal_speedup": 2, "target_speedup": 2}, UsageError, "give one target"),
        ({"nominal_speedup": 0.5}, OptionError, "nominal_speedup"),
        ({"nominal_speedup": float("nan")}, OptionError, "nominal_speedup"),
        ({"nominal_speedup": 20}, ScheduleError, "at most 4.00 is possible"),
        ({"target_speedup": 8, "fit": False}, TargetError, "2 for prompts, the bound of the whole request is 3.27x"),
        ({"target_speedup": 2, "prompt_depths": ("9",)}, ScheduleError, "a number from 1 to 8"),
        ({"target_speedup": 2, "prompt_depths": ("1-3",)}, ScheduleError, "leaves out layer 0"),
        ({"nominal_speedup": 2, "prompt_depths": ("4",)}, UsageError, "`prompt_depths` belongs to `target_speedup`"),
        ({"nominal_speedup": 2, "cost": "cost.json"}, UsageError, "`cost` is for a `target_speedup`"),
        ({"target_speedup": 2, "cost": CostModel.of_step(9, 1, 0.0, 1.0)}, UsageError, "9 layers"),
        ({"nominal_speedup": 2, "records": 0}, OptionError, "records"),
        ({"nominal_speedup": 2, "warmup_layers": 8}, UsageError, "`warmup_layers` 8 is not accepted for 8 layers"),
        ({"nominal_speedup": 2, "response_field": "nothing"}, DataError, "missing field"),
    ],
)
def test_bad_input_is_refused(files: Files, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        learned(files, **options)


def test_other_measurements_are_not_mixed_in(files: Files, tmp_path: Path) -> None:
    options = {"nominal_speedup": 2}
    first = learned(files, tmp_path, **options)
    with pytest.raises(OutputError, match=r"measured.sqlite was started with other settings \(records: "):
        learned(files, tmp_path, seed=1, **options)
    assert learned(files, tmp_path, **options).losses == first.losses


@pytest.mark.parametrize("fit", [True, False])
def test_arithmetic_that_overflows_stops_the_run(fit: bool, files: Files, tmp_path: Path) -> None:
    model = tuning_model()
    with torch.no_grad():
        decoder_layers(model)[2].mlp.up_proj.weight.fill_(3e38)
    directory = save_model(tmp_path / "model")
    model.save_pretrained(directory)
    with pytest.raises(DivergedError, match="on records"):
        learned(files | {"model": str(directory)}, nominal_speedup=2, fit=fit)


def test_a_fit_is_used_from_calibrate_to_generate_and_tune(files: Files, tmp_path: Path, capsys: Any) -> None:
    out, tuned = tmp_path / "out", tmp_path / "tuned"
    learned(files, out, nominal_speedup=2)
    schedule, bare = out / "schedule.json", tmp_path / "bare.json"
    bare.write_bytes(schedule.read_bytes())

    def texts(model: object, *more: str) -> str:
        options = ["--max-new-tokens", "12", "--dtype", "float32", "--no-template", "--output", "-", *more]
        assert main(["generate", str(model), "red car 1\n", "blue", "green house", *options]) == 0
        return capsys.readouterr().out

    fitted = texts(files["model"], "--schedule", str(schedule))
    assert fitted == texts(files["model"], "--schedule", str(schedule), "--engine", "transformers", "--batch-size", "1")
    assert fitted != texts(files["model"], "--schedule", str(bare))
    fields = ["--prompt-template", "{colour} {thing}\\n", "--response-field", "ref"]
    steps = ["--steps", "2", "--batch-size", "2", "--train", files["data"], "--dev", files["data"], "--out", str(tuned)]
    assert main(["tune", files["model"], "--schedule", str(schedule), *fields, *steps]) == 0
    assert "the fit is trained" in capsys.readouterr().err
    texts(tuned)
