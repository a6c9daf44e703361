"""A tuned checkpoint's template in the verbs: the default of each, and how it is switched off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import byte_tokenizer, edit_json
from serve_tools import greedy, offline, post, running, tiny_served_model
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.data.template import PromptTemplate
from skipdecode.evaluation.results import load_run
from skipdecode.models.loading.hub import load_model
from skipdecode.models.recipe import Recipe
from skipdecode.serving.service import Service, open_service
from textgen_tools import read_rows, save_tiny_model, stdin_of, write_rows
from tiny import LAYERS
from tuning_data import records, save_model, write_jsonl

ROWS = [{"mr": "name[X]"}, {"prompt": "name[Y]"}, {"text": "name[Z]\n"}]
RENDERED = ["name[X]\n", "name[Y]\n", "name[Z]\n"]


def tuned(folder: Path, template: str = "{mr}\n", **options: Any) -> str:
    """A tiny checkpoint whose recipe says that it was tuned on this template."""
    name = save_tiny_model(folder)
    prompt = {"template": template, "responses": ["ref"], "chat": False} | options
    recipe = {"kind": "recipe", "format": 1, "options": {}, "prompt": prompt}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tuned(tmp_path_factory.mktemp("tuned"))


def prompts(capsysbinary: Any, *arguments: str, code: int = 0) -> list[str]:
    """The prompts that `generate` tokenised; of a row that it refused, its error."""
    assert main(["generate", *arguments, "--max-new-tokens", "2", "--include-prompt"]) == code
    rows = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    return [row["prompt"] if "prompt" in row else row["error"] for row in rows]


def test_generate_uses_template(capsysbinary: Any, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "in.jsonl", ROWS)
    (tmp_path / "in.txt").write_text("name[X]\n\nname[Y]\nname[Z]\n")
    assert prompts(capsysbinary, model, "--input", rows) == RENDERED
    assert prompts(capsysbinary, model, "--input", str(tmp_path / "in.txt")) == RENDERED
    assert prompts(capsysbinary, model, "--temperature", "0", "name[X]", "name[Y]", "name[Z]") == RENDERED
    for arguments in ((), ("--input", "-")):
        stdin_of(monkeypatch, "name[X]\nname[Y]\nname[Z]\n")
        assert prompts(capsysbinary, model, *arguments) == RENDERED


def test_generate_says_which_template_and_how_to_do_without(capsys: Any, model: str) -> None:
    assert main(["generate", model, "name[X]", "--max-new-tokens", "2"]) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "template" in line]
    assert "'{mr}\\n'" in told
    assert "--no-template" in told
    assert main(["generate", model, "name[X]", "--max-new-tokens", "2", "--no-template"]) == 0
    assert "template" not in capsys.readouterr().err


def test_what_generate_is_told_comes_before_the_checkpoint(capsysbinary: Any, tmp_path: Path, model: str) -> None:
    assert prompts(capsysbinary, model, "name[X]", "--no-template") == ["name[X]"]
    assert prompts(capsysbinary, model, "name[X]", "--prompt-template", "<{mr}>\\n") == ["<name[X]>\n"]
    assert prompts(capsysbinary, model, "long", "--task", "tldr") == ["long\n\nTL;DR:\n"]
    assert prompts(capsysbinary, model, "hi", "--chat") == ["<user>hi<assistant>"]
    rows = write_rows(tmp_path / "in.jsonl", [{"mr": "no", "plan": "name[P]"}])
    assert prompts(capsysbinary, model, "--input", rows, "--field", "plan") == ["name[P]\n"]


def test_chats_stay_chats_and_a_template_of_chats_goes_through_both(capsysbinary: Any, tmp_path: Path) -> None:
    model = tuned(tmp_path / "chat", "Say {word}.", chat=True)
    rows = [{"word": "this"}, {"messages": [{"role": "user", "content": "hi"}]}]
    found = prompts(capsysbinary, model, "--input", write_rows(tmp_path / "in.jsonl", rows))
    assert found == ["<user>Say this.<assistant>", "<user>hi<assistant>"]


@pytest.mark.parametrize("verb", ["generate", "chats", "tune", "serve"])
def test_a_broken_chat_template_is_told_before_any_work(capsys: Any, tmp_path: Path, verb: str) -> None:
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    row = {"prompt": "a", "response": "b", "messages": [{"role": "user", "content": "a"}]}
    data = write_rows(tmp_path / "in.jsonl", [row])
    learn = ["--train", data, "--dev", data, "--prompt-field", "prompt", "--response-field", "response", "--chat"]
    command = {
        "generate": ["generate", model, "hello", "--chat"],
        "chats": ["generate", model, "--input", data, "--field", "messages", "--output", str(tmp_path / "out.jsonl")],
        "tune": ["tune", model, *learn, "--out", str(tmp_path / "out"), "--schedule", "2x"],
        "serve": ["serve", model, "--port", "0"],
    }[verb]
    assert main(command) == 2
    assert "the model's chat template is broken: line 2: " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()
    assert main(["generate", model, "hello", "--max-new-tokens", "1"]) == 0
    assert "template is broken: line 2: " in capsys.readouterr().err


def test_a_template_of_several_fields_wants_them_all(capsysbinary: Any, tmp_path: Path) -> None:
    model = tuned(tmp_path / "two", "{colour} {thing}:")
    rows = write_rows(tmp_path / "in.jsonl", [{"colour": "red", "thing": "car"}, {"prompt": "car"}, {"colour": "red"}])
    good, text, half = prompts(capsysbinary, model, "--input", rows, code=1)
    assert good == "red car:"
    assert "'colour', 'thing'" in text
    assert "no template" in text
    assert "'thing'" in half
    assert main(["generate", model, "red car"]) == 2
    assert b"'colour', 'thing'" in capsysbinary.readouterr().err


def test_rows_that_end_at_their_first_token_are_counted_and_said(capsys: Any, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    command = ["generate", model, "a", "b", "ccc", "--max-new-tokens", "1", "--output", str(tmp_path / "out.jsonl")]
    assert main(command) == 0
    assert "first token" not in capsys.readouterr().err
    edit_json(tmp_path / "model/generation_config.json", eos_token_id=list(range(259)))
    figures = tmp_path / "figures.json"
    assert main([*command, "--overwrite", "--summary", str(figures)]) == 0
    assert [row["finish_reason"] for row in read_rows(tmp_path / "out.jsonl")] == ["eos"] * 3
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "first token" in line]
    assert "3 of 3 records" in told
    assert "another template" in told
    assert json.loads(figures.read_text())["summary"]["rows_ended_at_once"] == 3


# ---------------------------------------------------------------------- served


TUNED = Schedule.from_speedup(LAYERS, 2, 16, name="tuned")
DEEPER = Schedule.from_speedup(LAYERS, 3, 16, name="deeper")


def service(recipe: Recipe | None, **options: Any) -> Service:
    return open_service(
        tiny_served_model(), byte_tokenizer(), name="tiny", others=(TUNED, DEEPER), recipe=recipe, **options
    )


def text(client: Any, prompt: Any, **extension: Any) -> str:
    body = greedy(prompt=prompt, max_tokens=6, **({"skipdecode": extension} if extension else {}))
    return post(client, "/v1/completions", body)["choices"][0]["text"]


def test_a_served_completion_goes_into_the_template_unless_the_request_says_otherwise() -> None:
    ids = list(range(5, 9))
    with running(service(Recipe(PromptTemplate("{mr}\n"), tuned_under=(TUNED,)))) as client:
        assert text(client, "name[X]") == text(client, "name[X]\n") == offline("name[X]\n", 6)[1]
        assert text(client, "name[X]", template=False) == offline("name[X]", 6)[1]
        assert text(client, ids) == text(client, ids, template=False)
        entry = client.get("/v1/models").json()["data"][0]["skipdecode"]
        assert entry["template"] == {"prompt": "{mr}\n", "fields": ["mr"], "chat": False, "used": True}
        assert {s["name"]: s["tuned"] for s in entry["schedules"]} == {"full": True, "tuned": True, "deeper": False}


def test_a_server_may_leave_prompts_as_they_are() -> None:
    with running(service(Recipe(PromptTemplate("{mr}\n")), use_template=False)) as client:
        assert text(client, "name[X]") == offline("name[X]", 6)[1]
        assert text(client, "name[X]", template=True) == offline("name[X]\n", 6)[1]
        assert client.get("/v1/models").json()["data"][0]["skipdecode"]["template"]["used"] is False


@pytest.mark.parametrize(
    ("template", "path", "body", "param"),
    [
        ("", "completions", {"prompt": "red car"}, "skipdecode.template"),
        ("{colour} {thing}:", "completions", {"prompt": "red car"}, "prompt"),
        ("{mr}", "completions", {"prompt": [5, 6]}, "skipdecode.template"),  # it would change nothing
        ("{mr}", "chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "skipdecode.template"),
    ],
)
def test_served_prompts_that_no_template_takes(template: str, path: str, body: dict[str, Any], param: str) -> None:
    with running(service(Recipe(PromptTemplate(template)) if template else None)) as client:
        asked = greedy(max_tokens=2, **body)
        refused = post(client, f"/v1/{path}", asked | {"skipdecode": {"template": True}}, 400)
        assert refused["error"]["param"] == param
        post(client, f"/v1/{path}", asked | {"skipdecode": {"template": False}})


PAIRS = [{"mr": f"name[{r['thing']}]", "ref": r["ref"]} for r in records(8)]
WAYS = {
    "template": (["--prompt-template", "{mr}\\n", "--response-field", "ref"], "name[{}]\n"),
    "split": (["--task", "e2e"], "name[{}]\n"),
    "chat": (["--prompt-template", "Say {mr}.", "--response-field", "ref", "--chat"], "<user>Say name[{}].<assistant>"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_it_was_tuned_on_is_what_every_verb_puts_prompts_into(way: str, tmp_path: Path, capsys: Any) -> None:
    named, shape = WAYS[way]
    data = str(write_jsonl(tmp_path / "data.jsonl", PAIRS))
    model, out = str(save_model(tmp_path / "model")), str(tmp_path / "tuned")
    pace = ["--steps", "2", "--schedule", "2x:p3" if way == "split" else "2x", "--merge"]
    assert main(["tune", model, *named, "--train", data, "--dev", data, "--out", out, *pace]) == 0
    expected = [shape.format(row["mr"][5:-1]) for row in PAIRS]

    rows = str(tmp_path / "rows.jsonl")
    common = ["--max-new-tokens", "4"]
    assert main(["generate", out, "--input", data, "--include-prompt", "--output", rows, *common]) == 0
    found = read_rows(rows)
    assert [row["prompt"] for row in found] == expected
    told = capsys.readouterr().err
    assert "will be bad" not in told
    assert ("prompts 3, new tokens" in told) == (way == "split")

    run = str(tmp_path / "run")
    scores = ["--metrics", "bleu", "--resamples", "20", "--no-teacher-forced"]
    assert main(["eval", out, "--data", data, "--out", run, *common, *scores]) == 0
    assert "will be bad" not in capsys.readouterr().err
    texts = {text.removeprefix("<user>").removesuffix("<assistant>") for text in expected}
    assert {row["prompt"] for row in read_rows(f"{run}/outputs.jsonl")} == texts

    loaded = load_model(out)
    schedule = load_run(run).data["config"]["method"]["schedule"]
    assert schedule == loaded.checkpoint.schedule.to_dict()
    assert schedule["prompt"] == ([0, 1, 2] if way == "split" else "full")
    how = {"checkpoint_schedule": loaded.checkpoint.schedule, "recipe": loaded.checkpoint.recipe}
    service = open_service(loaded.model, loaded.tokenizer, name="tuned", **how)
    with running(service) as client:
        body = greedy(prompt=PAIRS[0]["mr"], max_tokens=4)
        answer = post(client, "/v1/completions", body)
        assert answer["choices"][0]["text"] == found[0]["text"]
        assert answer["usage"]["prompt_tokens"] == len(expected[0].encode())
