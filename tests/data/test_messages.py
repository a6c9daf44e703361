"""One conversation gives one prompt, however it is written and whoever reads it; white space of answers is learned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import CHATML, byte_tokenizer, chatml_tokenizer
from skipdecode.cli import main
from skipdecode.data.examples import RecordOptions, encode_examples, known_shape, make_template
from skipdecode.data.prompts import PromptEncoder
from skipdecode.data.records import read_records
from skipdecode.data.source import load_records, read_file
from skipdecode.data.tasks import load_task
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError
from skipdecode.evaluation.run import encode_prompts
from skipdecode.generation.batch_lines import prompt_reader
from skipdecode.serving.errors import ApiError
from skipdecode.serving.preprocessing import chat_text
from skipdecode.serving.protocol import ChatRequest
from textgen_tools import save_tiny_model, write_rows

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}{{ m.name }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCHEMA = {"properties": {"a": {"default": None, "enum": [None]}, "b": None}, "enum": None}  # a table's, the last two
TOOLS = [{"function": {"strict": None, "parameters": SCHEMA, "name": "f"}, "type": "function"}]
TOOLS_WRITTEN = (
    '[{"function": {"parameters": {"properties": {"a": {"default": null, "enum": [null]}}}, "name": "f"}, '
    '"type": "function"}]'
)
CALL = {"name": "f", "arguments": '{"a": 1}'}
NULLS = dict.fromkeys(("name", "tool_calls", "tool_call_id", "refusal", "reasoning_content"))
CALLED = '<assistant>[f {"a": 1}]'
ASSISTANT = {"role": "assistant", "content": None}
# Messages as they are written, and what the template makes of them.
WRITTEN: dict[str, tuple[list[dict[str, Any]], str]] = {
    "text": ([{"role": "user", "content": " hi\n"}], "<user> hi\n"),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
        "<user>ab",
    ),
    "parts of text alone": ([{"role": "user", "content": ["a", "b"]}], "<user>ab"),
    "parts without a type": ([{"role": "user", "content": [{"text": "a"}]}], "<user>a"),
    "output": ([{"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}], "<assistant>a"),
    "refusal": ([ASSISTANT | {"refusal": "no"}], "<assistant>no"),
    "part of a refusal": ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], "<assistant>no"),
    "developer": ([{"role": "developer", "content": "be brief"}], "<system>be brief"),
    "empty system": ([{"role": "system", "content": ""}], "<system>"),
    "null system": ([{"role": "system", "content": None}], ""),
    "nulls of a table": ([NULLS | {"role": "user", "content": "a"}], "<user>a"),
    "calls": ([{"role": "assistant", "tool_calls": [{"function": CALL}]}], CALLED),
    "calls of objects": ([ASSISTANT | {"tool_calls": [CALL | {"arguments": {"a": 1, "b": None}}]}], CALLED),
    "calls with a null": (
        [ASSISTANT | {"tool_calls": [CALL | {"arguments": '{"a": null}'}]}],
        '<assistant>[f {"a": null}]',
    ),
    "calls alone": ([ASSISTANT | {"content": "", "tool_calls": [CALL]}], CALLED),
    "older call": ([ASSISTANT | {"function_call": CALL}], CALLED),
    "older answer": ([{"role": "function", "name": "f", "content": "5"}], "<toolf>5"),
    "name": ([{"role": "user", "name": "Ann", "content": "a"}], "<userAnn>a"),
    **{
        name: ([{"role": "assistant", "content": "a", name: "why"}], "<assistant>(why)a")
        for name in ("reasoning_content", "reasoning", "thinking")
    },
}
SHAREGPT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "human": ([{"from": "human", "value": "a"}], "<user>a"),
    "capitals": ([{"from": "Human", "value": "a"}, {"role": "Assistant ", "content": "b"}], "<user>a<assistant>b"),
    "gpt": ([{"from": "gpt", "value": "a", "weight": None}], "<assistant>a"),
    "system of ShareGPT": ([{"from": "system", "value": "a"}], "<system>a"),
    "call of ShareGPT": ([{"from": "function_call", "value": json.dumps(CALL)}], CALLED),
    "observation": ([{"from": "observation", "value": "5"}], "<tool>5"),
}


def read(row: dict[str, Any], tokenizer: Any) -> set[str]:
    """The last prompt of a record, as text, by each reader of files."""
    (generated,) = PromptEncoder(tokenizer, None, PromptTemplate(chat=True)).encode([PromptTemplate().record_of(row)])
    template = make_template(RecordOptions(chat=True), [row])
    examples, _ = encode_examples(read_file([row], template), template, tokenizer)
    task = replace(load_task("jsonl"), chat=True)
    records = load_records(task, [row], shape=known_shape([row], "", "", task.template))
    _, scored = encode_prompts(task.template, records, tokenizer)
    return {generated.error or generated.text, tokenizer.decode(examples[-1].prompt), tokenizer.decode(scored[-1])}


@given(st.lists(st.sampled_from([*WRITTEN, *SHAREGPT]), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_conversation_gives_one_prompt_by_every_reader(names: list[str], with_tools: bool, as_text: bool) -> None:
    written = [(WRITTEN | SHAREGPT)[name] for name in names]
    chat = [message for messages, _ in written for message in messages] + [{"role": "user", "content": "end"}]
    wanted = (TOOLS_WRITTEN if with_tools else "") + "".join(text for _, text in written) + "<user>end<assistant>"
    whole = [*chat, {"role": "assistant", "content": "x", "unknown": 1}]
    row: dict[str, Any] = {"messages": json.dumps(whole) if as_text else whole, "prompt": "other"}
    if with_tools:
        row["tools"] = json.dumps(TOOLS)
    assert read(row, byte_tokenizer(TEMPLATE)) == {wanted}
    if not SHAREGPT.keys() & {*names}:
        closed = [*chat, {"role": "assistant", "content": "x"}]  # which a request has, and a record learns
        for sent, text in ((chat, wanted), (closed, f"{wanted}x<assistant>")):
            body: dict[str, Any] = {"messages": sent, "tools": TOOLS if with_tools else []}
            assert chat_text(byte_tokenizer(TEMPLATE), ChatRequest(**body).prompts()[0]) == text
            (line,) = read_records([(1, {"body": body})], prompt_reader(PromptTemplate()))
            assert PromptEncoder(byte_tokenizer(TEMPLATE), None).encode([line])[0].text == text


def test_the_system_message_of_a_record_is_text_or_parts(capsys: Any) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]}
    of_parts = TEMPLATE.replace("{{ m.content }}", "{% for p in m.content if p.type %}{{ p.text }}{% endfor %}")
    for system, template in (("be", of_parts), ("be", TEMPLATE), ([{"type": "text", "text": "be"}], TEMPLATE)):
        assert read(row | {"system": system}, byte_tokenizer(template)) == {"<system>be<user>a<assistant>"}
    with pytest.raises(DataError, match="field 'system' has a number"):
        read(row | {"system": 5}, byte_tokenizer(TEMPLATE))
    make_template(RecordOptions(), [{"prompt": "a", "response": "b", "system": 5}])
    assert "left out: system" in capsys.readouterr().err


def test_half_of_a_pair_in_a_call_is_refused_by_every_reader() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "\ud800"}}}
    user = {"role": "user", "content": "a"}
    chat = [user, {"role": "assistant", "tool_calls": [call]}, user]
    (prompt,) = PromptEncoder(byte_tokenizer(TEMPLATE), None).encode([PromptTemplate().record_of(chat)])
    assert "surrogate" in str(prompt.error)
    with pytest.raises(ApiError, match="surrogate"):
        chat_text(byte_tokenizer(TEMPLATE), ChatRequest(messages=chat).prompts()[0])  # type: ignore


def test_messages_that_a_template_leaves_out_are_said(capsys: Any) -> None:
    """With a template that knows neither, and one that knows the role `developer`."""
    chat = [{"role": role, "content": role} for role in ("developer", "user", "assistant", "tool", "user")]
    known = "{% for m in messages %}{% if m.role in ('user', 'developer') %}{{ m.content }}{% endif %}{% endfor %}"
    (prompt,) = PromptEncoder(byte_tokenizer(known), None).encode([PromptTemplate().record_of(chat)])
    assert prompt.text == "developeruseruser"
    assert "not in the prompts: messages of the role 'tool'" in capsys.readouterr().err
    with pytest.raises(ApiError, match="does not use messages of the role tool") as refused:
        chat_text(byte_tokenizer(known), ChatRequest(messages=chat).prompts()[0])  # type: ignore
    assert refused.value.param == "messages"


@pytest.mark.parametrize("answer", ["    return 1", "a\n", "\n a \n\n"])
@pytest.mark.parametrize("template", [CHATML, None])
def test_white_space_of_an_answer_is_learned(answer: str, template: str | None) -> None:
    tokenizer = chatml_tokenizer(template)
    end = "</s>" if template is None else "<|im_end|>"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    rows: list[Any] = [{"prompt": "a\n", "completion": answer}, {"question": "a", "answers": {"text": [answer] * 2}}]
    rows += [{"messages": chat}] if template else []
    for row in rows:
        made = make_template(RecordOptions(), [row]).for_tokenizer(tokenizer)
        (example,), _ = encode_examples(read_file([row], made), made, tokenizer)
        assert tokenizer.decode(example.response) == answer + end
    rows = [{"text": "  def f():\n  return 1\n"}]
    (record,) = read_file(rows, make_template(RecordOptions(), rows)).items
    assert (record.prompt, record.references) == ("  def f():\n", ("  return 1\n",))


def test_a_call_keeps_the_indentation_of_the_text_before_it() -> None:
    row = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "  b", "tool_calls": [CALL]}]
    }
    template, tokenizer = make_template(RecordOptions(chat=True), [row]), byte_tokenizer(TEMPLATE)
    (example,), _ = encode_examples(read_file([row], template), template, tokenizer)
    assert tokenizer.decode(example.response) == '  b[f {"a": 1}]</s>'


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "a part of the type 'image_url'"),
        ({"role": "user", "content": {"a": 1}}, "message 1 of field 'messages'"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "not to the role 'user'"),
        ({"role": "assistant", "tool_calls": [{"function": CALL | {"arguments": "[1]"}}]}, "are no JSON object"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "has no name"),
        ({"from": "narrator", "value": "a"}, "'from' is 'narrator'"),
        ({"from": "function_call", "value": "f()"}, "is a call and no JSON"),
        ({"role": "", "content": "a"}, "message 1 of field 'messages'"),
        ({"role": "assistant", "content": "a", "reasoning": {"effort": "low"}}, "'reasoning' of message 1 of field"),
    ],
)
def test_a_message_that_cannot_be_used_is_named_by_its_own_field(message: Any, reason: str) -> None:
    row = {"messages": [message, {"role": "assistant", "content": "x"}]}
    error = str(PromptTemplate().record_of(row).error)
    with pytest.raises(DataError) as refused:
        read_file([row], make_template(RecordOptions(), [row]))
    for told in (error, str(refused.value)):
        assert reason in told
        assert "'prompt'" not in told


def test_records_that_cannot_be_used_are_told_once_with_what_to_do(tmp_path: Path, capsys: Any) -> None:
    model = save_tiny_model(tmp_path / "model", context=400)
    prompts = write_rows(tmp_path / "p.jsonl", [{"instruction": "a"}, {"instruction": "b"}])
    chats = write_rows(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    broken = write_rows(tmp_path / "b.jsonl", [{"prompt": "a", "response": "b"}, *[{"prompt": "a"}] * 9])
    evaluate = ["eval", model, "--out", str(tmp_path / "run"), "--data"]
    tune = ["tune", model, "--schedule", "2x", "--out", str(tmp_path / "tuned"), "--train"]
    for command, told in (
        ([*tune, prompts], "('instruction') and no responses"),
        ([*tune, chats], "--self"),
        ([*evaluate, prompts], "--prompts in place of --data"),
        ([*evaluate, broken], "lines 2, 3, 4, 5, 6 and 4 more: missing field: "),
        ([*evaluate, str(tmp_path / "nowhere.jsonl")], "there is no file"),
    ):
        assert main(command) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert told in error
        assert error.count("missing field: ") < 2
        assert ("--task" in error) == ("nowhere" not in error and "missing" not in error)


def test_a_field_goes_into_the_chat_template_as_a_shape_does(tmp_path: Path) -> None:
    row = {"question": "a", "answer": "b"}
    for options in ({}, {"prompt_field": "question", "response_field": "answer"}):
        template = make_template(RecordOptions(**options), [row])  # type: ignore[arg-type]
        assert template.chat is None  # as the model has a template
    options = {"prompt_template": "{question}", "response_field": "answer"}
    assert make_template(RecordOptions(**options), [row]).chat is False  # type: ignore[arg-type]
