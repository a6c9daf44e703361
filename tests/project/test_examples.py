"""The examples run: other people's trainers train an attached model unchanged."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from checkpoints import byte_tokenizer
from skipdecode import Schedule, attach
from skipdecode.models.loading.hub import load_model
from textgen_tools import save_tiny_model
from tuning_data import LAYERS, records, save_model, write_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_under(schedule: Schedule, model: Any, rows: list[tuple[str, str]]) -> float:
    """Mean loss of all response tokens, each record on its own, prompt length stated."""
    tokenizer, total, count = byte_tokenizer(), 0.0, 0
    with torch.no_grad(), attach(model, schedule):
        for prompt, response in rows:
            before, after = tokenizer(prompt)["input_ids"], [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
            logits = model(torch.tensor([before + after]), prompt_length=len(before)).logits[0, len(before) - 1 : -1]
            total += functional.cross_entropy(logits, torch.tensor(after), reduction="sum").item()
            count += len(after)
    return total / count


def test_examples_are_short() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py") if len(path.read_text().splitlines()) > 60} == set()


@pytest.mark.parametrize("name", ["trainer", "trl_sft"])
def test_the_example_trains_under_the_schedule_and_saves_it(name: str, tmp_path: Path) -> None:
    if name == "trl_sft":
        pytest.importorskip("trl")
    model = str(save_model(tmp_path / "model"))
    end, response = ("\n", "response") if name == "trainer" else ("", "completion")
    rows = [{"prompt": r["thing"] + ("" if end else "\n"), response: r["ref"]} for r in records(8)]
    longest = max(len(r[response]) + 1 for r in rows)
    more = {"dataloader_pin_memory": False} | ({"seq_len": longest} if name == "trl_sft" else {})
    train = str(write_jsonl(tmp_path / "train.jsonl", rows))
    trainer = example(name).main(model, train, str(tmp_path / "out"), max_steps=4, learning_rate=0.01, **more)

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    schedule = Schedule.from_speedup(LAYERS, 2, longest)
    texts = [(r["prompt"] + end, r[response]) for r in rows]
    base = load_model(model).model
    # One batch is all records, so the first loss is the untrained model's under the schedule, and not at full depth.
    assert losses[0] == pytest.approx(loss_under(schedule, base, texts), abs=1e-4)
    assert losses[0] != pytest.approx(loss_under(Schedule.full(LAYERS), base, texts), abs=2e-3)
    assert losses[-1] < losses[0]
    tuned = load_model(str(tmp_path / "out"), require_tokenizer=False)
    assert tuned.checkpoint.schedule == schedule
    assert loss_under(schedule, tuned.model, texts) < losses[0]


@pytest.mark.slow
def test_the_example_of_structured_output_gets_what_it_asks_for(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    structured = example("structured_output")
    assert structured.main(save_tiny_model(tmp_path / "model", context=600), "2x:flat").wind in range(4)


def test_the_demo_shows_each_text_twice_and_the_speed(tmp_path: Path, capsys: Any) -> None:
    demo = example("demo")
    assert demo.main("2x", save_tiny_model(tmp_path / "model", context=400)) > 0
    printed = capsys.readouterr().out
    assert printed.count("all layers: ") == printed.count("2x: ") == len(demo.RECORDS)
    assert "times as fast" in printed


@pytest.mark.model
def test_the_demo_of_the_embedded_model_keeps_its_words(capsys: Any) -> None:
    assert example("demo").main() > 1
    printed = capsys.readouterr().out
    assert printed.count("  all layers: The Blue Heron") == printed.count("  3x:p10: The Blue Heron") == 1


def test_the_example_in_python_goes_the_whole_way(tmp_path: Path, capsys: Any) -> None:
    model = str(save_model(tmp_path / "model"))
    files = []
    for name, count in (("train", 24), ("dev", 12)):
        rows = [{"prompt": f"{r['colour']} {r['thing']}\n", "response": r["ref"]} for r in records(count)]
        files.append(str(write_jsonl(tmp_path / f"{name}.jsonl", rows)))
    example("in_python").main(model, *files, str(tmp_path / "out"), 0.1, 1.05)
    printed = capsys.readouterr().out
    assert "kept: worst score" in printed
    assert load_model(str(tmp_path / "out" / "small")).checkpoint.num_layers < LAYERS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_lm_eval_scores_each_schedule(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'skipdecode[conformance]'")
    rows = [{"question": f"q{i}:", "choices": [" a", " bcd", " xy"], "answer": i % 3} for i in range(6)]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    found = example("lm_eval_tasks").main(str(save_model(tmp_path / "model")), file, "2x:flat")
    assert all(0 <= scores["acc,none"] <= 1 for scores in found.values())
    assert list(found) == ["full", "2x:flat"]
