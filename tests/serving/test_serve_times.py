"""What the server says about time is what a client's clock says: the summary, the metrics and the log."""

from __future__ import annotations

import io
import json
import logging
import sys
import time

import pytest

from serve_tools import before_steps, greedy, metric, running, slowed, tiny_service, until
from skipdecode.engine.fast_model import FastModel
from skipdecode.serving.server import _SWITCH_SECONDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEW, STEP = 48, 0.02
BODY = greedy(prompt="hello", max_tokens=NEW, logit_bias={"2": -100})


@pytest.fixture(autouse=True)
def _threads_take_turns_as_in_a_server_process():
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    yield
    sys.setswitchinterval(before)


def about(seconds):
    """To 5%, or to a quarter of a slowed forward: on a busy machine the client learns late of what has happened."""
    return pytest.approx(seconds, rel=0.05, abs=0.05)


def timed_stream(client, path, body):
    """When the request left, when each chunk with text came, how many tokens each brought, and the summary."""
    times, tokens, summary = [], [], None
    began = time.perf_counter()
    with client.stream("POST", path, json=body | {"stream": True, "skipdecode": {"trace": True}}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                choice = chunk["choices"][0]
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    times.append(time.perf_counter())
                    tokens.append(len(choice["skipdecode"]["tokens"]))
                summary = chunk.get("skipdecode", summary)
    return began, times, tokens, summary


def logged(capsys, path):
    """Requests of the path that were logged since the last call; a line that comes during the call may be lost."""
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("path") == path]


def totals(service, name):
    return [metric(service, f"{name}_{part}") for part in ("sum", "count")]


def busy_once(service, seconds):
    """The event loop does something else for so long, from the first step on."""
    left = [seconds]
    before_steps(service, lambda: left and service.worker._loop.call_soon_threadsafe(time.sleep, left.pop()))


@pytest.mark.parametrize("busy", [0.0, 0.4], ids=["", "while the event loop is busy"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_s_times_are_the_client_s(path, busy, capsys):
    service = slowed(tiny_service(), STEP)
    body = BODY if path == COMPLETIONS else {**BODY, "messages": [{"role": "user", "content": BODY["prompt"]}]}
    if path == CHAT:
        del body["prompt"]
    with running(service) as client:
        logging.getLogger("skipdecode.serve").setLevel(logging.INFO)
        client.get("/health")  # the connection is there
        if busy:
            busy_once(service, busy)
        began, times, tokens, found = timed_stream(client, path, body)
        first, decode = times[0] - began, times[-1] - times[0]
        rate = pytest.approx((NEW - tokens[0]) / decode, rel=0.05)  # of a busy loop the first chunk has several tokens
        assert found["first_token_s"] == about(first)
        assert first >= max(STEP, busy)
        assert found["decode_s"] == about(decode)
        assert found["tokens_per_s"] == rate
        assert tokens[0] > 1 or not busy
        assert totals(service, "first_token_seconds") == [about(first), 1]
        seconds, count = totals(service, "inter_token_seconds")
        assert seconds == about(decode)
        assert NEW - 4 < count < NEW
        until(lambda: metric(service, "request_seconds_count"))
    (line,) = logged(capsys, path)
    assert line["first_token_s"] == about(first)
    assert line["decode_s"] == about(decode)
    assert line["tokens_per_s"] == rate
    assert line["seconds"] == about(times[-1] - began)


def test_a_server_leaves_the_logs_of_other_packages_open():
    class Owner(logging.StreamHandler):
        """Closes its stream, as absl's does."""

        def close(self):
            self.stream.close()
            super().close()

    handler = Owner(io.StringIO())
    with running(tiny_service()) as client:
        client.get("/health")
    assert not handler.stream.closed


def test_the_times_of_a_whole_answer_add_up_to_the_client_s():
    with running(slowed(tiny_service(), STEP)) as client:
        client.get("/health")
        began = time.perf_counter()
        found = client.post(COMPLETIONS, json=BODY | {"n": 2}).json()["skipdecode"]
        took = time.perf_counter() - began
        assert found["first_token_s"] + found["decode_s"] == about(took)
        assert found["first_token_s"] < 3 * STEP
        assert found["tokens_per_s"] == pytest.approx(2 * (NEW - 1) / found["decode_s"], rel=0.01)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_first_token_leaves_when_it_is_there(path, monkeypatch):
    forward, took = FastModel.forward, []
    monkeypatch.setattr(FastModel, "forward", lambda *given: (time.sleep(0.2), forward(*given))[1])
    with running(tiny_service()) as client:
        for new in (1, 2, 12):
            prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hello"}
            body = {"temperature": 0, "max_tokens": new, "logit_bias": {"67": 100}, **prompt}  # a token that is text
            began, times, _, found = timed_stream(client, path, body)
            assert found["first_token_s"] == about(times[0] - began)
            took.append(found["first_token_s"])
    assert max(took) < 0.3  # one forward, of however many
