"""`skipdecode plan` on tiny models, whose engine is timed by a clock that only work moves on."""

from __future__ import annotations

import html
import io
import json
import shlex
import sys

import pytest

import skipdecode
from checkpoints import save_checkpoint
from counted import count_time
from fits import random_fit
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.cost.model import CostModel
from skipdecode.errors import UsageError
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.schedule.grammar import schedule_picture
from tiny import LAYERS, tiny_model

DEEP = 30


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    """Most tests find what an earlier one measured."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def clock(shared_cache, monkeypatch):
    monkeypatch.setenv("SKIPDECODE_CACHE", str(shared_cache))
    monkeypatch.setenv("COLUMNS", "80")
    return count_time(monkeypatch)


@pytest.fixture
def own_cache(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def deep_dir(tmp_path_factory):
    """A model with many layers."""
    path = tmp_path_factory.mktemp("models") / "deep"
    tiny_model("llama", num_hidden_layers=DEEP, max_position_embeddings=1024).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(path)
    return str(path)


def plan(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    """The one line that a wrong command gets."""
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err


# ---------------------------------------------------------------------- plans


def test_a_schedule_file_and_the_fit_beside_it_count(model_dir, tmp_path, capsys):
    schedule = Schedule.constant(LAYERS, 5, prompt=(0, 1, 2, 3))
    schedule.save(tmp_path / "schedule.json")
    command = (model_dir, "--schedule", str(tmp_path / "schedule.json"))
    bare = json.loads(plan(capsys, *command, "--json"))
    assert Schedule.from_dict(bare["schedule"]) == schedule
    random_fit(tiny_model("llama"), [(0, 1, 2, 3)], rank=4).save(tmp_path / FIT_FILE)
    fitted = json.loads(plan(capsys, *command, "--json"))
    assert bare["fit_bytes"] == 0
    # Six bridges of 32 columns, and maps of 16 keys and 16 values in four layers.
    assert fitted["fit_bytes"] == 4 * (6 * (2 * 4 + 1) * 32 + 4 * 32 * (32 + 2))
    assert fitted["figures"]["step_seconds"] > bare["figures"]["step_seconds"]
    text = plan(capsys, *command)
    assert "maps of rank 4 over 6 layers" in text
    assert "generate" in text
    random_fit(tiny_model("llama", hidden_size=64)).save(tmp_path / FIT_FILE)
    assert "of 64 columns" in refused(capsys, *command)


def test_a_wall_clock_target(deep_dir, capsys):
    document = json.loads(plan(capsys, deep_dir, "--target-speedup", "1.5", "--json"))
    schedule = Schedule.from_dict(document["schedule"])
    cost = CostModel.from_dict(document["cost"])
    figures = document["figures"]
    assert cost.source == "measured"
    assert document["dtype"] == "float32"
    assert document["weight_bytes"] == 4 * tiny_model("llama", num_hidden_layers=DEEP).num_parameters()
    assert (document["prompt_len"], document["new_tokens"]) == (64, 65)
    assert figures["decode_speedup"] == pytest.approx(cost.text(64, 65).speedup(schedule))
    assert figures["request_speedup"] == pytest.approx(cost.text(64, 65, whole=True).speedup(schedule))
    assert 1.5 <= figures["request_speedup"] < 1.53 < figures["nominal_speedup"]
    seconds = figures["request_seconds_full"] / figures["request_seconds"]
    assert seconds == pytest.approx(figures["request_speedup"])
    assert figures["bound"] > 1.5
    assert figures["kv_bytes_saved"] > 0


def test_plans_in_python_equal_the_command_line(model_dir, capsys):
    document = json.loads(plan(capsys, model_dir, "--target-speedup", "1.2", "--batch", "2", "--json"))
    result = skipdecode.plan(model_dir, target_speedup=1.2, batch=2)
    assert result.to_dict() == {name: value for name, value in document.items() if name != "next"}
    assert str(result) in plan(capsys, model_dir, "--target-speedup", "1.2", "--batch", "2")
    assert html.escape(str(result)) in result._repr_html_()
    assert skipdecode.plan(model_dir, "2x:p5").schedule.prompt == (0, 1, 2, 3, 4)
    loaded = skipdecode.load(model_dir, require_tokenizer=False)
    assert skipdecode.plan(loaded, result.schedule).schedule == result.schedule
    with pytest.raises(UsageError, match="target_speedup"):
        skipdecode.plan(model_dir)


def test_prompts_give_up_layers_as_the_target_asks_and_the_report_says_so(deep_dir, capsys):
    command = (deep_dir, "--batch", "32", "--prompt-len", "200", "--seq-len", "50")
    shown = []
    for target in ("1.1", "1.5", "2.5"):
        document = json.loads(plan(capsys, *command, "--target-speedup", target, "--json"))
        schedule = Schedule.from_dict(document["schedule"])
        assert document["figures"]["request_speedup"] >= float(target)
        shown.append((len(schedule.prompt_layers()), schedule.mean_budget()))
        text = " ".join(plan(capsys, *command, "--target-speedup", target).split())
        assert f"prompts {shown[-1][0]} of 30 layers" in text
    assert shown[0][0] == 30
    assert shown == sorted(shown, reverse=True), "a higher target deepens nothing"
    assert shown[-1][0] < 15


def test_prompt_layers_are_the_users(deep_dir, capsys):
    command = (deep_dir, "--target-speedup", "1.5", "--batch", "32", "--prompt-layers")
    for text, run in (("12", 12), ("0-9,20", 11), ("full", 30)):
        document = json.loads(plan(capsys, *command, text, "--json"))
        schedule = Schedule.from_dict(document["schedule"])
        assert len(schedule.prompt_layers()) == run
        assert document["figures"]["request_speedup"] >= 1.5
    nominal = (deep_dir, "--schedule", "2x:pmax_exit", "--json")
    assert json.loads(plan(capsys, *nominal))["schedule"]["prompt"] == "max_exit"


def test_the_report_has_the_figures_of_the_document(deep_dir, capsys):
    command = (deep_dir, "--schedule", "2x", "--batch", "4", "--seq-len", "32")
    figures = json.loads(plan(capsys, *command, "--json"))["figures"]
    text = " ".join(plan(capsys, *command).split())
    table = (
        f"| request | {figures['request_speedup']:.2f}x | time of prompt and steps together | "
        f"| decode | {figures['decode_speedup']:.2f}x | time of the steps after the prompt | "
        f"| nominal | {figures['nominal_speedup']:.2f}x | all layers"
    )
    assert table in text, "the whole request comes first"
    assert 1 < figures["request_speedup"] < figures["decode_speedup"] < figures["nominal_speedup"]
    assert "of weights in float32" in text
    assert "for 4 x (64 prompt + 33 new tokens);" in text
    assert "schedule skipdecode-2x: 20 decreasing to 10 of 30 layers, skipped bottom-up" in text
    assert f"({figures['kv_bytes_saved'] / (figures['kv_bytes_saved'] + figures['kv_bytes_held']):.0%}) saved" in text


def test_the_engine_is_measured_that_will_run_and_again_on_demand(model_dir, capsys, clock, own_cache):
    command = (model_dir, "--schedule", "2x", "--seq-len", "8", "--json")

    def measured(*more: str) -> tuple[dict, bool]:
        start = clock.now
        document = json.loads(plan(capsys, *command, *more))
        return document, clock.now > start

    first, did = measured()
    assert did
    assert "measured here with the fast engine" in first["cost_origin"]
    assert measured() == (first, False)
    again, did = measured("--remeasure")
    assert did
    assert again["cost"] == first["cost"]
    other, did = measured("--engine", "transformers")
    assert did
    assert "measured here with transformers" in other["cost_origin"]
    assert other["cost"] != first["cost"]


def test_a_measured_cost_is_kept_for_models_of_the_same_sizes(model_dir, tmp_path, capsys, clock, own_cache):
    costs = own_cache / "costs"
    tiny_model("llama").save_pretrained(tmp_path / "other")

    def measured(*command: str) -> bool:
        start = clock.now
        plan(capsys, *command, "--schedule", "2x", "--seq-len", "8")
        return clock.now > start

    assert measured(model_dir)
    assert not measured(str(tmp_path / "other"))
    for other in (("--batch", "2"), ("--prompt-len", "20"), ("--dtype", "bfloat16")):
        assert measured(model_dir, *other)
    assert len(list(costs.iterdir())) == 4
    for file in costs.iterdir():
        file.write_text('{"key": ')
    assert measured(model_dir), "a broken file is measured again"


def test_a_cache_that_cannot_be_written_does_not_stop_a_calibration(model_dir, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "file"))
    assert "measured here" in plan(capsys, model_dir, "--schedule", "2x", "--seq-len", "8")


def test_files_and_the_next_command(deep_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = plan(capsys, deep_dir, "--target-speedup", "1.5")
    command = shlex.split(first.splitlines()[-1].removeprefix("next"))
    assert command[:2] == ["skipdecode", "plan"]
    second = plan(capsys, *command[2:])
    schedule = Schedule.from_json((tmp_path / "schedule.json").read_text())
    assert schedule.name == "skipdecode-24to12"
    assert "skipdecode generate" in second
    assert "--schedule schedule.json" in second


def test_what_comes_next_can_be_run(model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def commands(model: str, *target: str) -> list[list[str]]:
        lines = plan(capsys, model, *target, "--out", "s.json", "--overwrite").splitlines()
        return [shlex.split(line)[2:] for line in lines if line.startswith(("next", "then"))]

    save_checkpoint(tmp_path / "model")
    tune, generate = commands("model", "--schedule", "2x")
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "red one", "response": "green two"}) + "\n")
    assert main([*tune, "--steps", "1"]) == 0
    assert main([*generate[:-1], "red green"]) == 0
    assert commands("tuned", "--schedule", "1.5x")[0][:2] == ["generate", "tuned"], "it is ready"
    assert commands("tuned", "--schedule", "3x")[0][0] == "tune", "it was tuned for less"
    ((*_, only),) = commands(model_dir, "--schedule", "1x")
    assert only == "Your prompt", "full depth needs no tuning"
    assert commands(model_dir, "--target-speedup", "1.5")[0][:2] == ["prepare", model_dir], "an order of its own"


# ---------------------------------------------------------------------- the picture


def cells(picture: str, layers: int, side: str = "│") -> list[str]:
    """The picture's rows, from layer 0 up, without margin."""
    rows = [line.partition(side)[2] for line in picture.splitlines()[1 : layers + 1]]
    return rows[::-1]


