"""Reading prompts: every kind of input and bad row, fields of a record, repeated values."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from checkpoints import CHAT_TEMPLATE, byte_tokenizer
from skipdecode.cli import main
from skipdecode.common import jsonl
from skipdecode.data.prompts import PromptEncoder
from skipdecode.data.records import Record
from skipdecode.data.shapes import shape_of_field
from skipdecode.data.source import PromptSource, read_file
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError, UsageError
from skipdecode.evaluation.metrics import repeated
from textgen_tools import CONTEXT, read_rows, save_tiny_model, stdin_of, write_rows


def records_of(path: Path, data: bytes) -> list[Record]:
    path.write_bytes(data)
    return list(PromptSource.open(str(path)).records())


def bad_row(tmp_path: Path, line: bytes) -> str:
    """The error of `line`, between two good rows that must come through."""
    good = b'{"prompt": "good"}\n'
    before, bad, after = records_of(tmp_path / "in.jsonl", good + line + b"\n" + good)
    assert (before.prompt, after.prompt, after.index, after.line) == ("good", "good", 2, 3)
    assert (bad.index, bad.line, bad.prompt) == (1, 2, "")
    assert bad.error is not None
    return bad.error


# ---------------------------------------------------------------------- kinds of input


def test_text_file_is_one_prompt_a_line_and_blank_lines_are_none(tmp_path: Path):
    found = records_of(tmp_path / "in.txt", "\ufefffirst\r\n\n  zweite – Zeile \n\t\n{last}".encode())
    assert records_of(tmp_path / "json.txt", b'{"prompt": "one"}')[0].prompt == '{"prompt": "one"}'
    assert [(r.index, r.line, r.id, r.prompt) for r in found] == [
        (0, 1, 1, "first"),
        (1, 3, 3, "  zweite – Zeile "),
        (2, 5, 5, "{last}"),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".in", ""])
def test_jsonl_takes_ids_and_falls_back_to_line_numbers(tmp_path: Path, suffix: str):
    rows = [{"id": "a", "prompt": "one"}, {"id": 7, "text": "two"}, {"mr": "name[X]"}, {"id": None, "input": "four"}]
    source = PromptSource.open(write_rows(tmp_path / f"in{suffix}", rows))
    assert [(r.id, r.prompt) for r in source.records()] == [("a", "one"), (7, "two"), (3, "name[X]"), (4, "four")]


@pytest.mark.parametrize(("data", "prompts"), [(b"plain\nlines\n", ["plain", "lines"]), (b'{"prompt": "p"}\n', ["p"])])
def test_standard_input_can_be_read_twice(monkeypatch: pytest.MonkeyPatch, data: bytes, prompts: list[str]):
    stdin_of(monkeypatch, data)
    source = PromptSource.open("-")
    for _ in range(2):
        assert [r.prompt for r in source.records()] == prompts


# ---------------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{broken", "not JSON: Expecting property name"),
        (b"[" * 100_000, "not JSON that can be read: nested too deep"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not JSON that can be read: a number has too many digits"),
        (b'{"prompt": "', "not JSON: Unterminated string starting at character 12"),
        (b'["a"]', "not a JSON object: a list"),
        (b'{"x": 1}', "name the field of the prompt (the record has 'x')"),
        (b'{"prompt": 5}', "field 'prompt' is a number: give text"),
        (b'{"prompt": null}', "field 'prompt' is null"),
        (b'{"prompt": ""}', "field 'prompt' is empty"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"id": "\\ud800", "prompt": "a"}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "surrogate"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8: byte 16 of the line"),
        (b'{"prompt": "p", "id": {}}', "field 'id' is an object"),
        (b'{"prompt": "p", "id": true}', "field 'id' is true or false"),
        (b'{"messages": []}', "field 'messages' is empty"),
        (b'{"messages": [{"role": "user"}]}', "message 1 of field 'messages' is not an object with text"),
        (b'{"messages": ["hi"]}', "message 1 of field 'messages'"),
    ],
)
def test_bad_row_is_told_and_its_neighbours_are_read(tmp_path: Path, line: bytes, error: str):
    assert error in bad_row(tmp_path, line)


def test_a_bad_row_without_an_id_does_not_take_that_of_another(tmp_path: Path):
    rows = [{"id": 2, "prompt": "a"}, {"prompt": ""}, {"prompt": "c"}, {"id": "k", "prompt": "x" * CONTEXT}]
    out = tmp_path / "out.jsonl"
    command = ["generate", save_tiny_model(tmp_path / "model"), "--max-new-tokens", "1", "--output", str(out)]
    assert main([*command, "--input", write_rows(tmp_path / "in.jsonl", rows)]) == 1
    assert [(row["id"], row.get("line")) for row in read_rows(out)] == [(2, None), (None, 2), (3, None), ("k", 4)]


def test_endless_line_is_a_bad_row_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    found = records_of(tmp_path / "in.txt", b"ok\n" + b"x" * 2500 + b"\nalso ok\n")
    assert [(r.line, r.prompt) for r in found] == [(1, "ok"), (2, ""), (3, "also ok")]
    assert "longer than" in str(found[1].error)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs devices")
def test_a_device_is_refused_before_it_is_read():
    for name in ("/dev/zero", "/dev/urandom"):
        with pytest.raises(DataError, match="is a device"):
            PromptSource.open(name)
    with Path("/dev/zero").open() as zero, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", zero)
        with pytest.raises(DataError, match="is a device"):
            PromptSource.open("-")
    with pytest.raises(DataError, match="no prompts"):
        PromptSource.open("/dev/null").count()


def test_a_line_of_a_pipe_that_never_ends_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skipdecode.common.rows.MAX_LINE_BYTES", 1000)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError), pipe.open("wb", buffering=0) as out:
            out.write(b"ok\n")
            while True:
                out.write(b"x" * 4096)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    with pytest.raises(DataError) as refused:
        PromptSource.open(str(pipe))
    assert refused.value.line == 2
    feeder.join(10)
    assert not feeder.is_alive()


# ---------------------------------------------------------------------- fields of a record


CHAT = [{"role": "user", "content": "hi"}]
TOOLS = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "name": "add", "content": "2"},
]


def prompts_of(
    rows: list[Any], jinja: Any = TOOLS, template: PromptTemplate | None = None, **options: Any
) -> list[str]:
    """The prompts, or the errors, of records."""
    template = template or PromptTemplate(**options)
    records = [*map(template.record_of, rows)]
    return [p.error or p.text for p in PromptEncoder(byte_tokenizer(jinja), None, template).encode(records)]


def test_template_troubles_stay_with_their_row():
    first, tool, last = prompts_of(["first", [{"role": "tool", "content": "x"}], "last"], CHAT_TEMPLATE)
    assert (first, last) == ("first", "last")
    assert "no tools here" in tool
    assert "has no chat template" in prompts_of(["first", CHAT], None)[1]
    with pytest.raises(UsageError, match="no chat template: give prompts without chat"):
        prompts_of([], None, chat=True)


def test_fields_that_are_not_in_the_prompts_are_named_once(capsys: Any):
    rows = [{"messages": CALLED}, {"messages": CALLED, "score": 1}, {"question": "q", "context": "c", "id": 1, "x": ""}]
    assert prompts_of([*rows, *rows]) == [*["<user>1+1?<assistant>[add]<tool>2<assistant>"] * 2, "c\n\nq"] * 2
    told = capsys.readouterr().err
    assert [told.count(repr(name)) for name in ("name", "score")] == [0, 1]  # a tool's name says nothing more
    assert not any(repr(name) in told for name in ("tool_calls", "messages", "question", "context", "id", "x"))
    assert prompts_of([{"messages": CALLED[:1], "tools": [CALL]}], "{{ messages[0].content }}") == ["1+1?"]
    assert "'tools'" in capsys.readouterr().err
    prompts_of([{"q": "q", "context": "c"}], template=PromptTemplate(shape=shape_of_field("q")))  # chosen by the user
    assert capsys.readouterr().err == ""


def test_the_prompt_of_a_record_is_that_of_its_shape():
    alpaca = {"instruction": "To French", "input": "dog", "output": "chien", "text": "To French dog chien"}
    assert prompts_of([{"text": "hi"}, alpaca]) == ["hi", "To French\n\ndog"]
    assert PromptTemplate().record_of(alpaca).guessed_fields == "instruction and input"
    two, text, null = prompts_of(
        [{"prompt": "p", "question": "q"}, {"messages": "hi"}, {"prompt": None, "question": "q"}]
    )
    assert "'prompt' and 'question'" in two
    assert "list of messages" in text
    assert null == "q"


@pytest.mark.parametrize(
    ("field", "value"),
    [("tool_calls", "add"), ("tool_calls", [1]), ("tools", "add"), ("tools", [1]), ("tools", {"a": 1})],
)
def test_calls_and_tools_that_no_template_takes_are_refused(field: str, value: Any):
    message = CALLED[0] | ({field: value} if field == "tool_calls" else {})
    (error,) = prompts_of([{"messages": [message]} | ({field: value} if field == "tools" else {})])
    assert f"{field!r}" in error
    assert "give a list of objects" in error


def test_an_instruction_and_its_input_are_one_prompt(capsys: Any):
    rows = [{"instruction": "To French", "input": "dog"}, {"instruction": "Sing", "input": ""}, {"input": "dog"}]
    assert prompts_of(rows) == ["To French\n\ndog", "Sing", "dog"]
    tuned = PromptTemplate("Q: {prompt}\nA:", ("answer",))
    assert prompts_of(rows, template=tuned)[0] == "Q: To French\n\ndog\nA:"
    assert capsys.readouterr().err == ""
    assert prompts_of(rows[:1], template=PromptTemplate(shape=shape_of_field("input"))) == ["dog"]


def test_a_system_field_is_the_system_message_of_a_chat(capsys: Any):
    chat = {"messages": CHAT, "system": "be brief"}
    assert prompts_of([chat], system="be kind") == ["<system>be brief<user>hi<assistant>"]
    assert prompts_of([{"prompt": "hi", "system": "be brief"}], chat=True) == ["<system>be brief<user>hi<assistant>"]
    assert capsys.readouterr().err == ""
    tuned = PromptTemplate("Q: {prompt}", ("answer",), chat=True)
    row = {"prompt": "hi", "system": "be brief", "answer": "a"}
    assert prompts_of([row], template=tuned) == ["<system>be brief<user>Q: hi<assistant>"]
    assert prompts_of([row], template=PromptTemplate("{system} {prompt}", chat=True))[0].startswith("<user>be")
    assert capsys.readouterr().err == ""
    own = [{"role": "system", "content": "own"}, *CHAT]
    assert prompts_of([{"prompt": "hi", "system": "no"}]) == ["hi"]
    assert "'system'" in capsys.readouterr().err
    assert prompts_of([{"messages": own, "system": "no"}]) == ["<system>own<user>hi<assistant>"]
    assert "'system'" in capsys.readouterr().err


def test_an_answer_at_the_end_of_a_chat_is_not_in_the_prompt(capsys: Any):
    answer = {"role": "assistant", "content": "hello"}
    rows = [{"messages": [*CHAT, answer]}, {"messages": [*CHAT, answer, *CHAT]}, {"messages": [answer]}]
    first, second, third = prompts_of(rows)
    assert first == "<user>hi<assistant>"
    assert second == "<user>hi<assistant>hello<user>hi<assistant>"
    assert "no message before it" in third
    assert capsys.readouterr().err.count("the answer at the end of 'messages'") == 1


def test_a_prompt_that_begins_with_the_start_token_has_one():
    records = [Record(i, i + 1, i, text) for i, text in enumerate(["hi", "<s>hi", "<s><s>hi", " <s>hi", CHAT])]
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    found = [p.token_ids for p in PromptEncoder(tokenizer, None).encode(records)]
    assert found[0] == found[1] == [1, *byte_tokenizer()("hi").input_ids]
    assert [ids.count(1) for ids in found] == [1, 1, 2, 2, 0]


def test_of_named_templates_the_default_one_is_used():
    named = {"default": "A{{ messages[0].content }}", "tool_use": "B"}
    assert prompts_of([{"messages": CHAT}, {"prompt": "x"}], named, chat=True) == ["Ahi", "Ax"]
    with pytest.raises(UsageError, match="'tool_use'"):
        prompts_of([], {"tool_use": "B"}, chat=True)
    assert prompts_of([{"prompt": "hi"}], {"tool_use": "B"}) == ["hi"]


@pytest.mark.parametrize("number", ["1e999", "-Infinity", "NaN"])
def test_a_number_that_is_not_finite_is_no_text(number: str):
    row = json.loads(f'{{"price": {number}, "unused": NaN}}')
    with pytest.raises(DataError, match=r"'price' is -?(inf|nan), not a finite number"):
        PromptTemplate("{price}").values(row)
    assert PromptTemplate("{price}").values(row | {"price": 1.5}) == {"price": "1.5"}


def test_a_missing_field_is_told_without_all_that_the_record_has():
    with pytest.raises(DataError) as told:
        PromptTemplate("{text}").values({"n" * 10**6: 1} | {f"k{i}": 1 for i in range(1000)})
    assert len(str(told.value)) < 500
    assert str(told.value).endswith("'k18' and 981 more")


TEMPLATE = PromptTemplate("{mr}\n", ("ref",))


def record(text: str, *references: str) -> Record:
    return Record(0, 1, 1, TEMPLATE.render({"mr": text}), None, {"mr": text}, references)


def test_what_counts_is_what_the_references_repeat() -> None:
    mr = "name[The Vaults], eatType[pub], priceRange[more than £30], rating[5 out of 5], near[Café Adriatic]"
    assert repeated(record(mr, "The Vaults pub near Café Adriatic: from £30."), ["mr"]) == [
        "The Vaults", "30", "Café Adriatic",
    ]  # fmt: skip
    assert repeated(record(mr, "The Vaults is a pub.", "The Vaults: near Café Adriatic."), ["mr"]) == [
        "The Vaults", "Café Adriatic",
    ]  # fmt: skip
    assert repeated(record(mr, "A pub.", "The Vaults.", "Beer."), ["mr"]) == []
    assert repeated(record("Reading is fun. I like reading, Anna.", "Reading, says Anna"), ["mr"]) == ["Anna"]
    assert repeated(record(mr, "The Vaults"), ["other"]) == []


def test_some_records_of_a_file_come_from_all_over_it() -> None:
    rows = [{"id": number, "prompt": "x", "response": "y"} for number in range(10)]
    file = read_file(rows, PromptTemplate("{prompt}", ("response",)))
    ids = [record.id for record in file.spread(20).items]
    assert sorted(ids) == list(range(10))
    assert sorted(ids[:4]) == [0, 2, 4, 8], "a sample that is cut short is from all over the file too"
    assert [record.id for record in file.spread(4).items] == ids[:4], "a smaller sample begins a larger one"
    assert file.spread(None) == file
