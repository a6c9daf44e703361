"""Tools: calls in texts that come in parts, demanded calls whole and as streams, tool turns, and refusals."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic_core import to_json

from checkpoints import HERMES, byte_tokenizer
from serve_tools import events, greedy, is_idle, post, running, tiny_served_model, until
from skipdecode.data.chats import ToolChoice
from skipdecode.generation.calls import CallForm, CallReader
from skipdecode.serving.service import open_service

CHAT = "/v1/chat/completions"
TEMPLATES = {
    # The parts of the templates that matter here.
    "qwen": HERMES,
    "llama": (
        "{% if tools %}<system>Environment: ipython{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{% else %}{{ m.content }}{% endfor %}{% endfor %}<assistant>"
    ),
    "qwen's tokens": HERMES,
    "none": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
    "other": "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
}
DAY = {"$ref": "#/$defs/day"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "day": DAY},
    "required": ["city", "day"],
    "additionalProperties": False,
    "$defs": {"day": {"enum": ["today", "tomorrow"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "strict": True}},
]
BAD = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
BIAS = {str(token): 7.0 for token in byte_tokenizer()('"}]', add_special_tokens=False).input_ids}
ASK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def clients():
    services, servers = {}, []
    for name, template in TEMPLATES.items():
        tokenizer = byte_tokenizer(template)
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"] if "tokens" in name else [])
        model = tiny_served_model()
        model.resize_token_embeddings(len(tokenizer))
        services[name] = open_service(model, tokenizer, name="tiny")
        servers.append(running(services[name]))
    yield {name: server.__enter__() for name, server in zip(TEMPLATES, servers, strict=True)}
    for service, server in zip(services.values(), servers, strict=True):
        until(lambda service=service: is_idle(service))
        server.__exit__(None, None, None)


def demand(**fields):
    return {"messages": ASK, "tools": TOOLS, "seed": 5, "max_tokens": 400, "logit_bias": BIAS} | fields


@pytest.mark.parametrize("name", ["qwen", "qwen's tokens", "llama"])
@pytest.mark.parametrize("choice", ["required", "weather", "stop"])
def test_a_demanded_call_is_a_call_whole_and_streamed(clients, name, choice):
    named = {"type": "function", "function": {"name": choice}}
    body = demand(tool_choice=choice if choice == "required" else named, parallel_tool_calls=False)
    (answer,) = post(clients[name], CHAT, body)["choices"]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] in ({"weather", "stop"} if choice == "required" else {choice})
    schema = WEATHER if call["function"]["name"] == "weather" else {"maxProperties": 0}
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    chunks = [c for chunk in events(clients[name], CHAT, body) for c in chunk["choices"]]
    (streamed,) = [c["delta"]["tool_calls"][0] for c in chunks if "tool_calls" in c["delta"]]
    assert (streamed["index"], streamed["type"], streamed["function"]) == (0, "function", call["function"])
    assert not any(c["delta"].get("content") for c in chunks)
    assert chunks[-1]["finish_reason"] == "tool_calls"
    # The answer and the tool's result go into the next request as they came.
    turn = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "sunny"}
    further = post(clients[name], CHAT, greedy(messages=[*ASK, answer["message"], turn], tools=TOOLS, max_tokens=4))
    plain = greedy(messages=[*ASK, {"role": "assistant", "content": ""}, turn], max_tokens=4, tools=TOOLS)
    assert further["usage"]["prompt_tokens"] > post(clients[name], CHAT, plain)["usage"]["prompt_tokens"] + 20


def test_of_allowed_tools_only_those_are_called(clients):
    def allowed(mode, *names):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    (answer,) = post(clients["qwen"], CHAT, demand(tool_choice=allowed("required", "stop"), parallel_tool_calls=False))[
        "choices"
    ]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["stop"]
    sizes = {
        post(clients["qwen"], CHAT, greedy(messages=ASK, tools=TOOLS, max_tokens=2, tool_choice=c))["usage"][
            "prompt_tokens"
        ]
        for c in ("auto", allowed("auto", "weather"))
    }
    assert len(sizes) == 1  # the template sees all
    for wrong in (allowed("none", "stop"), allowed("auto"), allowed("auto", "stop", "x")):
        assert post(clients["qwen"], CHAT, demand(tool_choice=wrong), 400)["error"]["param"] == "tool_choice"


def test_tools_are_in_the_prompt_unless_none_may_be_called(clients):
    body = greedy(messages=ASK, max_tokens=6)
    size = [
        post(clients["qwen"], CHAT, body | fields)["usage"]["prompt_tokens"]
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS}, {"tools": TOOLS[:1]})
    ]
    assert size[0] == size[1] < size[3] < size[2]
    free = post(clients["qwen"], CHAT, body | {"tools": TOOLS})["choices"][0]
    assert (free["finish_reason"], free["message"]["content"] != "") == ("length", True)
    assert "tool_calls" not in free["message"]


@pytest.mark.parametrize(
    ("name", "fields", "param", "code"),
    [
        ("none", {}, "tools", "unsupported_field"),
        ("other", {}, "tools", "unsupported_field"),
        ("qwen", {"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ("qwen", {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "invalid_value"),
        ("qwen", {"tool_choice": "any"}, "tool_choice", "invalid_value"),
        ("qwen", {"structured_outputs": {"json": WEATHER}}, "tools", "invalid_value"),
        ("qwen", {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "invalid_value"),
        ("qwen", {"tools": [*TOOLS, BAD], "tool_choice": "required"}, "tools.2.function.parameters", "invalid_value"),
    ],
)
def test_refusals_name_the_field(clients, name, fields, param, code):
    error = post(clients[name], CHAT, demand(**fields), 400)["error"]
    assert (error["param"], error["code"]) == (param, code)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</x> ü"}}\n</tool_call>'
F = ("f", {"a": "</x> ü"})
READ = [
    ("qwen", " hello \n", " hello \n", []),
    ("qwen", "x < y <tool", "x < y <tool", []),
    ("qwen", CALL, "", [F]),
    ("qwen", f"I will.\n{CALL}\n{CALL}\n", "I will.", [F, F]),
    ("qwen", f"{CALL}\nbye", "\nbye", [F]),
    ("qwen", CALL.replace('"f"', '"h"'), CALL.replace('"f"', '"h"'), []),  # no such tool
    ("qwen", "a <tool_call> b", "a <tool_call> b", []),
    ("qwen", CALL[:-20], CALL[:-20], []),
    ("qwen", '\n{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),  # as Qwen2.5-Coder
    ("qwen", '{"name": "f"} or not', '{"name": "f"} or not', []),
    ("qwen", f'{{"a": 1}}\n{CALL}', '{"a": 1}', [F]),
    ("qwen", f'<tool_call>{{{CALL} <tool_call>"{CALL}', '<tool_call>{ <tool_call>"', [F, F]),
    ("qwen", CALL.replace("</x>", "</tool_call>"), "", [("f", {"a": "</tool_call> ü"})]),
    ("qwen", CALL.replace("ü", r"\ud83d \ud83d\ude00 \u0000"), "", [("f", {"a": "</x> \ufffd \U0001f600 \0"})]),
    ("qwen", CALL[:-5], "", [F]),  # cut off in the mark of the end
    ("qwen", CALL.replace('"f"', "[]"), CALL.replace('"f"', "[]"), []),
    ("qwen", CALL.replace('{"a": "</x> ü"}', json.dumps(json.dumps(F[1]))), "", [F]),
    ("qwen", CALL.replace('{"a": "</x> ü"}', "null"), "", [("f", {})]),
    ("qwen", CALL.replace('{"a": "</x> ü"}', '""'), "", [("f", {})]),
    ("qwen", CALL.replace('{"a": "</x> ü"}', '"a"'), CALL.replace('{"a": "</x> ü"}', '"a"'), []),
    ("qwen", CALL.replace('"</x> ü"', "1e999"), CALL.replace('"</x> ü"', "1e999"), []),
    ("qwen", CALL.replace('"</x> ü"', "[" * 9999), CALL.replace('"</x> ü"', "[" * 9999), []),
    ("llama", "hello", "hello", []),
    ("llama", ' {"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", {}), ("g", {})]),
    ("llama", 'See: <|python_tag|>{"name": "f", "parameters": {}}', "See:", [("f", {})]),
    ("llama", "<|python_tag|>print(5)", "<|python_tag|>print(5)", []),
    ("llama", ' {"answer": 5}', ' {"answer": 5}', []),
    ("llama", 'see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
]


def read(name, parts):
    """The text and the calls in parts of an answer; checks what holds for every answer."""
    form = CallForm.of(byte_tokenizer(TEMPLATES[name]), ())
    reader = CallReader(form, ToolChoice.of([{"function": {"name": each}} for each in "fg"]))
    found = [reader.push(part, last=i == len(parts) - 1) for i, part in enumerate(parts)]
    calls = [call for _, calls in found for call in calls]
    assert json.loads(to_json(calls)) == calls
    assert [c["index"] for c in calls] == list(range(len(calls)))
    assert len({c["id"] for c in calls}) == len(calls)
    functions = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    return "".join(part for part, _ in found), functions


@pytest.mark.parametrize(("name", "text", "said", "called"), READ, ids=range(len(READ)))
@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_calls_are_found_in_a_text_that_comes_in_parts(name, text, said, called, size):
    assert read(name, [text[i : i + size] for i in range(0, len(text), size)]) == (said, called)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "</tool_call>", '<tool_call>{"', "{}"]) | st.text(), JSON, max_size=3)
PIECES = st.sampled_from(["<tool_call>", "</tool_call>", "<|python_tag|>", "NaN", "1e999", '"name"', *'{}"\\\n :;'])


@given(st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), min_size=1, max_size=3), st.booleans(), st.data())
def test_written_calls_are_read_whole_and_in_parts(calls, ascii_only, data):
    name = data.draw(st.sampled_from(["qwen", "llama"]))
    begin, key, end, between = {
        "qwen": ("<tool_call>\n", "arguments", "\n</tool_call>", "\n"),
        "llama": ("", "parameters", "", "; "),
    }[name]
    written = [json.dumps({"name": f, key: given}, ensure_ascii=ascii_only) for f, given in calls]
    text = between.join(begin + call + end for call in written)
    assert read(name, divided(text, data)) == ("", calls)


@given(
    st.sampled_from(["qwen", "llama"]), st.lists(PIECES | st.just(CALL) | st.text(max_size=5), max_size=12), st.data()
)
@example("qwen", ["<tool_call>", '{"name": "f", "arguments": {"a": "', "</tool_call>", CALL], None)
def test_any_text_gives_the_same_whole_and_in_parts(name, pieces, data):
    text = "".join(pieces)
    assert read(name, divided(text, data)) == read(name, [text])


def divided(text, data):
    """The text in parts of a drawn size; without `data`, in characters."""
    size = 1 if data is None else data.draw(st.integers(1, 20))
    return [text[i : i + size] for i in range(0, len(text), size)] or [""]