def test_the_picture_shows_what_runs(schedule):
    rows = cells(schedule_picture(schedule, 12), LAYERS)
    stretch = len(rows[0]) // 12
    for layer in range(LAYERS):
        for position in range(12):
            shown = rows[layer][position * stretch : (position + 1) * stretch]
            assert set(shown) == {"█" if layer in schedule.layers(position) else "·"}


def test_the_picture_shows_what_prompts_do():
    def prompt(schedule: Schedule) -> str:
        """What each layer does with prompt tokens, from layer 0 up."""
        lines = schedule_picture(schedule, 12).splitlines()[1 : schedule.num_layers + 1]
        return "".join(line.partition("│")[0].split()[1][0] for line in reversed(lines))

    assert prompt(Schedule.split(8, 3, [5, 4])) == "███·▒▒▒▒"
    assert prompt(Schedule.split(8, 4, [6, 4])) == "████▒▒▒▒"
    assert prompt(Schedule.from_speedup(8, 2, 12)) == "████████"


def test_a_flat_plan_of_a_long_text_fits_eighty_columns(deep_dir, capsys):
    text = plan(capsys, deep_dir, "--target-speedup", "1.5", "--flat", "--batch", "8", "--seq-len", "500")
    assert "of 30 layers, skipped" in text
    assert "decreasing" not in text
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("next "))


