"""Task files, records and prompts: what is read, what is refused, with which line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import byte_tokenizer
from skipdecode.common.rows import dataset_id, read_rows
from skipdecode.data.source import PromptSource, load_records
from skipdecode.data.tasks import HubSource, Task, load_task, task_names
from skipdecode.errors import DataError, UsageError
from skipdecode.evaluation.metrics import check_metric
from skipdecode.evaluation.run import encode_prompts
from textgen_tools import write_rows

TASK = """\
name: mine
prompt: "Say {text}:"
references: [answers, answer]
max_new_tokens: 8
metrics: [bleu]
"""


def write_task(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_built_in_tasks_load_and_have_the_papers():
    for name in task_names():
        task = load_task(name)
        assert task.name == name
        assert task.metrics
        template = task.template
        assert template.render(dict.fromkeys(template.fields, "VALUE")).count("VALUE") == 1
    assert {"e2e", "cnn_dm", "tldr"} <= set(task_names())
    assert load_task("e2e").template.render({"mr": "name[Blue Spice]"}) == "name[Blue Spice]\n"


def test_a_task_file_is_read(tmp_path: Path):
    task = load_task(write_task(tmp_path, TASK + "stop: ['\\n']\n"))
    assert task.references == ("answers", "answer")
    assert task.template.render({"text": "{braces} stay"}) == "Say {braces} stay:"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metrics: [bleu]", "metrics: [bleu, blew]", r"line 5: unknown metric 'blew' \(did you mean 'bleu'\?\)"),
        (
            "max_new_tokens",
            "max_tokens",
            r"mine.yaml: line 4: unknown field 'max_tokens' \(did you mean 'max_new_tokens'",
        ),
        ("max_new_tokens: 8\n", "", "mine.yaml: the field 'max_new_tokens' is missing"),
        ("max_new_tokens: 8", "max_new_tokens: many", "line 4: max_new_tokens: 'many' is not accepted"),
        ("references: [answers, answer]", "references: answer", "line 3: references: 'answer' is not accepted"),
        ("{text}", "{text}\\uD800", "line 2: prompt: .* is not accepted: give text in UTF-8"),
        ("{text}", "{text", "line 2: prompt template: .*write {{ and }} for braces"),
        ("{text}", "{text!r}", "line 2: prompt template: {text} is not accepted: only plain field names"),
        ("{text}", "{0}", r"line 2: prompt template: \{0\} is not accepted"),
        ("{text}", "{}", "line 2: prompt template: {} is not accepted: only plain field names"),
        ("{text}", "hello", "line 2: prompt template: it names no field"),
        (
            "metrics: [bleu]",
            "metrics: [bleu]\ntruncate: txt\nmax_prompt_tokens: 9",
            "line 6: prompt template: 'txt' cannot be cut: name one of its fields",
        ),
        ("metrics: [bleu]", "metrics: [bleu]\ntruncate: text", "line 6: prompt template: .* and a length"),
        ("metrics: [bleu]", "metrics: [bleu]\nstop: ['']", r"line 6: stop: \[''\] is not accepted"),
        ("metrics: [bleu]", "metrics: [bleu]\nresponse_tokens: {mean: 3}", "line 6: response_tokens"),
        ("metrics: [bleu]", "metrics: [bleu]\nhub: {id: a, splits: b}", "line 6: unknown field 'splits' of hub"),
        ("metrics: [bleu]", "metrics: [bleu]\nhub: {split: test}", "mine.yaml: the field 'id' of hub is missing"),
        ("metrics: [bleu]", "metrics: [bleu]\nhub: {id: a, strip: [b]}", "line 6: strip of hub: .* give names"),
        ("metrics: [bleu]", "metrics: []", r"line 5: metrics: \[\] is not accepted: give a list of texts"),
        ("metrics: [bleu]", "metrics: [bleu", "mine.yaml: line 6: not YAML"),
        (TASK, "", "must hold fields and values"),
    ],
)
def test_a_wrong_task_file_is_refused_by_line(tmp_path: Path, old: str, new: str, message: str):
    with pytest.raises(DataError, match=message):
        load_task(write_task(tmp_path, TASK.replace(old, new)), check_metric)


# ---------------------------------------------------------------------- records


def mine(**changes: Any) -> Task:
    return replace(Task("mine", "Say {text}:", ("answers", "answer"), ("bleu",), 8), **changes)


def test_references_may_be_one_text_or_several(tmp_path: Path):
    path = write_rows(
        tmp_path / "d.jsonl",
        [{"text": "a", "answer": "x"}, {"id": "two", "text": 5, "answers": ["y ", "", " z"], "answer": "no"}],
    )
    records = load_records(mine(), path)
    found = [(r.id, r.prompt, r.values, r.references) for r in records.items]
    assert found == [(1, "Say a:", {"text": "a"}, ("x",)), ("two", "Say 5:", {"text": "5"}, ("y ", " z"))]


def test_records_of_one_prompt_are_merged(tmp_path: Path):
    rows = [{"text": "a", "answer": "x"}, {"text": "b", "answer": "y"}, {"text": "a", "answer": "z"}]
    records = load_records(mine(merge_same_prompt=True), write_rows(tmp_path / "d.jsonl", rows))
    assert [(r.id, r.references) for r in records.items] == [(1, ("x", "z")), (2, ("y",))]


def test_records_without_text_are_left_out_and_named_by_line(tmp_path: Path):
    rows = [{"text": "a", "answer": "x"}, {"text": " ", "answer": "y"}, {"text": "b", "answers": [" "]}]
    records = load_records(mine(), write_rows(tmp_path / "d.jsonl", rows))
    assert len(records.items) == 1
    assert records.skipped == ((2, "empty prompt"), (3, "no reference text"))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b'{"txt": "a", "answer": "x"}', "line 2: missing field: 'text'; the record has 'txt', 'answer'"),
        (b'{"text": "a"}', "line 2: missing field: 'answers' or 'answer'; the record has 'text'"),
        (b'{"text": ["a"], "answer": "x"}', "line 2: field is no text: 'text' is a list"),
        (b'{"text": "a", "answers": ["x", null]}', "line 2: field is no text: 'answers' is null"),
        (b'{"text": "\\ud800", "answer": "x"}', "line 2: field is no text: 'text' has half of a surrogate pair"),
        (b'{"text": "a", "id": 1, "answer": "x"}', "line 2: duplicate id: '1' is the id of line 1 too"),
        (b'["a"]', "line 2: not a JSON object: a list"),
    ],
)
def test_a_wrong_record_stops_with_its_line(tmp_path: Path, second: bytes, message: str):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "a", "answer": "x"}\n' + second + b"\n")
    with pytest.raises(DataError, match=message):
        load_records(mine(), path)


def test_all_wrong_records_of_a_file_are_counted(tmp_path: Path):
    rows = [{"text": "a"}, {"text": "a", "answer": "x"}, {"answer": "x"}, {"text": "b"}]
    with pytest.raises(DataError, match=r"d.jsonl: 3 records cannot be used \(3 missing field.*lines 1, 4: .*line 3: "):
        load_records(mine(), write_rows(tmp_path / "d.jsonl", rows))


def test_no_record_at_all(tmp_path: Path):
    with pytest.raises(DataError, match=r"no record to score in .* \(1 left out, the first at line 1: empty prompt\)"):
        load_records(mine(), write_rows(tmp_path / "d.jsonl", [{"text": "", "answer": "x"}]))
    with pytest.raises(UsageError, match="give a JSONL file of records"):
        load_records(mine())


def test_a_dataset_in_hub_layout(tmp_path: Path):
    pytest.importorskip("datasets")
    write_rows(tmp_path / "test.jsonl", [{"post": "long story TL;DR:", "sum": "short"}, {"post": "other", "sum": "o"}])
    source = HubSource(str(tmp_path), fields={"text": "post", "answer": "sum"}, strip={"text": "TL;DR:"})
    records = load_records(mine(hub=source))
    assert [(r.values["text"], r.references) for r in records.items] == [("long story", ("short",)), ("other", ("o",))]


def test_a_split_of_a_dataset_is_read_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datasets")
    (tmp_path / "owner" / "data").mkdir(parents=True)
    rows = [{"text": "long story", "answer": "short", "when": None}, {"text": "other", "answer": "o", "when": "now"}]
    write_rows(tmp_path / "owner" / "data" / "train.jsonl", rows)
    write_rows(tmp_path / "owner" / "data" / "test.jsonl", rows[1:])
    monkeypatch.chdir(tmp_path)
    for name, wanted in (
        ("owner/data:train", rows),
        ("owner/data:default:train[1:]", rows[1:]),
        (f"{tmp_path}/owner/data:test", rows[1:]),
    ):
        assert [row for _, row in read_rows(name)] == wanted
        assert dataset_id(name) == ("owner/data" if name.startswith("owner") else None)
        assert [r.prompt for r in PromptSource.open(name).records()] == [row["text"] for row in wanted]
    file = tmp_path / "owner" / "data:train"  # a file of this name is that file
    file.write_text('{"prompt": "x"}\n')
    assert [row for _, row in read_rows("owner/data:train")] == [{"prompt": "x"}]
    for name in ("owner/data:dev", "nobody/nothing:train"):
        with pytest.raises(DataError, match="does not load") as refused:
            list(read_rows(name))
        assert "\n" not in str(refused.value)


def test_the_digest_tells_data_apart(tmp_path: Path):
    rows = [{"text": "a", "answer": "x"}, {"text": "b", "answer": "y"}]
    records = load_records(mine(), write_rows(tmp_path / "d.jsonl", rows))
    again = load_records(mine(), write_rows(tmp_path / "e.jsonl", json.loads(json.dumps(rows))))
    assert records.digest() == again.digest()
    assert records.digest() != load_records(mine(), tmp_path / "d.jsonl", limit=1).digest()


# ---------------------------------------------------------------------- prompts and outputs


def prompts_of(tmp_path: Path, task: Task, *texts: str, **options: Any) -> list[str]:
    rows = [{"id": f"r{i}", "text": text, "answer": "x"} for i, text in enumerate(texts)]
    records = load_records(task, write_rows(tmp_path / "d.jsonl", rows))
    _, prompts = encode_prompts(task.template, records, byte_tokenizer(), **options)
    return [byte_tokenizer().decode(tokens) for tokens in prompts]


def test_a_long_prompt_loses_the_end_of_the_field_only(tmp_path: Path):
    task = mine(prompt="{text}\nShort:", truncate="text", max_prompt_tokens=12)
    assert prompts_of(tmp_path, task, "abcdefghijkl", "abc") == ["abcde\nShort:", "abc\nShort:"]
    assert prompts_of(tmp_path, task, "abcdefghijkl", "abc", room=9) == ["ab\nShort:", "ab\nShort:"]


def test_a_prompt_beyond_the_context_is_refused_by_id(tmp_path: Path):
    with pytest.raises(DataError, match="prompt too long: that of record r1 has 55 tokens, there is room for 20"):
        prompts_of(tmp_path, mine(), "x", "x" * 50, room=20)
    with pytest.raises(DataError, match="that of record r0 has more than 3 tokens without 'text' too"):
        prompts_of(tmp_path, mine(truncate="text", max_prompt_tokens=3), "x" * 50)


def test_outputs_are_cut_at_the_stop_text():
    assert mine(stop=("\n",)).cut("\n one line \nsecond") == "one line"
    assert mine().cut(" two\nlines ") == "two\nlines"
