"""Records to token ids, and batches whose responses are aligned."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from checkpoints import CHATML, byte_tokenizer, chatml_tokenizer
from skipdecode.data.batches import IGNORE, GroupedBatches, collate
from skipdecode.data.chats import response_ids
from skipdecode.data.examples import Example, RecordOptions, encode_examples, make_template
from skipdecode.data.source import read_file
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError
from tuning_data import records, write_jsonl

TEMPLATE = PromptTemplate("{colour} {thing}\n", ("ref",))
BAD = {
    "missing field": {"colour": "red", "ref": "x"},
    "empty response": {"colour": "red", "thing": "car", "ref": "  "},
    "several responses": {"colour": "red", "thing": "car", "ref": ["x", "y"]},
    "field is no text": {"colour": ["red"], "thing": "car", "ref": "x"},
    "not UTF-8": b'{"colour": "r\xffd", "thing": "car", "ref": "x"}',
    "not JSON": b'{"colour": ',
    "not a JSON object": [1, 2],
    "duplicate id": {"id": "r1", "colour": "red", "thing": "car", "ref": "x"},
    "response longer than the context": {"colour": "red", "thing": "car", "ref": "x" * 80},
    "record longer than the context": {"colour": "red" * 20, "thing": "car", "ref": "x" * 30},
}


def load_examples(
    path: Path, template: PromptTemplate, tokenizer: Any, *, skip_bad: bool = False, **options: Any
) -> Any:
    file = read_file(path, template, skip_bad=skip_bad)
    return encode_examples(file, template, tokenizer, skip_bad=skip_bad, **options)


def load(path: Path, **options: object) -> object:
    return load_examples(path, TEMPLATE, byte_tokenizer(), max_length=64, **options)


def test_tokens_are_those_of_prompt_and_response_and_end_with_the_end_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    examples, rejects = load(
        write_jsonl(tmp_path / "a.jsonl", [*records(3), {"colour": "red", "thing": 7, "ref": " a b "}])
    )
    assert not rejects
    assert [e.id for e in examples] == ["r0", "r1", "r2", "4"]
    assert tokenizer.decode(examples[3].prompt) == "red 7\n"
    assert tokenizer.decode(examples[3].response) == " a b </s>"
    assert list(examples[3].prompt) == tokenizer("red 7\n")["input_ids"]


def test_bad_records_refuse_the_file_or_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*records(2), *BAD.values(), b"", *records(4)[2:]])
    with pytest.raises(DataError, match=r"records cannot be used \(1 missing field, .*\): line 3: missing field"):
        load(path)
    with pytest.raises(DataError, match="line 3: response longer than the context"):
        load(write_jsonl(tmp_path / "b.jsonl", [*records(2), BAD["response longer than the context"]]))
    examples, rejects = load(path, skip_bad=True)
    assert [e.id for e in examples] == ["r0", "r1", "r2", "r3"]
    assert [(r.line, r.reason.split(":")[0]) for r in rejects] == list(enumerate(BAD, start=3))


def test_nothing_usable_is_an_error_even_when_bad_records_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable record: 1 record cannot be used"):
        load(write_jsonl(tmp_path / "a.jsonl", [BAD["empty response"]]), skip_bad=True)
    with pytest.raises(DataError, match="no usable record"):
        load(write_jsonl(tmp_path / "b.jsonl", [b""]))
    with pytest.raises(DataError, match="No such file"):
        load(tmp_path / "none.jsonl")


def test_texts_in_place_of_records_are_refused() -> None:
    with pytest.raises(DataError, match="not a mapping: text"):
        make_template(RecordOptions(), ["a"])  # type: ignore[list-item]


PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
NO_END = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + PROMPT
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [/Q]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
OTHER_START = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")


@pytest.mark.parametrize(
    ("template", "response"),
    [
        (CHATML, "a {ref}<|im_end|>"),
        (SPACED, " a {ref} </s>"),
        (OTHER_START, "a {ref}<|im_end|>"),
        (NO_END, "a {ref}</s>"),
        ({"default": CHATML, "tool_use": NO_END}, "a {ref}<|im_end|>"),
    ],
    ids=["ChatML", "spaces", "another start", "no end", "named"],
)
def test_a_learned_answer_is_what_the_chat_template_writes(tmp_path: Path, template: Any, response: str) -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = template
    path = write_jsonl(tmp_path / "a.jsonl", [{"thing": "car", "ref": "a {ref}"}])
    (example,), _ = load_examples(path, PromptTemplate("{thing}", ("ref",), chat=True), tokenizer)
    assert tokenizer.decode(example.response) == response
    assert tokenizer.convert_ids_to_tokens(example.response[-1]) in ("<|im_end|>", "</s>")
    (plain,), _ = load_examples(path, PromptTemplate("{thing}", ("ref",)), tokenizer)
    assert tokenizer.decode(plain.response) == "a {ref}</s>"


@pytest.mark.parametrize("answer", ["end", "e", "im_end", "assistant", "a"])
def test_an_answer_that_stands_in_the_templates_own_text_is_whole(answer: str) -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = OTHER_START
    assert tokenizer.batch_decode(response_ids([answer], tokenizer, chat=True)) == [f"{answer}<|im_end|>"]


def test_a_token_of_the_answer_is_not_its_end(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|end|>"])  # not a special one
    rows = [{"thing": "car", "ref": "a"}, {"thing": "car", "ref": "a<|end|>"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for template, ends in ((NO_END, ["</s>", "<|end|></s>"]), (NO_END.replace("{% endfor", "<|end|>{% endfor"), None)):
        tokenizer.chat_template = template
        examples, _ = load_examples(path, PromptTemplate("{thing}", ("ref",), chat=True), tokenizer)
        responses = [tokenizer.decode(example.response) for example in examples]
        assert responses == [f"a{end}" for end in ends or ["<|end|>", "<|end|><|end|>"]]


def test_an_answer_is_tokenized_behind_its_prompt(tmp_path: Path) -> None:
    """Some tokenizers put a space before a text, which the template does not have before an answer."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    path = write_jsonl(tmp_path / "a.jsonl", [{"thing": "car", "ref": "xyz"}])
    (example,), _ = load_examples(path, PromptTemplate("{thing}", ("ref",), chat=True), tokenizer)
    assert tokenizer.decode(example.response) == "xyz</s>"


