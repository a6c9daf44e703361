"""Clients against a running server: openai, litellm, langchain-openai, lm-eval; schemathesis on its OpenAPI.

They come with the extra `conformance`, which `make test-slow` installs. Nothing leaves this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Before litellm is imported: it would fetch a price list.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

from typing import Literal

import pytest
import torch
from pydantic import BaseModel

from checkpoints import HERMES, byte_tokenizer
from serve_tools import NESTED, offline, running, tiny_served_model, tiny_service
from skipdecode.serving.middleware import ApiKeys
from skipdecode.serving.service import open_service

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NEW = 12
HELLO = [{"role": "user", "content": "hello"}]
CHAT_TEXT = offline("<user>hello<assistant>", NEW)[1]
TEXT = offline("hello", NEW)[1]
BIAS = {"2": -100}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["today", "tomorrow"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel, extra="forbid"):
    """What the model has to say."""

    yes: bool
    level: Literal[1, 2, 3]


@pytest.fixture
def url(client):
    return str(client.base_url)


@pytest.fixture(scope="module")
def tools_url():
    with running(open_service(tiny_served_model(), byte_tokenizer(HERMES), name="tiny")) as client:
        yield f"{client.base_url}/v1"


def test_openai_in_node(url, tools_url):
    modules = Path(os.environ.get("NODE_PATH", Path(sys.prefix) / "npm" / "node_modules"))
    if shutil.which("node") is None or not (modules / "openai").is_dir():
        pytest.skip("no node with the npm package openai: make .venv/npm installs it")
    schema = WEATHER["function"]["parameters"]
    given = json.dumps({"messages": HELLO, "tool": WEATHER, "schema": schema, "max_tokens": NEW})
    script = Path(__file__).with_name("openai_client.cjs")
    environment = os.environ | {"NODE_PATH": str(modules), "GIVEN": given}
    found = json.loads(subprocess.check_output(["node", script, f"{url}/v1", tools_url], env=environment, timeout=120))
    assert (found["text"], found["chat"], found["streamed"]) == (TEXT, CHAT_TEXT, CHAT_TEXT)
    assert (found["models"], found["usage"]["completion_tokens"]) == (["tiny"], NEW)
    for said in (found["parsed"], json.loads(found["call"]["arguments"])):
        assert said["day"] in ("today", "tomorrow")
    assert (found["call"]["name"], found["schedule"]) == ("weather", "nested")
    assert found["refused"] == [400, "unsupported_field", "bad_words"]


@pytest.fixture
def openai_client(url):
    openai = pytest.importorskip("openai", reason="pip install 'skipdecode[conformance]'")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_completions(openai_client):
    create = openai_client.completions.create
    whole = create(model="tiny", prompt="hello", max_tokens=NEW, temperature=0)
    assert whole.choices[0].text == TEXT
    assert whole.usage.completion_tokens == NEW
    chunks = list(create(model="tiny", prompt="hello", max_tokens=NEW, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "length"
    found = create(model="tiny", prompt="hello", max_tokens=3, temperature=0, logprobs=2).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 3
    assert all(len(top) <= 2 for top in found.top_logprobs)


def test_openai_chat(openai_client):
    create = openai_client.chat.completions.create
    whole = create(model="tiny", messages=HELLO, max_completion_tokens=NEW, temperature=0)
    assert whole.choices[0].message.content == CHAT_TEXT
    assert whole.choices[0].message.role == "assistant"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(create(model="tiny", messages=HELLO, max_tokens=NEW, temperature=0, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == CHAT_TEXT
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + NEW
    several = create(model="tiny", messages=HELLO, max_tokens=4, n=3, seed=5, logit_bias=BIAS)
    assert [c.index for c in several.choices] == [0, 1, 2]
    again = create(model="tiny", messages=HELLO, max_tokens=4, n=3, seed=5, logit_bias=BIAS)
    assert [c.message.content for c in again.choices] == [c.message.content for c in several.choices]
    logprobs = create(model="tiny", messages=HELLO, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2)
    assert [len(entry.top_logprobs) for entry in logprobs.choices[0].logprobs.content] == [2, 2, 2]


def test_openai_stop_and_extension(openai_client):
    create = openai_client.completions.create
    stop = TEXT[4]
    cut = create(model="tiny", prompt="hello", max_tokens=NEW, temperature=0, stop=[stop])
    assert cut.choices[0].text == TEXT[: TEXT.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    extra = {"skipdecode": {"schedule": "nested", "trace": True}}
    traced = create(model="tiny", prompt="hello", max_tokens=4, temperature=0, logit_bias=BIAS, extra_body=extra)
    assert [t["layers"] for t in traced.choices[0].skipdecode["tokens"]] == [8, *map(NESTED.budget, range(3))]
    assert traced.skipdecode["schedule"] == "nested"


def test_openai_models(openai_client):
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    assert openai_client.models.retrieve("tiny").skipdecode["num_layers"] == 8


def test_openai_errors(openai_client):
    import openai

    create = openai_client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", messages=HELLO, extra_body={"bad_words": ["a"]})
    assert (caught.value.param, caught.value.code) == ("bad_words", "unsupported_field")
    with pytest.raises(openai.NotFoundError):
        create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        openai_client.completions.create(model="tiny", prompt="x" * 5000)
    with pytest.raises(openai.BadRequestError, match="tools"):
        create(model="tiny", messages=HELLO, tools=[WEATHER])
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.completions.create(model="tiny", prompt="x" * 2048)
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in str(caught.value)


def test_openai_keys_and_full_queues():
    openai = pytest.importorskip("openai", reason="pip install 'skipdecode[conformance]'")
    import hashlib

    keys = ApiKeys((hashlib.sha256(b"right").hexdigest(),))
    with running(tiny_service(max_rows=1, max_waiting=0), keys) as client:
        base = f"{client.base_url}/v1"
        with (
            openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as wrong,
            pytest.raises(openai.AuthenticationError),
        ):
            wrong.models.list()
        with openai.OpenAI(base_url=base, api_key="right", max_retries=0) as right:
            with pytest.raises(openai.RateLimitError) as caught:
                right.completions.create(model="tiny", prompt="x", max_tokens=2, n=2)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            right.completions.create(model="tiny", prompt="x", max_tokens=2)


def test_openai_structured_output_and_tools(openai_client, tools_url):
    import openai

    parse = openai_client.chat.completions.parse
    found = parse(model="tiny", messages=HELLO, response_format=Answer, max_tokens=90).choices[0]
    assert isinstance(found.message.parsed, Answer)
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    (choice,) = openai_client.completions.create(model="tiny", prompt="a", extra_body=extra).choices
    assert choice.text in ("yes", "no")
    with openai.OpenAI(base_url=tools_url, api_key="none", max_retries=0) as client:
        create, ask = client.chat.completions.create, {"model": "tiny", "tools": [WEATHER], "max_tokens": 200}
        # Without it, random weights may add calls up to max_tokens, which the client's stream refuses.
        ask["parallel_tool_calls"] = False
        answer = create(messages=HELLO, tool_choice="required", **ask).choices[0]
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, call.function.name) == ("tool_calls", "weather")
        turn = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        assert create(messages=[*HELLO, answer.message, turn], **ask).usage.completion_tokens
        with client.chat.completions.stream(messages=HELLO, tool_choice="required", **ask) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.name == "weather"


def test_litellm(url, tools_url):
    litellm = pytest.importorskip("litellm", reason="pip install 'skipdecode[conformance]'")
    to = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    whole = litellm.completion(messages=HELLO, max_tokens=NEW, temperature=0, **to)
    assert whole.choices[0].message.content == CHAT_TEXT
    assert whole.usage.completion_tokens == NEW
    chunks = list(litellm.completion(messages=HELLO, max_tokens=NEW, temperature=0, stream=True, **to))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == CHAT_TEXT
    several = litellm.completion(messages=HELLO, max_tokens=4, n=2, seed=1, logit_bias=BIAS, **to)
    assert len(several.choices) == 2
    cut = litellm.completion(messages=HELLO, max_tokens=NEW, temperature=0, stop=[CHAT_TEXT[4]], **to)
    assert cut.choices[0].message.content == CHAT_TEXT[: CHAT_TEXT.index(CHAT_TEXT[4])]
    logprobs = litellm.completion(messages=HELLO, max_tokens=2, temperature=0, logprobs=True, top_logprobs=1, **to)
    assert len(logprobs.choices[0].logprobs.content) == 2
    text = litellm.text_completion(
        prompt="hello", max_tokens=NEW, temperature=0, **to | {"model": "text-completion-openai/tiny"}
    )
    assert text.choices[0].text == TEXT
    penalties = {"frequency_penalty": 1, "presence_penalty": 0.5, "top_k": 5}
    assert litellm.completion(messages=HELLO, max_tokens=2, seed=1, **penalties, **to).choices[0].message.content
    with pytest.raises(litellm.BadRequestError, match="bad_words"):
        litellm.completion(messages=HELLO, extra_body={"bad_words": ["a"]}, **to)
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}
    structured = litellm.completion(messages=HELLO, max_tokens=90, response_format=schema, **to)
    Answer.model_validate_json(structured.choices[0].message.content)
    ask = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    called = litellm.completion(messages=HELLO, **ask, **to | {"api_base": tools_url}).choices[0]
    assert called.message.tool_calls[0].function.name == "weather"
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "x" * 9000}], **to)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=HELLO, **to | {"model": "openai/other"})


def test_langchain(url, tools_url):
    langchain = pytest.importorskip("langchain_openai", reason="pip install 'skipdecode[conformance]'")
    from langchain_core.messages import HumanMessage

    to = {"model": "tiny", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    chat = langchain.ChatOpenAI(max_tokens=NEW, **to)
    assert chat.invoke("hello").content == CHAT_TEXT
    parts = list(chat.stream("hello"))
    assert "".join(part.content for part in parts) == CHAT_TEXT
    answer = chat.invoke([("system", "be brief"), ("user", "hello")], stop=["\n"])
    assert answer.usage_metadata["output_tokens"] <= NEW
    assert [a.content for a in chat.batch(["hello"] * 3)] == [CHAT_TEXT] * 3
    several = langchain.ChatOpenAI(max_tokens=4, n=2, **to | {"temperature": 1}).generate([[HumanMessage("hello")]])
    assert len(several.generations[0]) == 2
    logprobs = chat.bind(logprobs=True).invoke("hello").response_metadata["logprobs"]
    assert len(logprobs["content"]) == NEW
    schedule = langchain.ChatOpenAI(max_tokens=NEW, extra_body={"skipdecode": {"schedule": "nested"}}, **to)
    assert schedule.invoke("hello").content != CHAT_TEXT
    assert langchain.OpenAI(max_tokens=NEW, **to).invoke("hello") == TEXT
    assert langchain.ChatOpenAI(presence_penalty=1.0, max_tokens=2, **to).invoke("hello").usage_metadata
    calls = langchain.ChatOpenAI(max_tokens=200, **to | {"base_url": tools_url})
    for method in ("json_schema", "function_calling"):
        assert isinstance(calls.with_structured_output(Answer, method=method).invoke("hello"), Answer)
    bound = calls.bind_tools([WEATHER], tool_choice="weather")
    (call,) = bound.invoke("hello").tool_calls
    assert call["name"] == "weather"
    parts = list(bound.stream("hello"))
    assert sum(parts[1:], parts[0]).tool_calls[0]["args"] == call["args"]
    with pytest.raises(Exception, match="bad_words"):
        langchain.ChatOpenAI(extra_body={"bad_words": ["a"]}, **to).invoke("hello")


def test_lm_eval(url, tmp_path):
    models = pytest.importorskip("lm_eval.models.openai_completions", reason="pip install 'skipdecode[conformance]'")
    from lm_eval.api.instance import Instance

    byte_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = tiny_served_model(), byte_tokenizer()
    about = {"model": "tiny", "tokenizer": str(tmp_path), "tokenizer_backend": "huggingface", "max_length": 512}
    api = models.LocalCompletionsAPI(base_url=f"{url}/v1/completions", batch_size=2, **about)
    asked = [("hello", " you"), ("a b", " c"), ("one", "")]
    pairs = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked[:2])]
    for (context, text), (score, greedy) in zip(asked, api.loglikelihood(pairs), strict=False):
        ids = tokenizer(context + text).input_ids
        known = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(context), len(ids))
        assert score == pytest.approx(sum(float(known[i - 1, ids[i]]) for i in places), abs=1e-3)
        assert greedy == all(int(known[i - 1].argmax()) == ids[i] for i in places)
    until_line = ("hello", {"until": ["\n"], "max_gen_toks": NEW, "temperature": 0})
    (text,) = api.generate_until([Instance("generate_until", {}, until_line, 0)])
    assert text == TEXT.partition("\n")[0]
    chat = models.LocalChatCompletion(base_url=f"{url}/v1/chat/completions", **about)
    prompt = chat.apply_chat_template(HELLO), until_line[1]
    (text,) = chat.generate_until([Instance("generate_until", {}, prompt, 0)])
    assert text == CHAT_TEXT.partition("\n")[0]


def test_schemathesis(url):
    schemathesis = pytest.importorskip("schemathesis", reason="pip install 'skipdecode[conformance]'")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import checks

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    wanted = (
        checks.not_a_server_error,
        schemathesis.specs.openapi.checks.status_code_conformance,
        schemathesis.specs.openapi.checks.content_type_conformance,
        schemathesis.specs.openapi.checks.response_schema_conformance,
    )
    bounded = settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seen = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @bounded
            def check(case):
                nonlocal seen
                seen += 1
                case.call_and_validate(checks=wanted, timeout=30)

            # An operation that takes nothing cannot be given something wrong.
            with contextlib.suppress(Unsatisfiable):
                check()
    assert seen > 300
