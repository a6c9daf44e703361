"""`skipdecode serve` as a process: options, logs, signals; and the command line for vLLM."""

from __future__ import annotations

import json
import signal
import socket

import httpx

from serve_tools import greedy, serving
from skipdecode import Schedule
from skipdecode.cli import main, serve
from skipdecode.cli.arguments import Parser, add_options, config_from
from skipdecode.cli.serve import Config
from skipdecode.models.loading.checkpoint import served_name
from textgen_tools import save_tiny_model
from tiny import LAYERS


def test_a_server_process_from_start_to_sigterm(tmp_path):
    model = save_tiny_model(tmp_path / "tiny-model", context=1024)
    schedule = tmp_path / "mine.json"
    schedule.write_text(Schedule.even(LAYERS, 4, name="mine").to_json())
    options = ["--schedule", str(schedule), "1.5x:p6", "2x:flat", "--engine", "transformers"]
    log = tmp_path / "log"
    with log.open("w") as stderr, serving(model, *options, stderr=stderr) as (url, process):
        entry = httpx.get(f"{url}/v1/models").json()["data"][0]
        assert entry["id"] == "tiny-model"
        names = ["full", "mine", "skipdecode-p6-1.5x", "skipdecode-2x-flat"]
        assert [s["name"] for s in entry["skipdecode"]["schedules"]] == names
        body = greedy(prompt="a secret", max_tokens=200, stream=True, skipdecode={"schedule": "mine"})
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(20) == 0
    text = log.read_text()
    assert "default: full\n" in text
    assert text.count("tuned under") == 1, "said once"
    assert "were not tuned under mine, skipdecode-p6-1.5x, skipdecode-2x-flat" in text
    assert "secret" not in text
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    request = next(r for r in records if r.get("path") == "/v1/completions")
    assert (request["status"], request["outcome"], request["schedule"]) == (200, "ok", "mine")


def config_of(*arguments):
    parser = Parser()
    add_options(parser, Config)
    return config_from(Config, parser.read(arguments))


def service_of(*arguments):
    return serve._service(config_of(*arguments))


def test_all_that_a_checkpoint_was_tuned_under_is_offered(tmp_path, capsys):
    own = Schedule.from_speedup(LAYERS, 2, 16)
    model = save_tiny_model(tmp_path / "tuned", skipdecode=own.to_dict())
    options = {"curriculum": "sampled", "sampled_speedups": [1.0, 1.5, 2.0]}
    (tmp_path / "tuned" / "recipe.json").write_text(json.dumps({"options": options, "schedule": own.to_dict()}))
    (tmp_path / "mine.json").write_text(Schedule.even(LAYERS, 4, name="mine").to_json())
    service = service_of(model, "--schedule", str(tmp_path / "mine.json"), "--engine", "transformers")
    assert list(service.model.schedules) == ["full", "skipdecode-2x", "skipdecode-1.5x", "mine"]
    assert service.model.default == "skipdecode-2x"
    assert "not tuned under a schedule" not in capsys.readouterr().err


def test_a_model_that_was_tuned_to_shorten_prompts_alone_was_tuned_under_a_schedule(tmp_path, capsys):
    own = Schedule.split(LAYERS, 4, LAYERS)
    save_tiny_model(tmp_path / "tuned")
    (tmp_path / "tuned" / "recipe.json").write_text(json.dumps({"options": {}, "schedule": own.to_dict()}))
    service = service_of(str(tmp_path / "tuned"), "--engine", "transformers")
    assert list(service.model.schedules) == ["full", own.name]
    assert "not tuned under a schedule" not in capsys.readouterr().err


def test_a_model_without_schedules_is_told_how_to_get_one(tmp_path, capsys):
    service = service_of(save_tiny_model(tmp_path / "plain"))
    assert list(service.model.schedules) == ["full"]
    said = capsys.readouterr().err
    assert "not tuned under a schedule" in said
    assert "skipdecode plan" in said


def test_an_address_in_use_is_told_before_a_model_is_loaded(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8}')  # a model without weights
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert main(["serve", str(tmp_path), "--port", str(sock.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_flags_given_twice_are_gathered():
    assert config_of("m", "--schedule", "a", "--schedule", "b", "c").schedule == ("a", "b", "c")


def test_a_prepared_directory_is_served_under_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "prepared.json").write_text(json.dumps({"use": {"model": str(tmp_path / "tuned-6")}}))
    config = config_of(str(tmp_path))
    assert (config.model, config.name) == (str(tmp_path / "tuned-6"), tmp_path.name)
    assert config_of(str(tmp_path), "--name", "mine").name == "mine"
    monkeypatch.chdir(tmp_path)
    assert config_of(".").name == served_name(".") == tmp_path.name
