"""`skipdecode generate`: prompts in, rows out, and one clear line for what cannot be done."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from checkpoints import HERMES, THINKING, byte_tokenizer
from counted import count_time
from skipdecode import LLM, Schedule, attach
from skipdecode.cli import main
from textgen_tools import CONTEXT, read_rows, save_tiny_model, stdin_of, write_rows
from tiny import LAYERS

ROWS = [{"id": f"r{i}", "prompt": "hello " * random.Random(i).randint(1, 9) + str(i)} for i in range(30)]

CHAT_TURN = {"role": "user", "content": "hi"}


def generate(model_dir: str, *arguments: str) -> int:
    return main(["generate", model_dir, "--max-new-tokens", "8", *arguments])


@pytest.fixture
def rows_file(tmp_path: Path) -> str:
    return write_rows(tmp_path / "in.jsonl", ROWS)


def test_rows_come_out_in_input_order_with_ids_whatever_the_batches(tmp_path: Path, model_dir: str, rows_file: str):
    found = []
    for size in ("1", "4", "64"):
        out = str(tmp_path / f"out{size}.jsonl")
        options = ("--input", rows_file, "--output", out, "--batch-size", size, "--schedule", "2x")
        assert generate(model_dir, *options, "--include-prompt", "--no-template") == 0
        found.append(read_rows(out))
    assert found[0] == found[1] == found[2]
    assert [(r["id"], r["prompt"]) for r in found[0]] == [(r["id"], r["prompt"]) for r in ROWS]
    assert all(r["new_tokens"] == 8 and r["finish_reason"] == "length" for r in found[0])
    assert list(found[0][0]) == ["id", "prompt", "text", "new_tokens", "finish_reason"]


def test_text_is_what_attached_generate_says(capsysbinary: Any, model_dir: str):
    assert generate(model_dir, "hello", "--schedule", "2x", "--seq-len", "8", "--no-template") == 0
    row = json.loads(capsysbinary.readouterr().out)
    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with attach(model, Schedule.from_speedup(LAYERS, 2, 8)):
        ids = model.generate(**tokenizer("hello", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert row == {
        "id": 1,
        "text": tokenizer.decode(ids[0, 5:], skip_special_tokens=True),
        "new_tokens": 8,
        "finish_reason": "length",
    }


def test_bad_rows_are_reported_written_and_make_the_exit_code_one(capsys: Any, tmp_path: Path, model_dir: str):
    rows = [
        {"id": "a", "prompt": "x"},
        {"id": "b", "prompt": ""},
        {"id": "c", "prompt": "y" * CONTEXT},
        {"id": "d", "prompt": "z"},
    ]
    data, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert generate(model_dir, "--input", data, "--output", str(out), "--no-template") == 1
    told = capsys.readouterr().err
    assert "line 2: field 'prompt' is empty; the record is skipped" in told
    assert f"line 3: the prompt has {CONTEXT} tokens" in told
    assert told.count("line 2:") == 1
    assert "2 of 4 records could not be used" in told
    found = read_rows(out)
    assert [r["id"] for r in found] == ["a", "b", "c", "d"]
    assert found[1] == {"id": "b", "line": 2, "error": "field 'prompt' is empty"}
    assert found[2]["line"] == 3
    assert found[3]["new_tokens"] == 8


@pytest.mark.parametrize(
    ("bad", "error"), [("", "line 2: field 'prompt' is empty"), ("y" * CONTEXT, "line 2: the prompt has")]
)
def test_bad_records_are_refused_at_once(capsys: Any, tmp_path: Path, model_dir: str, bad: str, error: str):
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt": bad}])
    assert generate(model_dir, "--input", data, "--output", str(tmp_path / "out.jsonl"), "--bad-records", "refuse") == 2
    assert f"skipdecode: {error}" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    # Mended, the same command has nothing in its way.
    write_rows(Path(data), [{"prompt": "x"}, {"prompt": "mended"}])
    assert generate(model_dir, "--input", data, "--output", str(tmp_path / "out.jsonl"), "--bad-records", "refuse") == 0


def test_rows_at_the_end_of_the_context_get_the_tokens_there_is_room_for(tmp_path: Path, model_dir: str):
    rows = [{"prompt": "x" * n} for n in (CONTEXT - 3, 10, CONTEXT - 1)]
    out = tmp_path / "out.jsonl"
    data = write_rows(tmp_path / "in.jsonl", rows)
    assert generate(model_dir, "--input", data, "--output", str(out), "--no-template") == 0
    assert [r["new_tokens"] for r in read_rows(out)] == [3, 8, 1]


def test_prompts_are_chats_if_the_model_has_a_chat_template(capsysbinary: Any, tmp_path: Path, model_dir: str):
    def prompt(directory: str, *arguments: str) -> str:
        assert generate(directory, *arguments, "--include-prompt") == 0
        return str(json.loads(capsysbinary.readouterr().out)["prompt"])

    record = write_rows(tmp_path / "in.jsonl", [{"prompt": "hi"}])
    for source in (("hi",), ("--input", record)):
        assert prompt(model_dir, *source) == "<user>hi<assistant>"
        assert prompt(model_dir, *source, "--system", "be kind") == "<system>be kind<user>hi<assistant>"
        assert prompt(model_dir, *source, "--no-template") == "hi"
        assert prompt(model_dir, *source, "--prompt-template", "Q: {prompt}") == "Q: hi"
        assert prompt(save_tiny_model(tmp_path / "base", chat=False), *source) == "hi"


def test_variables_reach_the_chat_template(capsysbinary: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    model = save_tiny_model(tmp_path / "model", chat=THINKING)
    off, shown = {"enable_thinking": False}, "<user>hi<assistant><think></think>"
    assert generate(model, "hi", "--include-prompt", "--chat-template-kwargs", json.dumps(off)) == 0
    row = json.loads(capsysbinary.readouterr().out)
    llm = LLM(model, chat_template_kwargs=off)
    assert row["prompt"] == llm.encode(["hi"])[0].text == shown
    stdin_of(monkeypatch, "hi\n")
    assert main(["chat", model, "--max-new-tokens", "8", "--chat-template-kwargs", json.dumps(off)]) == 0
    assert capsysbinary.readouterr().out.decode() == llm.generate("hi", 8)[0].text + "\n"
    for wrong in ("[]", '{"thinking": false}', '{"tokenize": true}', "{"):
        assert generate(model, "hi", "--chat-template-kwargs", wrong) == 2
        assert capsysbinary.readouterr().err.decode().splitlines()[-1].count("--chat-template-kwargs") == 1


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}


def test_lines_of_a_batch_are_answered_as_each_asks(capsys: Any, tmp_path: Path, model_dir: str):
    chat = [CHAT_TURN]
    asked = {
        "plain": {"messages": chat, "model": "gpt", "n": 1, "stream": False, "logprobs": True},
        "drawn": {"messages": chat, "temperature": 0.8, "top_p": 0.9, "top_k": -1, "seed": 5, "max_tokens": 12},
        "short": {"prompt": "hi", "max_tokens": 3},
        "wrong": {"messages": chat, "temperature": "1"},
        "long": {"messages": chat, "max_completion_tokens": 0},
        "many": {"messages": chat, "n": 2},
        "true": {"messages": chat, "n": True},
        "several": {"messages": chat, "parallel_tool_calls": "no"},
        "least": {"messages": chat, "min_tokens": -1},
        "kind": {"messages": chat, "response_format": {"type": "json"}},
        "bias": {"messages": chat, "logit_bias": {"99999": 1}},
        "schema": {"messages": chat, "response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
        "never": {"messages": chat, "response_format": schema_of({"allOf": [{"type": "string", "format": "x"}]})},
        "json": {"messages": chat, "response_format": schema_of({"enum": [12, "ab"]}), "max_tokens": 30},
        "biased": {"messages": chat, "logit_bias": {"90": 100}, "max_tokens": 3},
    }
    llm = LLM(model_dir)
    plain = llm.generate([chat], 8)[0]
    asked["stopped"] = {"messages": chat, "stop": [stop := plain.text[2]]}
    lines = [{"custom_id": n, "method": "POST", "url": "/v1/chat/completions", "body": b} for n, b in asked.items()]
    data, out = write_rows(tmp_path / "batch.jsonl", lines), tmp_path / "out.jsonl"
    options = ("--input", data, "--output", str(out))
    assert generate(model_dir, *options, "--output-format", "batch") == 1
    told = capsys.readouterr().err
    assert all(f"body.{field}=" in told for field in ("temperature", "max_completion_tokens", "n", "response_format"))
    assert "not in the prompts: 'body.logprobs'" in told
    found = {row["custom_id"]: row for row in read_rows(out)}
    assert list(found) == list(asked)
    wrong = [name for name, row in found.items() if row["error"] is not None]
    assert wrong == ["wrong", "long", "many", "true", "several", "least", "kind", "bias", "schema", "never"]
    assert found["wrong"]["error"]["message"].startswith("line 4: body.temperature")
    assert "99999" in found["bias"]["error"]["message"]
    content = {name: found[name]["response"]["body"]["choices"][0]["message"]["content"] for name in ("json", "biased")}
    assert (json.loads(content["json"]) in (12, "ab"), len(set(content["biased"]))) == (True, 1)
    drawn = llm.generate([chat], 12, temperature=0.8, top_p=0.9, seed=5)[0]
    for name, wanted in (("plain", plain.text), ("drawn", drawn.text), ("stopped", plain.text.split(stop)[0])):
        answer = found[name]["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == wanted
        assert answer["usage"]["total_tokens"] == sum(list(answer["usage"].values())[:2])
    short = found["short"]["response"]["body"]
    assert short["object"] == "text_completion"
    wanted = {"text": llm.generate("hi", 3, template=False)[0].text, "finish_reason": "length"}
    assert wanted.items() <= short["choices"][0].items()


def test_calls_of_tools_are_answered_as_the_server_does(tmp_path: Path, capsys: Any):
    model = save_tiny_model(tmp_path / "tiny", chat=HERMES, context=400)
    asked: dict[str, Any] = {
        "called": {"tool_choice": "required", "parallel_tool_calls": False},
        "text": {"tool_choice": "auto"},
        "no call": {"tool_choice": "none"},
        "no tool": {"tool_choice": {"type": "function", "function": {"name": "x"}}},
    }
    common = {"messages": [CHAT_TURN], "tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 70}
    lines = [{"custom_id": name, "body": common | fields} for name, fields in asked.items()]
    options = ("--input", write_rows(tmp_path / "batch.jsonl", lines), "--output-format", "batch")
    assert generate(model, *options) == 1
    told = capsys.readouterr()
    found = {row["custom_id"]: row for row in map(json.loads, told.out.splitlines())}
    assert "tool_choice" in found.pop("no tool")["error"]["message"]
    bodies = {name: row["response"]["body"] for name, row in found.items()}
    assert {body["model"] for body in bodies.values()} == {"tiny"}
    (call,) = bodies["called"]["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
    assert (bodies["called"]["choices"][0]["finish_reason"], call["type"]) == ("tool_calls", "function")
    assert bodies["called"]["choices"][0]["message"]["content"] is None
    assert "tool_calls" not in bodies["text"]["choices"][0]["message"]
    used = {name: body["usage"]["prompt_tokens"] for name, body in bodies.items()}
    assert used["called"] == used["text"] > used["no call"]
    assert "not in the prompts" not in told.err


def test_the_last_line_is_the_measured_speed(capsys: Any, model_dir: str, monkeypatch: pytest.MonkeyPatch):
    def last(*options: str) -> str:
        assert generate(model_dir, "hi", "--schedule", "2x", *options) == 0
        return str(capsys.readouterr().err.splitlines()[-1])

    count_time(monkeypatch)
    assert "as fast" not in last()
    assert "times as fast as all layers" in last("--compare")


def test_stop_strings_end_and_cut_the_text(capsysbinary: Any, model_dir: str):
    assert generate(model_dir, "hello") == 0
    text = json.loads(capsysbinary.readouterr().out)["text"]
    stop = next(c for c in text if c.isascii() and c.isprintable())
    assert generate(model_dir, "hello", "--stop", stop) == 0
    row = json.loads(capsysbinary.readouterr().out)
    assert (row["text"], row["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert row["new_tokens"] < 8


def test_a_stop_text_takes_no_prompt_and_the_flag_repeats(capsysbinary: Any, model_dir: str):
    assert generate(model_dir, "--stop", "END", "hello", "--stop", "\\n\\n", "you") == 0
    rows = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == [1, 2]


def test_terminals_get_text(capsysbinary: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_dir: str):
    def shown(*arguments: str) -> str:
        assert generate(model_dir, *arguments) in (0, 1)
        return capsysbinary.readouterr().out.decode()

    one, two = (json.loads(shown(prompt))["text"].strip("\n") for prompt in ("one", "two"))
    assert shown("one", "--output-format", "text") == one + "\n"
    assert shown("one", "two", "--output-format", "text") == f"> one\n{one}\n\n> two\n{two}\n\n"
    data = write_rows(tmp_path / "in.jsonl", [{"prompt": "one"}, {"prompt": ""}, {"messages": [CHAT_TURN]}])
    lines = shown("--input", data, "--output-format", "text").splitlines()
    assert [line for line in lines if line.startswith("> ")] == ["> one", "> line 2", "> hi"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown("one") == one + "\n"
    assert json.loads(shown("one", "--output-format", "jsonl"))["text"].strip("\n") == one
    assert generate(model_dir, "one", "--output", str(tmp_path / "out.jsonl")) == 0
    assert read_rows(tmp_path / "out.jsonl")[0]["text"].strip("\n") == one


def test_summary_tells_layers_speed_and_bytes(capsys: Any, tmp_path: Path, model_dir: str, rows_file: str):
    figures = tmp_path / "figures.json"
    options = ("--input", rows_file, "--output", "/dev/null", "--schedule", "2x", "--summary", str(figures))
    assert generate(model_dir, *options, "--compare") == 0
    table = capsys.readouterr().err
    found = json.loads(figures.read_text())
    summary = found["summary"]
    schedule = Schedule.from_speedup(LAYERS, 2, 8)
    assert found["settings"]["schedule"] == schedule.to_dict()
    assert summary["mean_layers_per_token"] == pytest.approx(schedule.mean_budget(7))
    assert (summary["rows"], summary["bad_rows"], summary["new_tokens"]) == (30, 0, 240)
    assert summary["decode_tokens"] == 210
    assert 0 < summary["kv_bytes_peak"] < summary["kv_bytes_full_peak"]
    assert (summary["comparison"]["batches"], summary["comparison"]["batch_size"]) == (4, 8)
    assert summary["comparison"]["nominal_speedup"] == pytest.approx(LAYERS / schedule.mean_budget(7))
    for name in ("nominal", "decode", "request"):
        assert f"{summary['comparison'][name + '_speedup']:.2f}x" in table
    assert 0 < summary["comparison"]["request_tokens_per_s"] < summary["comparison"]["decode_tokens_per_s"] * 8 / 7
    assert found["environment"]["packages"]["torch"]


def test_a_schedule_whose_prompts_alone_skip_is_described_so(capsys: Any, model_dir: str, rows_file: str):
    assert generate(model_dir, "--input", rows_file, "--output", "/dev/null", "--schedule", "full:p4", "--compare") == 0
    told = capsys.readouterr().err
    assert f"prompts alone skip layers and run 4 of {LAYERS}; new tokens run all" in told
    assert f"prompts ran 4.0 of {LAYERS} layers, new tokens all; keys and values: at most" in told
    assert f"prompts run 4 of {LAYERS} layers, which the nominal speed-up leaves out" in told
    assert "0% saved" not in told


def test_an_interrupted_comparison_loses_no_row(
    tmp_path: Path, model_dir: str, rows_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out.jsonl"
    options = ("--input", rows_file, "--output", str(out), "--schedule", "2x", "--compare")
    with monkeypatch.context() as patched:
        patched.setattr("skipdecode.generation.stats.SpeedComparison.of", interrupted)
        assert generate(model_dir, *options) == 130
    assert "interrupted: 30 finished rows are kept" in capsys.readouterr().err
    assert generate(model_dir, *options) == 0
    assert len(read_rows(out)) == 30


def test_schedule_is_that_of_the_file_the_speedup_or_the_checkpoint(capsysbinary: Any, tmp_path: Path, model_dir: str):
    def text(directory: str, *arguments: str) -> str:
        assert generate(directory, "hello", *arguments) == 0
        return str(json.loads(capsysbinary.readouterr().out)["text"])

    schedule = Schedule.from_speedup(LAYERS, 2, 8)
    file = tmp_path / "schedule.json"
    file.write_text(schedule.to_json())
    tuned = save_tiny_model(tmp_path / "tuned", skipdecode=schedule.to_dict())
    full, skipping = text(model_dir), text(model_dir, "--schedule", "2x")
    assert full != skipping
    assert text(model_dir, "--schedule", str(file)) == text(tuned) == skipping
    assert text(tuned, "--schedule", "1x") == full
    assert text(tuned, "--schedule", schedule.name) == skipping
    assert text(tuned, "--schedule", "full") == full
    assert generate(tuned, "hello", "--schedule", "other") == 2
    assert f"accepted are full, {schedule.name} by name" in capsysbinary.readouterr().err.decode()


def test_a_full_device_is_one_line(capsys: Any, model_dir: str):
    assert generate(model_dir, "x", "--output", "/dev/full") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("skipdecode: cannot write to /dev/full: No space left on device")


def test_too_little_memory_is_one_line_with_what_to_lower(capsys: Any, tmp_path: Path, model_dir: str, rows_file: str):
    out = ["--output", str(tmp_path / "out.jsonl"), "--batch-size", str(10**13)]
    assert main(["generate", model_dir, "--input", rows_file, *out]) == 1
    assert "the memory is too small: lower the batch size" in capsys.readouterr().err


def test_a_batch_names_the_model_as_the_server_publishes_it(tmp_path: Path, capsys: Any):
    ready = tmp_path / "ready"
    model = save_tiny_model(ready / "tuned-6")
    (ready / "prepared.json").write_text(json.dumps({"kind": "prepared", "format": 1, "use": {"model": model}}))
    line = {"custom_id": "a", "body": {"prompt": "hi", "max_tokens": 2}}
    data = write_rows(tmp_path / "batch.jsonl", [line])
    assert generate(str(ready), "--input", data, "--output-format", "batch") == 0
    assert json.loads(capsys.readouterr().out)["response"]["body"]["model"] == "ready"
