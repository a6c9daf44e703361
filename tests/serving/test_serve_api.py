"""What clients of the server see: answers equal to offline decoding, OpenAI's shapes, refusals that name the field."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from checkpoints import THINKING, byte_tokenizer
from serve_tools import (
    CONTEXT,
    NESTED,
    SCHEDULES,
    events,
    greedy,
    is_idle,
    metric,
    offline,
    post,
    running,
    streamed_text,
    tiny_served_model,
    tiny_service,
    until,
)
from skipdecode import attach
from skipdecode.engine import Sampling
from skipdecode.engine.requests import row_seed
from skipdecode.errors import OptionError, UsageError
from skipdecode.serving.protocol import ChatRequest, CompletionRequest
from skipdecode.serving.service import open_service
from tiny import LAYERS

NEW = 24
PROMPTS = ["hello", "a longer prompt, to be cut into pages of keys", "z", "to be or not"]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
RENDERED = "<user>hello<assistant>"


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_completions_are_the_offline_ones_streamed_or_not(client, schedule):
    tokens, text, layers = offline(PROMPTS[0], NEW, SCHEDULES[schedule])
    body = greedy(prompt=PROMPTS[0], max_tokens=NEW, skipdecode={"schedule": schedule, "trace": True})
    whole = post(client, COMPLETIONS, body)
    choice = whole["choices"][0]
    assert choice["text"] == text
    trace = choice["skipdecode"]["tokens"]
    assert [t["id"] for t in trace] == tokens
    assert [t["layers"] for t in trace] == layers
    assert [t["position"] for t in trace] == list(range(len(tokens)))
    assert "".join(t["text"] for t in trace) == text
    chunks = events(client, COMPLETIONS, body)
    assert streamed_text(chunks) == text
    assert [t for c in chunks for t in c["choices"][0]["skipdecode"]["tokens"]] == trace
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "length" if len(tokens) == NEW else "stop"
    ]
    same = ("schedule", "prompt_tokens", "completion_tokens", "layers_run", "layers_full", "kv_bytes", "layer_sets")
    assert {k: whole["skipdecode"][k] for k in same} == {k: chunks[-1]["skipdecode"][k] for k in same}
    assert not any("skipdecode" in c for c in chunks[:-1])


def test_the_summary_adds_up(client):
    body = greedy(prompt=PROMPTS[1], max_tokens=NEW, n=2, skipdecode={"schedule": "nested", "trace": True})
    answer = post(client, COMPLETIONS, body)
    found, traces = answer["skipdecode"], [c["skipdecode"]["tokens"] for c in answer["choices"]]
    assert traces[0] == traces[1]
    assert len(traces[0]) == NEW
    assert found["schedule"] == "nested"
    assert found["prompt_tokens"] == answer["usage"]["prompt_tokens"] == len(PROMPTS[1])
    assert found["completion_tokens"] == answer["usage"]["completion_tokens"] == 2 * NEW
    assert answer["usage"]["total_tokens"] == len(PROMPTS[1]) + 2 * NEW
    assert found["layers_run"] == sum(t["layers"] for trace in traces for t in trace)
    assert found["layers_full"] == 2 * NEW * LAYERS
    assert found["kv_bytes"] < found["kv_bytes"] + found["kv_bytes_saved"]
    assert found["kv_bytes"] * LAYERS == (found["kv_bytes"] + found["kv_bytes_saved"]) * traces[0][-1]["layers"]
    assert set(found["layer_sets"]) == {str(t["layers"]) for t in traces[0]}
    for budget, layers in found["layer_sets"].items():
        assert layers == sorted(set(range(LAYERS)) - set(NESTED.drop_order[: LAYERS - int(budget)]))
    assert found["first_token_s"] > 0


def test_chat_is_the_template_s_completion(client):
    body = greedy(messages=MESSAGES, max_tokens=NEW)
    answer = post(client, CHAT, body)
    _, text, _ = offline(RENDERED, NEW)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    parts = greedy(
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}], max_completion_tokens=NEW
    )
    assert post(client, CHAT, parts)["choices"] == answer["choices"]
    chunks = events(client, CHAT, body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_text(chunks) == text
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1


def test_prompts_as_lists_and_token_ids(client):
    texts = [post(client, COMPLETIONS, greedy(prompt=p, max_tokens=4))["choices"][0]["text"] for p in PROMPTS]
    ids = [post(client, "/tokenize", {"prompt": p})["tokens"] for p in PROMPTS]
    for prompt in (PROMPTS, ids):
        choices = post(client, COMPLETIONS, greedy(prompt=prompt, max_tokens=4))["choices"]
        assert [c["text"] for c in choices] == texts
        assert [c["index"] for c in choices] == list(range(len(PROMPTS)))
    assert post(client, COMPLETIONS, greedy(prompt=ids[1], max_tokens=4))["choices"][0]["text"] == texts[1]


def test_n_and_seed(client):
    body = {"prompt": PROMPTS[0], "max_tokens": NEW, "n": 3, "seed": 11, "temperature": 1.0, "top_p": 0.9}
    first, again = (post(client, COMPLETIONS, body)["choices"] for _ in range(2))
    assert first == again
    texts = [c["text"] for c in first]
    assert len(set(texts)) == 3
    for index, text in enumerate(texts):
        sampling = Sampling(temperature=1.0, top_p=0.9, seed=row_seed(11, index))
        assert offline(PROMPTS[0], NEW, sampling=sampling)[1] == text
    chunks = events(client, COMPLETIONS, body)
    assert [streamed_text(chunks, i) for i in range(3)] == texts
    unseeded = {post(client, COMPLETIONS, body | {"seed": None, "n": 1})["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 3, "top_k": 4},
        {"temperature": 1.0, "seed": 3, "min_p": 0.2},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"temperature": 0, "frequency_penalty": 1.5},
        {"temperature": 0, "presence_penalty": 1.5},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_fields_of_sampling_reach_the_engine(client, fields):
    body = {"prompt": PROMPTS[0], "max_tokens": NEW, **fields}
    text = post(client, COMPLETIONS, body)["choices"][0]["text"]
    if "seed" in fields:
        fields = fields | {"seed": row_seed(fields["seed"], 0)}
    assert text == offline(PROMPTS[0], NEW, sampling=Sampling(**fields))[1]
    plain = {name: fields[name] for name in ("temperature", "seed") if name in fields}
    assert text != offline(PROMPTS[0], NEW, sampling=Sampling(**plain))[1]


def test_stop_strings_end_the_text(client):
    body = greedy(prompt=PROMPTS[0], max_tokens=60, skipdecode={"trace": True})
    text = post(client, COMPLETIONS, body)["choices"][0]["text"]
    stop = re.search(r"(?<=.{8})[^\ufffd]{2}", text, re.DOTALL).group()
    for stops in (stop, ["never to be found", stop]):
        choice = post(client, COMPLETIONS, body | {"stop": stops})["choices"][0]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert "".join(t["text"] for t in choice["skipdecode"]["tokens"]) == choice["text"]
        assert streamed_text(events(client, COMPLETIONS, body | {"stop": stops})) == choice["text"]


def test_logprobs(client):
    assert post(client, COMPLETIONS, greedy(prompt=PROMPTS[0], max_tokens=5))["choices"][0]["logprobs"] is None
    chat = greedy(messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3)
    content = post(client, CHAT, chat)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * 5
    assert [e["top_logprobs"][0]["token"] for e in content] == [e["token"] for e in content]
    chunks = events(client, CHAT, chat)
    assert [e for c in chunks[1:] for e in c["choices"][0]["logprobs"]["content"]] == content


def test_log_probabilities_of_completions_have_as_many_tokens_as_asked_for(client):
    """The model knows tokens without text, and tokens with parts of characters: each has a name and its own value."""
    body = greedy(prompt=PROMPTS[0], max_tokens=8)
    logprobs = post(client, COMPLETIONS, body | {"logprobs": 5})["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {8}
    assert [len(top) for top in logprobs["top_logprobs"]] == [5] * 8
    assert all(
        top[t] == value == max(top.values())
        for t, value, top in zip(*(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )
    rare = post(client, COMPLETIONS, body | {"logprobs": 2, "temperature": 2, "seed": 5})["choices"][0]["logprobs"]
    assert {len(top) for top in rare["top_logprobs"]} <= {2, 3}
    assert all(token in top for token, top in zip(rare["tokens"], rare["top_logprobs"], strict=True))
    chosen = post(client, COMPLETIONS, body | {"logprobs": 0})["choices"][0]["logprobs"]
    assert [list(top) for top in chosen["top_logprobs"]] == [[token] for token in chosen["tokens"]]


def test_log_probabilities_of_a_chat_are_those_of_its_text(client):
    forced = {"logit_bias": {"175": 100}}  # the first of four bytes
    chat = greedy(messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=3, **forced)
    message = post(client, CHAT, chat)["choices"][0]
    assert message["message"]["content"] == "\ufffd\ufffd"
    for entry in message["logprobs"]["content"]:
        assert (entry["token"], entry["bytes"]) == ("bytes:\\xf0", [0xF0])
        assert len(entry["top_logprobs"]) == 3
    ended = greedy(messages=MESSAGES, max_tokens=8, logprobs=True, logit_bias={"2": 100})
    choice = post(client, CHAT, ended)["choices"][0]
    assert (choice["message"]["content"], choice["logprobs"]["content"]) == ("", [])
    letters = {str(i): 100 for i in range(67, 93)}
    stopped = greedy(messages=MESSAGES, max_tokens=8, logprobs=True, logit_bias=letters)
    whole = post(client, CHAT, stopped)["choices"][0]["message"]["content"]
    choice = post(client, CHAT, stopped | {"stop": whole[2:4]})["choices"][0]
    joined = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"])
    assert joined.decode() == choice["message"]["content"] == whole[: whole.find(whole[2:4])]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_echo_has_the_prompt_with_its_log_probabilities(client, schedule):
    prompts = [[5, 70, 71, 72], [5, 6, 9], list(range(3, 60))]
    body = greedy(prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1234, skipdecode={"schedule": schedule})
    plain = post(client, COMPLETIONS, body | {"echo": False})["choices"]
    with attach(tiny_served_model(), SCHEDULES[schedule]) as attachment, torch.no_grad():
        for prompt, choice, only in zip(prompts, post(client, COMPLETIONS, body)["choices"], plain, strict=True):
            found, known = (
                choice["logprobs"],
                attachment.model(torch.tensor([prompt]), use_cache=True).logits[0].log_softmax(-1),
            )
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            want = [float(known[i, token]) for i, token in enumerate(prompt[1:])]
            assert found["token_logprobs"][1:-1] == pytest.approx(want, abs=1e-4)
            best = [max(top.values()) for top in found["top_logprobs"][1:-1]]
            assert best == pytest.approx(known[:-1].max(-1).values.tolist(), abs=1e-4)
            assert len(found["tokens"]) == len(prompt) + 1
            assert found["token_logprobs"][-1] == pytest.approx(only["logprobs"]["token_logprobs"][0], abs=1e-4)
            text = byte_tokenizer().decode(prompt, skip_special_tokens=True)
            assert choice["text"].startswith(text.rstrip("\ufffd"))
            assert found["text_offset"][-1] <= len(choice["text"])


def test_an_echo_goes_before_the_text_streamed_or_not(client):
    body = greedy(prompt="hello, ", max_tokens=6)
    text = post(client, COMPLETIONS, body)["choices"][0]["text"]
    (whole,) = post(client, COMPLETIONS, body | {"echo": True})["choices"]
    assert (whole["text"], whole["logprobs"]) == ("hello, " + text, None)
    assert streamed_text(events(client, COMPLETIONS, body | {"echo": True})) == whole["text"]
    broken = "a\x85b\u2028c\u2029"  # str.splitlines, and so httpx, would end a line at each
    assert streamed_text(events(client, COMPLETIONS, body | {"echo": True, "prompt": broken})).startswith(broken)
    stopped = post(client, COMPLETIONS, body | {"echo": True, "stop": "hello", "n": 2})["choices"]
    assert [choice["text"] for choice in stopped] == [whole["text"]] * 2  # the prompt is not searched
    scored = [c["logprobs"] for c in post(client, COMPLETIONS, body | {"echo": True, "logprobs": 2, "n": 2})["choices"]]
    assert scored[0] == scored[1]
    chunks = events(client, COMPLETIONS, body | {"echo": True, "logprobs": 2})
    joined = {key: [v for c in chunks for choice in c["choices"] for v in choice["logprobs"][key]] for key in scored[0]}
    assert joined == scored[0]


def test_no_new_token_and_log_probabilities_of_the_prompt(client):
    asked = {"prompt": [5, 70, 71, 72], "max_tokens": 0, "temperature": 0}
    echoed = post(client, COMPLETIONS, asked | {"echo": True, "logprobs": 2})
    (choice,) = echoed["choices"]
    assert (len(choice["logprobs"]["tokens"]), choice["finish_reason"]) == (4, "length")
    assert echoed["usage"]["completion_tokens"] == echoed["skipdecode"]["completion_tokens"] == 0
    assert echoed["skipdecode"]["layers_run"] == echoed["skipdecode"]["layers_full"] == 0
    assert streamed_text(events(client, COMPLETIONS, asked | {"echo": True})) == choice["text"]
    assert post(client, COMPLETIONS, asked)["choices"][0]["text"] == ""
    for new in (0, 3):
        (scored,) = post(client, COMPLETIONS, asked | {"prompt_logprobs": 2, "max_tokens": new})["choices"]
        first, *others = scored["prompt_logprobs"]
        assert (first, scored["logprobs"]) == (None, None)
        assert [found[str(token)]["logprob"] for found, token in zip(others, [70, 71, 72], strict=True)] == (
            choice["logprobs"]["token_logprobs"][1:]
        )
        for found, named in zip(others, choice["logprobs"]["top_logprobs"][1:], strict=True):
            assert sorted(e["logprob"] for e in found.values()) == sorted(named.values())
            assert {1, 2} <= {e["rank"] for e in found.values()}


def test_end_tokens_and_stop_tokens(client):
    body = greedy(prompt="a b c", max_tokens=4, logit_bias={"2": 100})
    ended = post(client, COMPLETIONS, body)
    assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
    assert (ended["usage"]["completion_tokens"], ended["skipdecode"]["tokens_per_s"]) == (1, None)
    assert post(client, COMPLETIONS, body | {"ignore_eos": True})["usage"]["completion_tokens"] == 4
    for fields in ({}, {"temperature": 1}, {"logit_bias": None, "skipdecode": {"exact": True}}):
        free = post(client, COMPLETIONS, body | fields | {"max_tokens": 9, "min_tokens": 3})
        assert free["usage"]["completion_tokens"] == 4 if "logit_bias" not in fields else 9
    body = greedy(prompt="a b c", max_tokens=4, logit_bias={"70": 100})
    for fields in ({}, {"ignore_eos": True}):
        answer = post(client, COMPLETIONS, body | fields | {"stop_token_ids": [70, 71]})
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
    assert post(client, COMPLETIONS, body | {"stop_token_ids": [71]})["choices"][0]["text"] == "dddd"


def test_usage_in_streams(client):
    body = greedy(prompt="x", max_tokens=3, stream_options={"include_usage": True})
    chunks = events(client, COMPLETIONS, body)
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    body["stream_options"]["continuous_usage_stats"] = True
    found = [c["usage"]["completion_tokens"] for c in events(client, COMPLETIONS, body)]
    assert found == sorted(found)
    assert (found[0] > 0, found[-1]) == (True, 3)
    assert chunks[-1]["choices"] == []
    counts = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert chunks[-1]["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert chunks[-1]["skipdecode"]["completion_tokens"] == 3
    assert "usage" not in events(client, COMPLETIONS, greedy(prompt="x", max_tokens=3))[-1]


def test_tokens_that_the_prefix_cache_had_are_told():
    beginning = "You are a helpful assistant. " * 3  # 87 tokens, 5 pages of 16

    def asked(prompt, schedule="nested", **fields):
        body = greedy(prompt=prompt, max_tokens=4, skipdecode={"schedule": schedule}, **fields)
        answer = post(client, COMPLETIONS, body)
        details = answer["usage"]["prompt_tokens_details"]
        return details["cached_tokens"], [choice["text"] for choice in answer["choices"]]

    def counted(name):
        return [metric(service, name, schedule=label) for label in ("full", "nested", "even")]

    service = tiny_service()
    with running(service) as client:
        first, again = asked(beginning + "a"), asked(beginning + "a")
        assert (first[0], again[0]) == (0, 80)
        assert first[1] == again[1] == [offline(beginning + "a", 4, NESTED)[1]]
        assert asked(beginning + "b", n=3)[0] == 80  # the prompt counts once
        assert asked(beginning + "b", "full")[0] == 80  # prompts run every layer under both
        assert asked([beginning, "c" * 40])[0] == 80
        assert asked(beginning, "even")[0] == 80  # and under one of another drop order
        assert counted("prefix_hit_tokens_total") == [80, 240, 80]
        until(lambda: is_idle(service))
        assert metric(service, "prefix_cache_bytes") > 0
    service = tiny_service(prefix_cache=False)
    with running(service) as client:
        assert [asked(beginning)[0] for _ in range(2)] == [0, 0]
        until(lambda: is_idle(service))
        assert metric(service, "prefix_cache_bytes") == 0


def test_models(client):
    listed = client.get("/v1/models").json()
    entry = listed["data"][0]
    assert client.get("/v1/models/tiny").json() == entry
    assert client.get("/v1/models/other/model").json()["error"]["code"] == "model_not_found"
    found = entry["skipdecode"]
    assert (found["num_layers"], found["default_schedule"]) == (LAYERS, "full")
    assert {s["name"]: s["budgets"] for s in found["schedules"]} == {
        name: list(schedule.budgets) for name, schedule in SCHEDULES.items()
    }
    assert all(s["prompt_layers"] == list(SCHEDULES[s["name"]].prompt_layers()) for s in found["schedules"])


def test_tokenize(client):
    assert post(client, "/tokenize", {"prompt": "ab"}) == {"tokens": [67, 68], "count": 2, "max_model_len": CONTEXT}
    assert post(client, "/tokenize", {"messages": MESSAGES})["count"] == len(RENDERED)
    assert post(client, "/tokenize", {"prompt": "a" * 9000})["count"] == 9000
    assert post(client, "/detokenize", {"tokens": [67, 68, 2]}) == {"prompt": "ab</s>"}


def test_special_tokens():
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    with running(open_service(tiny_served_model(), tokenizer, name="tiny")) as client:

        def found(**body):
            return post(client, "/tokenize", body)["tokens"]

        assert found(prompt="a") == found(prompt="a", add_special_tokens=True) == [1, 67]
        assert found(prompt="a", add_special_tokens=False) == [67]
        assert (
            found(messages=MESSAGES) == found(messages=MESSAGES, add_special_tokens=False) == found(prompt=RENDERED)[1:]
        )
        assert found(messages=MESSAGES, add_special_tokens=True) == found(prompt=RENDERED)
        assert found(prompt="<s>a") == [1, 67]
        assert found(prompt="<s>a", add_special_tokens=False) == [1, 67]
        for prompt in ("ab", "<s>ab"):  # a completion that begins with the start token gets no second one
            assert post(client, COMPLETIONS, greedy(prompt=prompt, max_tokens=1))["usage"]["prompt_tokens"] == 3


def test_models_without_a_fast_path_are_served_too():
    service = tiny_service(family="bloom", engine="auto")
    with running(service) as client, ThreadPoolExecutor(6) as pool:

        def answer(case):
            body = greedy(prompt=case[0], max_tokens=12, skipdecode={"schedule": case[1], "trace": True})
            return post(client, COMPLETIONS, body)["choices"][0]

        cases = [(p, s) for p in PROMPTS[:2] for s in SCHEDULES]
        alone = [answer(case) for case in cases]
        assert [c["skipdecode"]["tokens"][-1]["layers"] for c in alone[:3]] == [
            s.budget(10) for s in SCHEDULES.values()
        ]
        assert list(pool.map(answer, cases)) == alone
        until(lambda: is_idle(service))


# ---------------------------------------------------------------------- refusals

PROMPT, CHAT_BODY = {"prompt": "x"}, {"messages": MESSAGES}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
# Values of a completion's fields.
INVALID = {
    "echo": [1],
    "guided_json": [5],
    "stop_token_ids": [[259]],
    "presence_penalty": [2.5],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "top_k": [-2, 2.5],
    "min_p": [1.5],
    "min_tokens": [300],
    "prompt": ["", [], [1, "a"], [[]], [259], "a\ud800", ["x"] * 17],
    "max_tokens": [100000],
    "temperature": ["hot", -1],
    "top_p": [0],
    "n": [17],
    "stop": ["", list("abcdefghijklmnopq")],
    "seed": [2**64],
    "logprobs": [6],
    "logit_bias": [{"300": 1}, {"7": 1, "007": 2}, {"a": 1}],
    "stream_options": [{}],
}
REFUSED = {
    "unknown_field": [
        (COMPLETIONS, PROMPT | {"foo": 1}, "foo"),
        (COMPLETIONS, PROMPT | {"skipdecode": {"depth": 1}}, "skipdecode.depth"),
        (COMPLETIONS, PROMPT | {"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
    "unsupported_field": [
        (COMPLETIONS, PROMPT | {"best_of": 3}, "best_of"),
        (CHAT, CHAT_BODY | {"echo": True}, "echo"),
        (COMPLETIONS, PROMPT | {"suffix": "y"}, "suffix"),
        (COMPLETIONS, PROMPT | {"bad_words": ["a"]}, "bad_words"),
        (COMPLETIONS, PROMPT | {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, CHAT_BODY | {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages.name"),
        (CHAT, CHAT_BODY | QUIET, "chat_template_kwargs.enable_thinking"),
        (CHAT, CHAT_BODY | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        (CHAT, CHAT_BODY | {"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs.?"),
        (CHAT, CHAT_BODY | {"reasoning_effort": "none"}, "reasoning_effort"),
        (COMPLETIONS, PROMPT | {"reasoning_effort": "none"}, "reasoning_effort"),
    ],
    "context_length_exceeded": [
        (COMPLETIONS, {"prompt": "x" * CONTEXT}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 2000, "max_tokens": 100}, "max_tokens"),
    ],
    "invalid_value": [
        *((COMPLETIONS, PROMPT | {name: value}, name) for name, values in INVALID.items() for value in values),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, PROMPT | {"prompt_logprobs": 1, "logprobs": 2}, "prompt_logprobs"),
        (COMPLETIONS, PROMPT | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, CHAT_BODY | {"max_tokens": 0}, "max_tokens"),
        (
            COMPLETIONS,
            PROMPT | {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        (COMPLETIONS, PROMPT | {"skipdecode": {"schedule": "x" * 10_000}}, "skipdecode.schedule"),
        (COMPLETIONS, PROMPT | {"skipdecode": {"schedule": "../x"}}, "skipdecode.schedule"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),  # the template refuses it
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        (CHAT, CHAT_BODY | {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        (CHAT, CHAT_BODY | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [5, 259]}, "tokens"),
    ],
}


def refusal(client, path, body):
    """The error of a body, which httpx would not encode with half of a surrogate pair."""
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("code", "path", "body", "param"), [(code, *row) for code, rows in REFUSED.items() for row in rows]
)
def test_refusals_name_the_field(client, code, path, body, param):
    error = refusal(client, path, body)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert "\n" not in error["message"]
    assert param.split(".")[-1] in error["message"] or code not in ("unknown_field", "unsupported_field")


# What clients send of themselves: SillyTavern to an API of vLLM's kind; Open WebUI, LibreChat and OpenAI's clients.
SILLYTAVERN = {
    "best_of": 1, "echo": False, "early_stopping": False, "frequency_penalty": 0.0, "ignore_eos": False,
    "include_stop_str_in_output": False, "length_penalty": 1, "logit_bias": {}, "min_p": 0, "min_tokens": 0, "n": 1,
    "presence_penalty": 0, "repetition_penalty": 1, "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [f"\n{name}:" for name in ("Assistant", "User", "Narrator", "System", "Out of character")],
    "suffix": None, "top_k": -1, "top_p": 1, "truncate_prompt_tokens": None, "use_beam_search": False, "user": "me",
}  # fmt: skip
CHAT_CLIENTS = {
    "frequency_penalty": 0, "function_call": None, "functions": None, "logit_bias": None, "max_completion_tokens": 4,
    "max_tokens": None, "metadata": {"chat": "7"}, "parallel_tool_calls": None, "presence_penalty": 0,
    "reasoning_effort": None, "response_format": {"type": "text"}, "safety_identifier": "someone", "seed": None,
    "service_tier": "auto", "some_field_of_next_year": None, "stop": None, "store": False, "stream_options": None,
    "tool_choice": "auto", "tools": [], "user": "someone",
}  # fmt: skip


LISTS = [["a", 5], ["a", "\ud800"], [1, "a"], [[1], []], [[1], ["x"]], [[1], [999]], ["a", ""], ["a", "x" * CONTEXT]]


@pytest.mark.parametrize("prompt", LISTS)
def test_a_bad_entry_of_a_list_of_prompts_is_named_by_its_index(client, prompt):
    error = refusal(client, COMPLETIONS, {"prompt": prompt})
    assert error["message"].startswith("prompt[1]")
    assert error["param"] == "prompt"


def test_a_chat_template_may_refuse_some_chats():
    takes_others = byte_tokenizer("{{ raise_exception('other roles, please') }}")
    open_service(tiny_served_model(), takes_others, name="tiny")


def test_a_generation_config_with_an_unknown_token_is_refused_at_start():
    model = tiny_served_model()
    model.generation_config.forced_eos_token_id = 9999
    with pytest.raises(UsageError, match="9999"):
        open_service(model, byte_tokenizer(), name="tiny")


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}


def test_what_a_chat_template_uses_reaches_it():
    tokenizer = byte_tokenizer(THINKING)
    with running(open_service(tiny_served_model(), tokenizer, name="tiny")) as client:

        def prompt(**fields):
            ids = client.post("/tokenize", json={"messages": MESSAGES} | fields).json()["tokens"]
            return tokenizer.decode(ids)

        plain = prompt()
        assert prompt(**QUIET) == plain + "<think></think>"
        turn = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]
        assert prompt(messages=turn) == "<assistant>[add 5]<tool>7<assistant>"
        assert prompt(messages=[MESSAGES[-1] | {"name": "Ann"}]).startswith("<user Ann>")
        ask = greedy(messages=MESSAGES, max_tokens=1)
        size = post(client, CHAT, ask)["usage"]["prompt_tokens"]
        for fields, more in (
            ({"reasoning_effort": "none"}, len("<think></think>")),
            (QUIET, len("<think></think>")),
            ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, 0),
        ):
            assert post(client, CHAT, ask | fields)["usage"]["prompt_tokens"] == size + more
        assert client.post(CHAT, json=ask | {"reasoning_effort": "low"}).status_code == 400


def test_variables_of_the_server_hold_where_a_request_gives_no_others():
    tokenizer = byte_tokenizer({"tool_use": "{{ 1 }}", "default": THINKING})  # of named templates, this one
    quiet = open_service(tiny_served_model(), tokenizer, name="tiny", **QUIET)
    with running(quiet) as client:

        def ends(**fields):
            ids = client.post("/tokenize", json={"messages": MESSAGES} | fields).json()["tokens"]
            return tokenizer.decode(ids).endswith("<think></think>")

        assert ends()
        assert not ends(chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(OptionError) as refused:
        open_service(tiny_served_model(), tokenizer, name="tiny", chat_template_kwargs={"thinking": 1})
    assert refused.value.name == "chat_template_kwargs"


def test_a_type_of_a_message_changes_nothing_and_calls_need_a_template(client):
    def prompt(messages):
        ids = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        return byte_tokenizer().decode(ids)

    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert post(client, CHAT, {"messages": [call]}, 400)["error"]["param"] == "messages.tool_calls"
    typed = [message | {"type": "text"} for message in MESSAGES]  # as lm-eval sends them
    assert prompt(typed) == prompt(MESSAGES)


def test_what_clients_send_of_themselves_changes_nothing(client):
    plain = greedy(prompt=PROMPTS[0], max_tokens=4)
    assert post(client, COMPLETIONS, plain | SILLYTAVERN)["choices"] == post(client, COMPLETIONS, plain)["choices"]
    chat = greedy(messages=MESSAGES, max_tokens=4)
    answer = post(client, CHAT, chat)["choices"]
    assert post(client, CHAT, chat | CHAT_CLIENTS)["choices"] == answer
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    assert streamed_text(events(client, CHAT, chat | CHAT_CLIENTS | options)) == answer[0]["message"]["content"]


def test_an_answer_may_be_sent_back_as_it_came(client):
    chat = greedy(messages=MESSAGES, max_tokens=4)
    said = post(client, CHAT, chat)["choices"][0]["message"]
    openai_s = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    question = {"role": "user", "content": "and then?"}
    plain = [{"role": said["role"], "content": said["content"]}]
    answers = [
        post(client, CHAT, chat | {"messages": [*MESSAGES, *turn, question]})["choices"]
        for turn in ([said], [said | openai_s], plain)
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b'{"prompt": "\xff"}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"[]", "application/json"),
        (b"", "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json"),
    ],
    ids=["cut off", "not utf-8", "deep", "a list", "empty", "another type", "NaN"],
)
def test_bodies_that_are_no_request(client, content, kind):
    response = client.post(COMPLETIONS, content=content, headers={"content-type": kind})
    assert response.status_code == (400 if "json" in kind else 415)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "JSON") in error["message"]  # says what is wrong


def test_unknown_paths_models_and_methods(client):
    error = client.get("/etc/passwd").json()["error"]
    assert error["code"] == "not_found"
    assert error["message"].startswith("GET /etc/passwd is not served")
    assert client.get("/..%2f..%2fpyproject.toml").status_code == 404
    error = post(client, COMPLETIONS, PROMPT | {"model": "/etc/passwd"}, 404)["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]
    post(client, COMPLETIONS, PROMPT | {"model": "tiny", "max_tokens": 1})


# ---------------------------------------------------------------------- operations


def test_health_and_metrics(client, service):
    for path in ("/health", "/health/live", "/health/ready"):
        assert client.get(path).json() == {"status": "ok"}
    before = {
        name: metric(service, name, schedule="nested")
        for name in ("prompt_tokens_total", "generated_tokens_total", "layers_run_total", "layers_full_total")
    }
    ended = metric(service, "request_seconds_count")
    answer = post(client, COMPLETIONS, greedy(prompt="xyz", max_tokens=9, skipdecode={"schedule": "nested"}))
    until(lambda: is_idle(service))
    until(lambda: metric(service, "request_seconds_count") == ended + 1)
    gained = {name: metric(service, name, schedule="nested") - value for name, value in before.items()}
    found = answer["skipdecode"]
    assert gained == {
        "prompt_tokens_total": 3,
        "generated_tokens_total": 9,
        "layers_run_total": found["layers_run"],
        "layers_full_total": found["layers_full"],
    }
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    for name in re.findall(r"^\| `(\w+)`", metrics_table(), re.MULTILINE):
        assert f"# HELP skipdecode_{name.removesuffix('_total')}" in page.text, name
    client.get("/wp-login.php")
    assert metric(service, "requests_total", endpoint="other", outcome="refused") >= 1


PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


def metrics_table():
    return PAGE.partition("## Metrics")[2].partition("\n## ")[0]


def test_the_tables_of_fields_and_clients_are_those_of_the_requests_and_of_the_tests():
    rows = [line.split("|") for line in PAGE.partition("## Requests")[2].partition("### ")[0].splitlines()]
    for column, kind in ((2, CompletionRequest), (3, ChatRequest)):
        cells = [row[1] + row[column] for row in rows if len(row) > 4 and row[column].strip()]
        named = {name.partition(".")[0] for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
        assert named == set(kind.model_fields)
    tests = Path(__file__).with_name("test_serve_clients.py").read_text(encoding="utf-8")
    tested = set(re.findall(r"^def test_(openai|[a-z]+(?:_eval)?)", tests, re.M)) - {"schemathesis"}
    rows = PAGE.partition("### Clients")[2].partition("### ")[0]
    named = {name.removesuffix("-openai").replace("-", "_") for name in re.findall(r"^\| ([a-z][\w-]+)", rows, re.M)}
    assert named - {"client"} == tested


def test_the_page_and_its_headers(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for source in re.findall(r'(?:src|href)="(/?[\w.-]+\.(?:js|css|svg|json))"', page.text):
        assert client.get("/" + source.lstrip("/")).status_code == 200, source
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404


def test_the_description_of_the_interface(client):
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) >= {COMPLETIONS, CHAT, "/v1/models", "/tokenize", "/health", "/metrics"}
    assert not any("422" in op["responses"] for path in described["paths"].values() for op in path.values())