def test_a_long_schedule_is_binned_to_the_width():
    schedule = Schedule.from_speedup(30, 2, 1000)
    for width in (40, 80):
        picture = schedule_picture(schedule, width=width)
        assert max(map(len, picture.splitlines())) <= width
        filled = sum(row.count("█") for row in cells(picture, 30)) / sum(map(len, cells(picture, 30)))
        assert filled == pytest.approx(schedule.mean_budget() / 30, abs=0.02)
    numbers = [int(n) for n in picture.splitlines()[-1].split()[1:]]
    assert numbers[0] == 0
    assert numbers[-1] == pytest.approx(750, abs=20)


def test_a_terminal_without_blocks_gets_other_characters(deep_dir, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())  # has no encoding
    assert main(["plan", deep_dir, "--schedule", "2x"]) == 0
    assert "nominal" in stream.getvalue()
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["plan", deep_dir, "--schedule", "2x"]) == 0
    terminal.flush()
    assert "speed-up" in terminal.buffer.getvalue().decode("ascii")


# ---------------------------------------------------------------------- wrong commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target-speedup", "2", "--schedule", "2x"), "exclude each other"),
        (("--schedule", "2x", "--flat"), "--flat needs --target-speedup"),
        (("--target-speedup", "9"), "out of reach"),
        (("--target-speedup", "0.5"), "1 or more"),
        (("--target-speedup", "nan"), "1 or more"),
        (("--target-speedup", "2", "--prompt-layers", "5-9"), "warm"),
        (("--target-speedup", "2.5", "--prompt-layers", "full", "--batch", "32", "--seq-len", "16"), "prompts take"),
    ],
)
def test_wrong_options_are_told(arguments, message, deep_dir, capsys):
    assert message in refused(capsys, deep_dir, *arguments)
