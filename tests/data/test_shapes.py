"""Files as people have them: each format and each shape of records is read without options."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet

from checkpoints import HERMES, byte_tokenizer
from skipdecode import evaluate
from skipdecode.cli import main
from skipdecode.common.rows import read_rows
from skipdecode.cost.model import CostModel
from skipdecode.data.examples import RecordOptions, encode_examples, known_shape, make_template
from skipdecode.data.shapes import SHAPES as KNOWN
from skipdecode.data.source import PromptSource, held_out, load_records, read_file
from skipdecode.data.tasks import Task
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError
from skipdecode.learning.settings import PrepareOptions
from skipdecode.learning.sources import Sources
from skipdecode.models.loading.hub import load_model
from textgen_tools import save_tiny_model

ROWS: list[dict[str, Any]] = [{"prompt": f"p {n}", "response": f"r {n}"} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TURNS = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in TURNS]
SHAPES: dict[str, tuple[dict[str, Any], list[tuple[Any, str]]]] = {
    "prompt and response": ({"prompt": "a", "response": "b"}, [("a", "b")]),
    "prompt and completion": ({"prompt": "a", "completion": "b"}, [("a", "b")]),
    "prompt and completion of messages": (
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]},
        [(MESSAGES[:1], "two")],
    ),
    "messages": ({"messages": MESSAGES}, [(MESSAGES[:1], "two"), (MESSAGES[:3], "four")]),
    "messages that are not all learned": (
        {"messages": [MESSAGES[0], MESSAGES[1] | {"weight": 0}, *MESSAGES[2:]]},
        [(MESSAGES[:3], "four")],
    ),
    "conversations": ({"conversations": SHAREGPT}, [(MESSAGES[:1], "two"), (MESSAGES[:3], "four")]),
    "instruction": ({"instruction": "a", "input": "", "output": "b"}, [("a", "b")]),
    "instruction and input": ({"instruction": "a", "input": "c", "output": "b"}, [("a\n\nc", "b")]),
    "instruction and a number": ({"instruction": "a", "input": 5, "output": "b"}, [("a\n\n5", "b")]),
    "instruction and NaN": ({"instruction": "a", "input": float("nan"), "output": "b"}, [("a", "b")]),
    "question": ({"question": "a", "answer": "b"}, [("a", "b")]),
    "question and answers": ({"question": "a", "answers": {"text": ["b", "b"], "answer_start": [1, 9]}}, [("a", "b")]),
    "messages with a prompt beside them": ({"messages": MESSAGES[:2], "prompt": "one"}, [(MESSAGES[:1], "two")]),
    "question and context": ({"question": "a", "context": "c", "answer": "b"}, [("c\n\na", "b")]),
    "text": ({"text": "one two three four"}, [("one two three", " four")]),
}


def _csv(path: Path, mark: str = ",") -> None:
    path.write_text(f"prompt{mark}response\n" + "".join(f"{row['prompt']}{mark}{row['response']}\n" for row in ROWS))


FORMATS: dict[str, Callable[[Path], object]] = {
    "x.jsonl": lambda path: path.write_text(LINES),
    "x.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "x.csv": _csv,
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "x.json.zst": lambda path: path.write_bytes(pyarrow.compress(json.dumps(ROWS).encode(), "zstd", asbytes=True)),
    "x.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES.encode())),
    "x.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES.encode())),
    "x.parquet": lambda path: parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
    "x.arrow": lambda path: feather.write_feather(pyarrow.Table.from_pylist(ROWS), path, compression="uncompressed"),
    "x.feather": lambda path: feather.write_feather(pyarrow.Table.from_pylist(ROWS), path),
}


def test_objects_of_a_table_have_no_fields_of_others(tmp_path: Path) -> None:
    rows = [{"a": {"tools": [{"x": {"k": None}}, {"y": [1, None]}]}, "b": None}, {"a": {"tools": []}, "b": 1}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    wanted = [{"a": {"tools": [{"x": {}}, {"y": [1, None]}]}, "b": None}, rows[1]]
    assert [row for _, row in read_rows(tmp_path / "x.parquet")] == wanted


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.json", b'[{"a": 1}, {"b":', "no whole JSON array"),
        ("x.jsonl.gz", gzip.compress(b"x" * 99999, mtime=0)[:50], "is damaged"),
        ("x.parquet", b"PAR1" + b"x" * 99, "no whole Parquet or Arrow file"),
    ],
)
def test_a_damaged_file_is_one_line(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_known_by_its_fields(name: str) -> None:
    row, expected = SHAPES[name]
    source = [row | {"id": f"{number}", "split": "train"} for number in range(200)]
    template = make_template(RecordOptions(), source)
    file = read_file(source, template)
    assert [(one.prompt, one.references[0]) for one in file.items] == expected * 200
    assert len({one.id for one in file.items}) == len(expected) * 200
    # A checkpoint that was tuned on a field of another name.
    task = Task("mine", "{mr}", ("response",), ("bleu",), 8)
    scored = load_records(task, source, shape=known_shape(source, "", "", task.template))
    assert [(one.prompt, one.references[0]) for one in scored.items] == expected * 200
    assert PromptTemplate().record_of(row).prompt == (expected[-1][0] if name != "text" else row["text"])


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
CALLS = HERMES.removesuffix("<assistant>") + ASKS
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("said", [None, "", "I ask."])
def test_calls_and_tools_are_learned_as_the_chat_template_writes_them(said: str | None, capsys: Any) -> None:
    calling = {"role": "assistant", "content": said, "tool_calls": [CALL, CALL]}
    turns = [MESSAGES[0], calling, {"role": "tool", "content": "5"}, MESSAGES[3]]
    source: list[dict[str, Any]] = [{"messages": turns, "tools": json.dumps(TOOLS)}]
    if said is None:
        written = {"from": "function_call", "value": json.dumps([{"name": "f", "arguments": {"a": 1}}] * 2)}
        others = [{"from": "observation", "value": "5"}, *SHAREGPT[3:]]
        source = [{"conversations": [SHAREGPT[0], written, *others], "tools": json.dumps(TOOLS)}]
    template, tokenizer = make_template(RecordOptions(chat=True), source), byte_tokenizer(CALLS)
    first, second = encode_examples(read_file(source, template), template, tokenizer)[0]
    plain = tokenizer.decode(first.prompt + first.response[:-1])
    assert '{"type": "function", "function": {"name": "f"}} within' in plain
    assert tokenizer.decode(first.response[:-1]).count('"arguments": {"a": 1}}') == 2
    # What is learned is what a later turn has in its prompt.
    assert tokenizer.decode(second.prompt).startswith(plain)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + ASKS
    assert len(encode_examples(read_file(source, template), template, tokenizer)[0]) == 1 + bool(said)
    told = capsys.readouterr().err
    assert ("writes them: tool_calls" in told, "1 answers have nothing else" in told) == (True, not said)


def test_reasoning_is_learned_where_the_chat_template_writes_it(capsys: Any) -> None:
    answer = MESSAGES[1] | {"reasoning_content": "because"}
    for source in ([{"messages": [MESSAGES[0], answer]}], [{"prompt": MESSAGES[:1], "completion": [answer]}]):
        template, tokenizer = make_template(RecordOptions(chat=True), source), byte_tokenizer()
        for thought, wanted in (("<think>{{ m.reasoning_content }}</think>", "<think>because</think>two"), ("", "two")):
            tokenizer.chat_template = (
                "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}" + thought + "{% endif %}"
                "{{ m.content }}{% endfor %}" + ASKS
            )
            (example,), _ = encode_examples(read_file(source, template), template, tokenizer)
            assert tokenizer.decode(example.response[:-1]) == wanted
        assert "writes them: reasoning_content" in capsys.readouterr().err


def test_prepare_writes_calls_as_the_chat_template_does(tmp_path: Path) -> None:
    turns = [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    loaded = load_model(save_tiny_model(tmp_path / "model", chat=CALLS))
    sources = Sources(PrepareOptions(), {"train": [{"messages": turns, "tools": TOOLS}] * 2}, tmp_path)
    (row,) = [row for _, row in read_rows(sources.written_records(loaded).train)]
    assert row["response"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_two_shapes_or_none_are_an_error() -> None:
    both = {"prompt": "a", "response": "b", "messages": MESSAGES}
    with pytest.raises(DataError, match="fit 'prompt and response' and 'messages'"):
        make_template(RecordOptions(), [both])
    with pytest.raises(DataError, match="have 'a', which is none of"):
        make_template(RecordOptions(), [{"a": 1}])
    rows = [{"question": "a", "context": {"title": ["c"]}, "answer": "b"}]
    with pytest.raises(DataError, match="'context' is an object"):
        read_file(rows, make_template(RecordOptions(), rows))


def test_a_record_without_an_answer_keeps_its_line(tmp_path: Path) -> None:
    rows = [{"messages": MESSAGES}, {"messages": MESSAGES[:1]}, {"messages": "x"}]
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"2 records .*line 2: no answer.*line 3: field 'messages' is text"):
        read_file(source, make_template(RecordOptions(), source))


def test_an_alpaca_array_prepares_a_model_as_typed(tmp_path: Path, capsys: Any) -> None:
    rows = [
        {"instruction": f"Say {word}", "input": f"number {n}", "output": f"{word} {n}"}
        for n, word in enumerate(["red", "blue"] * 15)
    ]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows, indent=1))
    model = save_tiny_model(tmp_path / "model", context=512)
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(CostModel.of_step(8, 16, 0.001, 0.002).to_dict()))
    command = ["prepare", model, "--train", str(tmp_path / "alpaca.json"), "--target-speedup", "1.3"]
    assert main([*command, "--cost", str(cost), "--minutes", "0", "--no-fit", "--out", str(tmp_path / "d")]) == 0
    told = capsys.readouterr().err
    assert "records of instruction, input and output" in told
    assert "3 of 30 records are held out" in told
    lines = (tmp_path / "d" / "records" / "dev.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"id": 1, "prompt": "Say red\n\nnumber 0", "response": "red 0"}


def test_chats_are_scored_and_held_out_as_what_they_are(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"conversations": SHAREGPT}) + "\n" for _ in range(4)))
    model, options = save_tiny_model(tmp_path / "model"), {"max_new_tokens": 2, "metrics": ["bleu"]}
    for row, prompt in (({"prompt": "a", "response": "b"}, "<user>a<assistant>"), ({"text": "one two"}, "one")):
        (run,) = evaluate(model, [row], ["full"], **options).runs
        assert run.outputs[0]["prompt_tokens"] == len(prompt)
    (run,) = evaluate(model, source, ["full"], **options).runs
    assert "records of conversations" in capsys.readouterr().err
    assert len(run.outputs) == 8
    file = read_file(source, make_template(RecordOptions(), source))
    assert [{one.line for one in part.items} for part in held_out(file)] == [{2, 3, 4}, {1}]


def test_the_docs_say_of_every_shape_and_file_whether_it_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "records.md").read_text()
    shapes = page.partition("| shape |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([^`]+)`", shapes, re.M)) == set(KNOWN)
    samples = FORMATS | {"x.ndjson": FORMATS["x.jsonl"], "x.tsv": lambda path: _csv(path, "\t")}
    known = {name.rpartition(".")[2] for name in samples}
    rows = re.findall(r"^\| .*: (`.*`) \| (yes|no) \|", page.partition("| file |")[2].partition("\n\n")[0], re.M)
    said = {kind: read for names, read in rows for kind in re.findall(r"`\.(\w+)`", names)}
    assert said == dict.fromkeys(known, "yes")
    for name, write in samples.items():
        write(tmp_path / name)
        assert [row for _, row in read_rows(tmp_path / name)] == ROWS
        found = [record.prompt for record in PromptSource.open(str(tmp_path / name)).records()]  # as `generate` does
        assert found == [row["prompt"] for row in ROWS]
    (tmp_path / "x.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError):
        list(read_rows(tmp_path / "x.xlsx"))