@pytest.mark.parametrize("chat", [False, True])
def test_a_blank_prompt_is_bad(tmp_path: Path, chat: bool) -> None:
    path = tmp_path / "a.csv"
    path.write_text('colour,thing,ref\nred,car,x\n"  ",,y\n,car,z\n')
    template = PromptTemplate("{colour} {thing}\n", ("ref",), chat=chat)
    with pytest.raises(DataError, match=r"line 3: empty prompt"):
        load_examples(path, template, byte_tokenizer())
    examples, rejects = load_examples(path, template, byte_tokenizer(), skip_bad=True)
    assert (len(examples), [reject.line for reject in rejects]) == (2, [3])


def test_a_long_prompt_loses_the_end_of_the_field_that_may_be_cut(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    template = PromptTemplate("{text}\nTL;DR: {hint}:", ("ref",), truncate="text", max_prompt_tokens=24)
    rows = [
        {"text": "abcdefghijklmnop", "hint": "h", "ref": "x"},
        {"text": "abc", "hint": "h", "ref": "x"},
        {"text": "abc", "hint": "h" * 40, "ref": "x"},
        {"text": "abcdefghijklmnop", "hint": "h", "ref": "x" * 14},  # makes room for its response
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    examples, rejects = load_examples(path, template, tokenizer, max_length=30, skip_bad=True)
    prompts = [tokenizer.decode(e.prompt) for e in examples]
    assert prompts == ["abcdefghijklmn\nTL;DR: h:", "abc\nTL;DR: h:", "abcde\nTL;DR: h:"]
    assert len(examples[2]) == 30
    assert [r.line for r in rejects] == [3]  # too long without the field, too


def test_the_first_response_field_that_a_record_has_is_used(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": "1", "ref": "one"}, {"a": "2", "summary": "two"}, {"a": "3"}])
    template = PromptTemplate("{a}", ("summary", "ref"))
    examples, rejects = load_examples(path, template, byte_tokenizer(), skip_bad=True)
    assert [byte_tokenizer().decode(e.response) for e in examples] == ["one</s>", "two</s>"]
    assert "missing field: 'summary'" in rejects[0].reason


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)


def example(number: int, prompt: int, response: int) -> Example:
    return Example(f"e{number}", tuple(range(10, 10 + prompt)), tuple(range(100, 100 + response)))


@given(LENGTHS)
def test_responses_start_at_one_column_and_labels_mark_exactly_them(lengths: list[tuple[int, int]]) -> None:
    examples = [example(i, *pair) for i, pair in enumerate(lengths)]
    batch = collate(examples)
    for row, one in enumerate(examples):
        start, end = batch.prompt_length - len(one.prompt), batch.prompt_length + len(one.response)
        assert batch.input_ids[row, start:end].tolist() == [*one.prompt, *one.response]
        assert batch.attention_mask[row].nonzero().flatten().tolist() == list(range(start, end))
        assert batch.position_ids[row, start:end].tolist() == list(range(len(one)))
        labels = batch.labels[row]
        assert labels[batch.prompt_length : end].tolist() == list(one.response)
        assert (labels[: batch.prompt_length] == IGNORE).all()
        assert (labels[end:] == IGNORE).all()
    assert batch.tokens == sum(map(len, examples))
    assert batch.response_tokens == sum(len(one.response) for one in examples)


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 7), st.integers(0, 80))
def test_every_epoch_has_every_record_once_and_any_batch_can_be_the_first(count: int, size: int, start: int) -> None:
    examples = [example(i, 1 + i * 7 % 11, 1 + i * 5 % 13) for i in range(count)]
    batches = GroupedBatches(examples, size, seed=3)
    assert Counter(i for batch in batches.epoch(1) for i in batch) == Counter(range(count))
    stream = iter(batches)
    for _ in range(start):
        next(stream)
    later = iter(GroupedBatches(examples, size, seed=3, start=start))
    assert [next(stream) for _ in range(3)] == [next(later) for _ in range(3)]


def test_batches_hold_records_of_like_length() -> None:
    examples = [example(i, 1 + i * 7 % 40, 1 + i * 5 % 60) for i in range(1600)]
    padded = 0
    for batch in GroupedBatches(examples, 16, seed=0).epoch(0):
        prompts, responses = zip(*((len(examples[i].prompt), len(examples[i].response)) for i in batch), strict=True)
        padded += len(batch) * (max(prompts) + max(responses))
    # Random batches would use less than 0.6 of their columns.
    assert sum(map(len, examples)) / padded > 0.85
