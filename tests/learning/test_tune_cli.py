"""`skipdecode tune`: from files to a tuned directory, its recipe, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import skipdecode
from checkpoints import chatml_tokenizer
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.opening import end_tokens
from skipdecode.learning.checkpoint import read_log
from skipdecode.models.loading.hub import load_model
from skipdecode.models.loading.weights_sample import base_entry
from skipdecode.models.recipe import Recipe
from tiny import tiny_model
from tuning_data import LAYERS, records, save_model, write_jsonl

Files = dict[str, str]
PRESETS = Path(__file__).parents[2] / "presets"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    where = tmp_path_factory.mktemp("tune")
    return {
        "model": str(save_model(where / "model")),
        "train": str(write_jsonl(where / "train.jsonl", records(24))),
        "dev": str(write_jsonl(where / "dev.jsonl", records(6, seed=1))),
    }


def arguments(files: Files, out: Path, *more: str, steps: int = 6) -> list[str]:
    options = f"--train {files['train']} --dev {files['dev']} --out {out} --steps {steps} --batch-size 4"
    fields = ["--prompt-template", "{colour} {thing}\\n", "--response-field", "ref"]
    pace = "--eval-every 3 --checkpoint-every 2 --lora-rank 2 --precision fp32"
    return ["tune", files["model"], *options.split(), *fields, *pace.split(), *more]


def curve(out: Path) -> list[tuple[str, int, float]]:
    return [(row["kind"], row["step"], row["cross_entropy"]) for row in read_log(out / "log.jsonl")]


def test_a_run_from_files_to_a_directory_that_loads(files: Files, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main(arguments(files, out, "--schedule", "2x", "--json")) == 0
    printed = capsys.readouterr()
    recipe = json.loads(printed.out)
    assert recipe == json.loads((out / "recipe.json").read_text())
    assert recipe["result"]["steps"] == 6
    assert recipe["data"]["train"]["records"] == 24
    assert recipe["options"]["prompt_template"] == "{colour} {thing}\n"
    checkpoint = load_model(str(out)).checkpoint
    template = PromptTemplate("{colour} {thing}\n", ("ref",))
    assert checkpoint.recipe == Recipe(template, (checkpoint.schedule,), recipe["base"])
    # Positions: the 95th percentile of the responses' lengths, end token included.
    lengths = sorted(len(r["ref"]) + 1 for r in records(24))
    assert checkpoint.schedule == Schedule.from_speedup(LAYERS, 2, lengths[22])
    base = load_model(files["model"])
    assert recipe["base"] == base_entry(base.model, base.checkpoint.folder)
    assert "Loading weights" not in printed.err
    assert "100%" not in printed.err
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_the_tuned_folder_ends_where_the_learned_answers_end(tmp_path: Path, capsys: Any, kind: str) -> None:
    tokenizer, model, out = chatml_tokenizer(), tiny_model("llama", vocab_size=261), tmp_path / "out"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    odd = {"eos_token_id": 2, "do_sample": False, "temperature": 0.6}  # as Llama 2 has it
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(odd))
    data = str(write_jsonl(tmp_path / "train.jsonl", records(4)))
    command = ["tune", str(tmp_path / "model"), "--train", data, "--dev", data, "--out", str(out), "--steps", "1"]
    fields = ["--prompt-field", "thing", "--response-field", "ref", "--chat", "--schedule", "2x"]
    pace = ["--batch-size", "2", "--lora-rank", "2"]
    assert main([*command, *fields, *pace, *(["--merge"] if kind == "merged" else [])]) == 0
    assert "'<|im_end|>'" in capsys.readouterr().err
    loaded = load_model(str(out))
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, end]
    assert GenerationConfig.from_pretrained(out).temperature == 0.6
    assert end_tokens(loaded.model, loaded.tokenizer) == {2, end}
    assert main(["export", str(out), "--out", str(tmp_path / "x"), "--schedule", _full(tmp_path)]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "x").eos_token_id == [2, end]


def _full(folder: Path) -> str:
    file = folder / "full.json"
    file.write_text(Schedule.full(LAYERS).to_json())
    return str(file)


@pytest.mark.parametrize("named_in", ["generation_config.json", "config.json"])
def test_an_end_token_that_only_a_config_names_is_learned(files: Files, tmp_path: Path, named_in: str) -> None:
    model = save_model(tmp_path / "model")
    ends = {"tokenizer_config.json": None, "generation_config.json": None, "config.json": None, named_in: [2, 5]}
    for name, tokens in ends.items():
        entries = json.loads((model / name).read_text())
        entries = {k: v for k, v in entries.items() if not k.startswith(("eos", "pad"))}
        (model / name).write_text(json.dumps(entries | ({} if tokens is None else {"eos_token_id": tokens})))
    own = files | {"model": str(model)}
    assert main([*arguments(own, tmp_path / "out", steps=1), "--schedule", "2x"]) == 0
    assert load_model(str(model)).tokenizer.eos_token == "</s>"


def test_a_run_by_the_clock_ends_in_time_with_its_learning_rate_at_the_end(files: Files, tmp_path: Path) -> None:
    assert main(arguments(files, tmp_path, "--schedule", "2x", "--minutes", "0.05", steps=1)) == 0
    rows = [row for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "train"]
    assert len(rows) > 5  # not --steps
    assert rows[-1]["minutes"] < 0.05 + 0.01
    assert rows[-1]["learning_rate"] < 0.1 * max(row["learning_rate"] for row in rows)
    assert read_log(tmp_path / "log.jsonl")[-1]["kind"] == "dev"


def test_a_recipe_repeats_the_run_with_its_schedule_and_options_come_before_it(
    files: Files, tmp_path: Path, capsys: Any
) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    file = tmp_path / "mine.json"
    file.write_text(Schedule.even(LAYERS, 3, name="mine").to_json())
    assert main(arguments(files, first, "--schedule", str(file))) == 0
    file.unlink()
    recipe = ["tune", "--recipe", str(first / "recipe.json"), "--train", files["train"], "--dev", files["dev"]]
    assert main([*recipe, "--out", str(again)]) == 0
    assert main([*recipe, "--out", str(other), "--schedule", "2x"]) == 0
    assert curve(again) == curve(first) != curve(other)
    assert load_model(str(again)).checkpoint.schedule == Schedule.even(LAYERS, 3, name="mine")
    assert load_model(str(other)).checkpoint.schedule.name == "skipdecode-2x"


def test_a_run_is_resumed_on_as_many_processes(files: Files, tmp_path: Path, capsys: Any) -> None:
    command = arguments(files, tmp_path, "--schedule", "2x")
    assert main(command) == 0
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"processes": 2, "result": None}))
    capsys.readouterr()
    assert "(processes: 2 then, 1 now)" in refused(capsys, command)


@pytest.mark.slow
def test_a_killed_run_resumes_and_equals_an_unbroken_one(files: Files, tmp_path: Path) -> None:
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    command = arguments(files, killed, "--schedule", "2x", steps=40)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "skipdecode", *command], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while len(read_log(killed / "log.jsonl")) < 12 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 12 <= len(read_log(killed / "log.jsonl")) < 50
    assert not (killed / "adapter_config.json").exists()
    assert main(command) == 0
    assert main(arguments(files, unbroken, "--schedule", "2x", steps=40)) == 0
    assert curve(killed) == curve(unbroken)


def test_a_run_that_was_cut_off_behind_its_result_is_concluded(files: Files, tmp_path: Path, capsys: Any) -> None:
    command = arguments(files, tmp_path / "out", "--schedule", "2x", "--json")
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)
    weights = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "out" / "loss.png").unlink()
    (tmp_path / "out" / "checkpoints" / "step-2").mkdir(parents=True)
    assert main(command) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == whole
    assert "has the finished run of this command" in printed.err
    assert (tmp_path / "out" / "loss.png").is_file()
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_two_processes_make_the_steps_of_one_that_accumulates(files: Files, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = arguments(files, tmp_path / "two", "--schedule", "2x", "--distill-weight", "0.3")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run([*launch, "-m", "skipdecode", *command], env=environment, check=True, timeout=300)
    more = tmp_path / "more.json"
    more.write_text('{"options": {"accumulation": 2}}')
    one = ["--schedule", "2x", "--distill-weight", "0.3", "--recipe", str(more)]
    assert main(arguments(files, tmp_path / "one", *one)) == 0
    names = ("two", "one")
    two, single = (curve(tmp_path / name) for name in names)
    assert [row[:2] for row in two] == [row[:2] for row in single]
    assert [row[2] for row in two] == pytest.approx([row[2] for row in single], rel=1e-5)
    # Losses forgive a wrong scale of the gradient, since AdamW divides by it; its norm does not.
    norms = [
        [row["gradient_norm"] for row in read_log(tmp_path / n / "log.jsonl") if row["kind"] == "train"] for n in names
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def refused(capsys: Any, command: list[str]) -> str:
    assert main(command) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("skipdecode: ")]
    assert not printed.out
    assert "Traceback" not in printed.err
    return lines[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--full"], "--full tunes all weights: it takes no --lora-rank"),
        (["--prompt-field", "colour"], "give one of --task, --prompt-template and --prompt-field"),
        (["--schedule", "9x"], "nominal speed-up of 9 leaves"),
        (["--prompt-template", "{colour"], "prompt template"),
        (["--task", "e2e"], "exclude each other"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    files: Files, tmp_path: Path, capsys: Any, change: list[str], message: str
) -> None:
    assert message in refused(capsys, arguments(files, tmp_path / "out", *change))


def test_a_task_gives_prompt_and_response_and_an_adapter_may_be_half_as_large(files: Files, tmp_path: Path) -> None:
    rows = [{"mr": f"name[{r['thing']}]", "ref": r["ref"]} for r in records(8)]
    data = str(write_jsonl(tmp_path / "e2e.jsonl", rows))
    sizes = {}
    for dtype in ("float32", "float16"):
        out = tmp_path / dtype
        command = ["tune", files["model"], "--task", "e2e", "--train", data, "--dev", data, "--out", str(out)]
        pace = ["--steps", "2", "--adapter-dtype", dtype, "--schedule", "2x"]
        assert main([*command, *pace]) == 0
        sizes[dtype] = (out / "adapter_model.safetensors").stat().st_size
        checkpoint = load_model(str(out)).checkpoint
        assert checkpoint.schedule.name == "skipdecode-2x"
        # In full, as the task's file may be gone one day.
        assert checkpoint.recipe.template == PromptTemplate("{mr}\n", ("refs", "ref"))
    assert sizes["float16"] < 0.6 * sizes["float32"]


def test_bad_records_are_refused_or_skipped_by_line(files: Files, tmp_path: Path, capsys: Any) -> None:
    rows = [*records(8), {"colour": "red", "thing": "car"}, {"colour": "red", "thing": "car", "ref": ""}]
    bad = files | {"train": str(write_jsonl(tmp_path / "bad.jsonl", rows))}
    message = refused(capsys, arguments(bad, tmp_path / "a"))
    assert "2 records cannot be used (1 missing field, 1 empty response): line 9:" in message
    assert not (tmp_path / "a").exists()
    assert main(arguments(bad, tmp_path / "b", "--bad-records", "skip", "--json", steps=2)) == 0
    printed = capsys.readouterr()
    assert "train: 2 records cannot be used" in printed.err
    assert json.loads(printed.out)["data"]["train"] | {"sha256": ""} == {
        "file": "bad.jsonl",
        "sha256": "",
        "records": 8,
        "skipped": 2,
    }


def test_another_command_in_a_directory_is_refused_with_both_and_overwrite_begins_anew(
    files: Files, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    first = arguments(files, out)
    assert main(first) == 0
    capsys.readouterr()
    second = arguments(files, out, "--learning-rate", "0.5")
    message = refused(capsys, second)
    assert "options.learning_rate: 0.0003 then, 0.5 now" in message
    assert shlex.join(["skipdecode", *first]) in message
    other = files | {"train": str(write_jsonl(tmp_path / "other.jsonl", records(23)))}
    assert "data.train" in refused(capsys, arguments(other, out))
    before = curve(out)
    assert main([*second, "--overwrite"]) == 0
    assert curve(out) != before
    assert main(second) == 0
    assert "has the finished run of this command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"options": {"stepz": 3}}', "unknown option 'stepz'"),
        ('{"options": {"steps": [3]}}', "--steps"),
        (
            '{"options": {"lora_targets": ["nothing"], "prompt_field": "thing", "response_field": "ref"}}',
            "lora_targets nothing",
        ),
        ("[]", "the key 'options'"),
        ('{"kind": "bench", "options": {}}', "'bench'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(
    files: Files, tmp_path: Path, capsys: Any, content: str, message: str
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(content)
    data = ["--train", files["train"], "--dev", files["dev"], "--out", str(tmp_path / "out")]
    assert message in refused(capsys, ["tune", files["model"], "--recipe", str(path), *data])


def test_a_preset_is_a_recipe(files: Files, tmp_path: Path) -> None:
    path = PRESETS / "e2e-smollm2-135m.json"
    rows = [{"mr": f"name[{r['thing']}]", "ref": r["ref"]} for r in records(8)]
    data = str(write_jsonl(tmp_path / "e2e.jsonl", rows))
    small = ["--train", data, "--dev", data, "--steps", "2", "--batch-size", "2"]
    small += ["--schedule", "3x", "--sampled-speedups", "1", "2"]  # the model has 8 layers
    assert main(["tune", files["model"], "--recipe", str(path), *small, "--out", str(tmp_path / "out")]) == 0
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    changed = {"model", "steps", "batch_size", "sampled_speedups"}
    for name, value in json.loads(path.read_text())["options"].items():
        assert name in changed or recipe["options"][name] == value


def test_the_bundled_adapters_are_small_and_came_from_their_presets() -> None:
    adapters = Path(skipdecode.__file__).parent / "models" / "adapters"
    assert sum(file.stat().st_size for file in adapters.rglob("*")) <= 20e6
    # A fit is no adapter, and a first stage is not bundled.
    presets = [path for path in PRESETS.iterdir() if not path.stem.startswith(("fit-", "first-"))]
    assert {path.stem for path in presets} == {path.name for path in adapters.iterdir()}
    for path in presets:
        recipe = json.loads((adapters / path.stem / "recipe.json").read_text())
        preset = json.loads(path.read_text())
        assert preset["options"] == {name: recipe["options"][name] for name in preset["options"]}
        assert recipe["result"]["precision"] == "bf16"
        assert preset["schedule"] == recipe["schedule"]


def test_an_adapter_is_tuned_on_from_its_own_weights(files: Files, tmp_path: Path, capsys: Any) -> None:
    first, on = tmp_path / "first", tmp_path / "on"
    assert main(arguments(files, first, "--schedule", "1x", "--learning-rate", "0.01")) == 0
    capsys.readouterr()
    # Taught by itself at full depth, it loses nothing at the first step: student and teacher both have the adapter.
    more = arguments(files | {"model": str(first)}, on, "--schedule", "1x", "--distill-weight", "1")
    assert "leave out --lora-rank" in refused(capsys, more)
    at = more.index("--lora-rank")
    assert main(more[:at] + more[at + 2 :]) == 0
    rows = read_log(on / "log.jsonl")
    best = min(loss for kind, _, loss in curve(first) if kind == "dev")
    assert curve(on)[0][2] == pytest.approx(best, abs=1e-4)
    assert next(row["kl"] for row in rows if row["kind"] == "train") < 1e-5
    config = json.loads((on / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (2, str(Path(files["model"]).resolve()))
    assert load_model(str(on)).checkpoint.schedule.is_full
