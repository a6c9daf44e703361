"""Reading prompts: every kind of input, every kind of bad row, and memory that does not grow with the file."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import byte_tokenizer
from skipdecode.common import jsonl
from skipdecode.data.forms import PromptForm
from skipdecode.data.prompts import PromptEncoder
from skipdecode.data.records import Record, SeenIds, Template
from skipdecode.data.source import PromptSource
from skipdecode.errors import DataError, UsageError
from textgen_tools import write_rows


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


def test_field_option_wins_over_the_usual_fields(tmp_path: Path):
    source = PromptSource.open(write_rows(tmp_path / "in.jsonl", [{"prompt": "no", "question": "yes"}]))
    assert next(source.records(PromptForm("question"))).prompt == "yes"


def test_chat_rows_keep_their_messages(tmp_path: Path):
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    source = PromptSource.open(write_rows(tmp_path / "in.jsonl", [{"messages": chat}, {"prompt": chat}]))
    assert [r.prompt for r in source.records()] == [chat, chat]


def test_argument_prompts_may_hold_line_ends():
    found = list(PromptSource.of_prompts(["one\ntwo", "three"]).records())
    assert [(r.id, r.prompt) for r in found] == [(1, "one\ntwo"), (2, "three")]


@pytest.mark.parametrize(("data", "prompts"), [(b"plain\nlines\n", ["plain", "lines"]), (b'{"prompt": "p"}\n', ["p"])])
def test_standard_input_can_be_read_twice_and_tells_its_format(
    monkeypatch: pytest.MonkeyPatch, data: bytes, prompts: list[str]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    source = PromptSource.open("-")
    for _ in range(2):
        assert [r.prompt for r in source.records()] == prompts


def test_named_pipe_is_read_like_a_file(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=pipe.write_bytes, args=(b"a\nb\n",))
    feeder.start()
    source = PromptSource.open(str(pipe))
    feeder.join()
    assert [r.prompt for _ in range(2) for r in source.records()] == ["a", "b", "a", "b"]


def test_equal_standard_input_has_an_equal_fingerprint(monkeypatch: pytest.MonkeyPatch):
    found = []
    for data in (b"a\n", b"a\n", b"b\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        found.append(PromptSource.open("-").fingerprint)
    assert found[0] == found[1] != found[2]


def test_a_field_is_looked_for_in_jsonl_only(tmp_path: Path):
    path = tmp_path / "in.txt"
    path.write_text("a\n")
    assert [r.prompt for r in PromptSource.open(str(path)).records(PromptForm("question"))] == ["a"]


# ---------------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{broken", "not JSON: Expecting property name"),
        (b"[" * 100_000, "not JSON that can be read: nested too deep"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not JSON that can be read: a number has too many digits"),
        (b'{"prompt": "', "not JSON: Unterminated string starting at character 12"),
        (b'["a"]', "not a JSON object: a list"),
        (b'"text"', "not a JSON object: text"),
        (b'{"x": 1}', "name the prompt's field with --field"),
        (b'{"prompt": 5}', "field 'prompt' is a number: give text"),
        (b'{"prompt": null}', "field 'prompt' is null"),
        (b'{"prompt": ""}', "field 'prompt' is empty"),
        (b'{"prompt": " \\n "}', "field 'prompt' is empty"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
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


def test_missing_field_names_the_field(tmp_path: Path):
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "p"}])
    assert next(PromptSource.open(path).records(PromptForm("question"))).error == "field 'question' is missing"


def test_bad_row_keeps_its_id(tmp_path: Path):
    source = PromptSource.open(write_rows(tmp_path / "in.jsonl", [{"id": "k", "prompt": ""}]))
    assert next(source.records()).id == "k"


def test_endless_line_is_a_bad_row_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    found = records_of(tmp_path / "in.txt", b"ok\n" + b"x" * 2500 + b"\nalso ok\n")
    assert [(r.line, r.prompt) for r in found] == [(1, "ok"), (2, ""), (3, "also ok")]
    assert "longer than" in str(found[1].error)


def test_json_array_is_refused(tmp_path: Path):
    path = tmp_path / "in.json"
    path.write_text('\n[{"prompt": "p"}]')
    with pytest.raises(DataError, match="is a JSON array: give JSONL"):
        PromptSource.open(str(path))


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_unreadable_input_is_one_line(tmp_path: Path, name: str):
    with pytest.raises(DataError, match="cannot read the input"):
        PromptSource.open(str(tmp_path / name))


# ---------------------------------------------------------------------- counting


@pytest.mark.parametrize("data", [b"", b"\n \n\n"])
def test_input_without_prompts_is_refused(tmp_path: Path, data: bytes):
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"no prompts in .*in\.txt"):
        PromptSource.open(str(path)).count()


def test_rows_are_counted_with_the_bad_ones_which_are_refused_on_request(tmp_path: Path):
    source = PromptSource.open(write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": ""}, {"prompt": "c"}, 4]))
    assert source.count() == 4
    assert [r.line for r in source.records() if r.error is not None] == [2, 4]
    with pytest.raises(DataError, match="line 2: field 'prompt' is empty") as stopped:
        source.count(all_usable=True)
    assert stopped.value.line == 2


def test_input_whose_rows_are_all_bad_is_refused(tmp_path: Path):
    source = PromptSource.open(write_rows(tmp_path / "in.jsonl", [{"prompt": ""}, {"id": 1}]))
    with pytest.raises(DataError, match=r"no row of .*in\.jsonl can be used"):
        source.count()


def test_duplicate_ids_are_counted_with_an_example(tmp_path: Path):
    ids: list[Any] = ["a", "b", "a", 1, "1", "a", None]
    rows = [{"id": i, "prompt": "p"} for i in ids]
    source, seen = PromptSource.open(write_rows(tmp_path / "in.jsonl", rows)), SeenIds()
    assert [r.line for r in seen.watch(source.records())] == [*range(1, 8)]
    found = seen.repeated(source.records())
    assert found == "2 rows have the id of an earlier row, such as 'a' on lines 1 and 3"


# ---------------------------------------------------------------------- encoding


def encoded(prompt: Any, **options: Any) -> Any:
    encoder = PromptEncoder(byte_tokenizer(chat=options.pop("template", True)), options.pop("context", 50), **options)
    return encoder.encode([Record(0, 1, 1, "first"), Record(1, 2, 2, prompt), Record(2, 3, 3, "", "was bad")])[1]


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("hi", {}, "hi"),
        ("hi", {"chat": True}, "<user>hi<assistant>"),
        (CHAT, {}, "<user>hi<assistant>"),
        (CHAT, {"system": "be kind"}, "<system>be kind<user>hi<assistant>"),
        ([{"role": "system", "content": "own"}, *CHAT], {"system": "be kind"}, "<system>own<user>hi<assistant>"),
    ],
)
def test_prompts_become_the_text_that_is_asked_for(prompt: Any, options: dict[str, Any], text: str):
    found = encoded(prompt, **options)
    assert (found.text, found.error, len(found.token_ids)) == (text, None, len(text))
    assert found.room == 50 - len(text)


def test_results_keep_the_order_of_the_rows_when_chats_and_texts_mix():
    records = [Record(i, i + 1, i, CHAT if i % 2 else f"text {i}") for i in range(6)]
    found = PromptEncoder(byte_tokenizer(), None).encode(records)
    assert [p.record.index for p in found] == list(range(6))
    assert [p.text for p in found[:2]] == ["text 0", "<user>hi<assistant>"]


def test_prompt_that_fills_the_context_is_bad_and_one_token_less_is_not():
    assert encoded("x" * 49).room == 1
    assert "has 50 tokens: the model's context of 50" in encoded("x" * 50).error
    assert encoded("x" * 500, context=None).error is None


def test_template_troubles_stay_with_their_row():
    assert "no tools here" in encoded([{"role": "tool", "content": "x"}]).error
    assert "has no chat template" in encoded(CHAT, template=False).error
    with pytest.raises(UsageError, match="no chat template: give --no-chat"):
        PromptEncoder(byte_tokenizer(chat=False), None, chat=True)


# ---------------------------------------------------------------------- memory


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_reading_counting_and_watching_ids_keep_no_more_than_eight_bytes_a_row(tmp_path: Path):
    def peak(rows: int) -> int:
        path = tmp_path / f"{rows}.jsonl"
        with path.open("w") as file:
            for i in range(rows):
                file.write(json.dumps({"id": f"row-{i}", "prompt": "word " * 100}) + "\n")
        source, seen = PromptSource.open(str(path)), SeenIds()

        def work() -> None:
            assert source.count(all_usable=True) == rows
            assert sum(1 for _ in seen.watch(source.records())) == rows
            assert not seen.repeated(source.records())

        return peak_bytes(work)

    peak(100)
    few, many = peak(100), peak(10_000)
    # 10,000 rows are 5 MB of text. 8 bytes a row find duplicate ids, three times that while they are sorted.
    assert many - few < 3 * 8 * 10_000 + 50_000


@pytest.mark.parametrize("number", ["1e999", "-Infinity", "NaN"])
def test_a_number_that_is_not_finite_is_no_text(number: str):
    row = json.loads(f'{{"price": {number}, "unused": NaN}}')
    with pytest.raises(DataError, match=r"'price' is -?(inf|nan), not a finite number"):
        Template("{price}").values(row)
    assert Template("{price}").values(row | {"price": 1.5}) == {"price": "1.5"}


def test_a_missing_field_is_told_without_all_that_the_record_has():
    with pytest.raises(DataError) as told:
        Template("{text}").values({"n" * 10**6: 1} | {f"k{i}": 1 for i in range(1000)})
    assert len(str(told.value)) < 500
    assert str(told.value).endswith("'k18' and 981 more")
