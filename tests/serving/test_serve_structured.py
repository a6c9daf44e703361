"""Answers that have to fit a grammar: fields of OpenAI and vLLM, whole and as streams; refusals name the place."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from checkpoints import byte_tokenizer
from serve_tools import SCHEDULES, events, post, streamed_text

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
WORD = {"type": "string", "maxLength": 6}
SCHEMA = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Closers, so that random weights come to an end.
BIAS = {str(token): 7.0 for token in byte_tokenizer()('"}]', add_special_tokens=False).input_ids}
# Ambiguous: after some hundred tokens it is too much for the parser.
AMBIGUOUS = "start: a\na: " + " | ".join('"x"' + " a" * n for n in (2, 0, 3, 4, 5, 6, 7, 8, 9))


def formatted(schema):
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


def chat(**fields):
    return {"messages": MESSAGES, "seed": 3, "max_tokens": 200, "logit_bias": BIAS} | fields


def text_of(answer):
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_a_schema_holds_whole_streamed_and_beside_others(client):
    def answer(case):
        schedule, extra = case
        body = chat(response_format=formatted(SCHEMA), skipdecode={"schedule": schedule}) | extra
        text = text_of(post(client, CHAT, body))
        jsonschema.validate(json.loads(text), SCHEMA)
        assert streamed_text(events(client, CHAT, body)) == text
        return text

    extras = ({}, {"temperature": 0}, {"logprobs": True, "top_logprobs": 2}, {"top_k": 5, "top_p": 0.9})
    cases = [(schedule, extra) for schedule in SCHEDULES for extra in extras]
    alone = [answer(case) for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        assert list(pool.map(answer, cases)) == alone
    plain = chat(response_format=formatted(SCHEMA), skipdecode={"schedule": "nested", "exact": False})
    assert text_of(post(client, CHAT, plain)) == answer(("nested", {}))


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", 'no "thanks"', "ü\n"]}}, 'yes|no "thanks"|ü\n'),
        ({"structured_outputs": {"grammar": 'root ::= "a" [bc] "d"'}}, "a[bc]d"),
        ({"structured_outputs": {"grammar": 'start: "a" /[bc]/'}}, "a[bc]"),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" [bc] "d"'}, "a[bc]d"),
        ({"response_format": {"type": "text"}, "structured_outputs": None}, None),
    ],
    ids=json.dumps,
)
def test_every_field_says_what_a_text_has_to_fit(client, fields, fits):
    body = {"prompt": "hello", "seed": 1, "max_tokens": 300, "logit_bias": BIAS} | fields
    answer = post(client, COMPLETIONS, body)
    if isinstance(fits, str):
        assert re.fullmatch(fits, text_of(answer))
    elif fits is not None:
        jsonschema.validate(json.loads(text_of(answer)), fits)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": formatted({"items": {"not": {}}})}, "response_format.json_schema.schema.items"),
        ({"structured_outputs": {"json": {"items": {"not": {}}}}}, "structured_outputs.json.items"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "a b"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
    ids=json.dumps,
)
def test_refusals_name_the_place(client, fields, param):
    error = post(client, CHAT, chat(**fields), 400)["error"]
    assert error["param"] == param
    assert error["code"] == "invalid_value"


def test_a_grammar_that_can_go_no_further_fails_its_request_alone(client):
    x = str(byte_tokenizer()("x", add_special_tokens=False).input_ids[0])
    hard = chat(structured_outputs={"grammar": AMBIGUOUS}, logit_bias={x: 100, "2": -100}, max_tokens=900)
    with ThreadPoolExecutor(2) as pool:
        failed, fine = (
            pool.submit(post, client, CHAT, hard, 400),
            pool.submit(post, client, CHAT, chat(ignore_eos=True)),
        )
    assert failed.result()["error"]["code"] == "invalid_value"
    assert fine.result()["usage"]["completion_tokens"] == 200
