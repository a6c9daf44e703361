"""One checkpoint the whole way, tuned on a template that is never named again: tune, eval, generate, served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_tools import greedy, running
from skipdecode.cli import main
from skipdecode.evaluation.results import load_run
from skipdecode.models.loading.hub import load_model
from skipdecode.serving.service import open_service
from textgen_tools import read_rows
from tuning_data import records, save_model, write_jsonl

ROWS = [{"mr": f"name[{r['thing']}]", "ref": r["ref"]} for r in records(8)]
WAYS = {
    "template": (["--prompt-template", "{mr}\\n", "--response-field", "ref"], "name[{}]\n"),
    "split": (["--task", "e2e"], "name[{}]\n"),
    "chat": (["--prompt-template", "Say {mr}.", "--response-field", "ref", "--chat"], "<user>Say name[{}].<assistant>"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_it_was_tuned_on_is_what_every_verb_puts_prompts_into(way: str, tmp_path: Path, capsys: Any) -> None:
    named, shape = WAYS[way]
    data = str(write_jsonl(tmp_path / "data.jsonl", ROWS))
    model, out = str(save_model(tmp_path / "model")), str(tmp_path / "tuned")
    pace = ["--steps", "2", "--schedule", "2x:p3" if way == "split" else "2x", "--merge"]
    assert main(["tune", model, *named, "--train", data, "--dev", data, "--out", out, *pace]) == 0
    expected = [shape.format(row["mr"][5:-1]) for row in ROWS]

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

    loaded = load_model(out)
    schedule = load_run(run).data["config"]["method"]["schedule"]
    assert schedule == loaded.schedule.to_dict()
    assert schedule["prompt"] == ([0, 1, 2] if way == "split" else "full")
    service = open_service(loaded.model, loaded.tokenizer, name="tuned", carried=loaded.schedule, recipe=loaded.recipe)
    with running(service) as client:
        body = greedy(prompt=ROWS[0]["mr"], max_tokens=4)
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == found[0]["text"]
        assert answer["usage"]["prompt_tokens"] == len(expected[0].encode())
