"""What goes wrong around a server: keys, limits, clients that leave or do not read, steps that raise, stopping."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve_tools import (
    before_steps,
    events,
    greedy,
    is_idle,
    metric,
    offline,
    running,
    slowed,
    streamed_text,
    tiny_service,
    until,
)
from skipdecode.errors import UsageError
from skipdecode.serving.middleware import ENVIRONMENT_VARIABLE, ApiKeys

COMPLETIONS = "/v1/completions"
LONG = greedy(prompt="hello", max_tokens=1000, logit_bias={"2": -100})
SHORT = greedy(prompt="hello", max_tokens=3)


def raw_stream(client, body, receive_buffer=None):
    """A socket that has asked for a stream and read nothing."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(30)
    sock.connect(("127.0.0.1", client.base_url.port))
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return sock


def outcomes(service, outcome):
    return metric(service, "requests_total", endpoint=COMPLETIONS, outcome=outcome)


# ---------------------------------------------------------------------- keys and sizes


def test_api_keys(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    hashes = [hashlib.sha256(key).hexdigest() for key in (b"from-the-file", b"from-sha256sum")]
    file.write_text(f"# ours\n{hashes[0]}  # laptop\n\n{hashes[1]}  -\n")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "from-the-environment, second, \udcff-not-utf-8")
    with running(tiny_service(), ApiKeys.read(str(file))) as client:
        for key in ("from-the-file", "from-sha256sum", "from-the-environment", "second"):
            for path in ("/v1/models", "/metrics"):
                assert client.get(path, headers={"authorization": f"Bearer {key}"}).status_code == 200
        for header in ("", "Bearer", "Bearer wrong", "Bearer from-the-fil", "Basic from-the-file", "from-the-file"):
            for call in (client.get("/v1/models", headers={"authorization": header}), client.get("/metrics")):
                assert call.status_code == 401
                assert call.json()["error"]["code"] == "invalid_api_key"
                assert call.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models", headers={"authorization": b"Bearer \xff-not-utf-8"}).status_code == 200
        assert client.post(COMPLETIONS, json=SHORT).status_code == 401
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert client.get("/").status_code == client.get("/health").status_code == 200


def test_pages_of_other_origins():
    keys = ApiKeys((hashlib.sha256(b"key").hexdigest(),))
    ours, other = {"origin": "http://localhost:3000"}, {"origin": "https://evil.example"}
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-y",
    }
    allowed = "access-control-allow-origin"
    with running(tiny_service(), keys, cors=(ours["origin"],)) as client:
        before = client.options(COMPLETIONS, headers=ours | asked)  # browsers send no key here
        assert (before.status_code, before.headers[allowed]) == (200, ours["origin"])
        assert "x-y" in before.headers["access-control-allow-headers"]
        assert client.options(COMPLETIONS, headers=other | asked).status_code == 400
        for headers, status in (({"authorization": "Bearer key"}, 200), ({}, 401)):
            answer = client.post(COMPLETIONS, json=SHORT, headers=headers | ours)
            assert (answer.status_code, answer.headers[allowed]) == (status, ours["origin"])
            assert allowed not in client.post(COMPLETIONS, json=SHORT, headers=headers | other).headers
    with running(tiny_service(), cors=("*",)) as client:
        assert client.get("/v1/models", headers=other).headers[allowed] == "*"
    with running(tiny_service()) as client:
        assert allowed not in client.options(COMPLETIONS, headers=ours | asked).headers
        assert allowed not in client.get("/v1/models", headers=ours).headers


def test_files_of_keys_that_are_none(tmp_path, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert not ApiKeys.read(None)
    file = tmp_path / "keys"
    for content, match in (("plain-key", "line 1: not the SHA-256"), ("# none\n", "holds no key")):
        file.write_text(content)
        with pytest.raises(UsageError, match=match):
            ApiKeys.read(str(file))
    with pytest.raises(UsageError, match="cannot read"):
        ApiKeys.read(str(tmp_path / "absent"))


def test_large_bodies_are_refused_and_their_senders_get_the_answer():
    with running(tiny_service(max_body_kib=10)) as client:
        headers = {"content-type": "application/json"}
        # The larger one is still on its way when it is refused.
        for size in (20_000, 5_000_000):
            body = json.dumps({"prompt": "x" * size}).encode()
            declared = client.post(COMPLETIONS, content=body, headers=headers)
            pieces = client.post(
                COMPLETIONS, content=(body[i : i + 4000] for i in range(0, len(body), 4000)), headers=headers
            )
            for response in (declared, pieces):
                assert response.status_code == 413
                assert response.json()["error"]["code"] == "request_too_large"
            assert client.post(COMPLETIONS, json=SHORT).status_code == 200


def test_long_prompts_are_refused():
    with running(tiny_service(max_prompt_tokens=50, max_new_tokens=10)) as client:
        for prompt in ("x" * 51, [5] * 51):
            error = client.post(COMPLETIONS, json=greedy(prompt=prompt)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "51" in error["message"]
            assert "50" in error["message"]
        assert client.post(COMPLETIONS, json=greedy(prompt="x", max_tokens=11)).status_code == 400


# ---------------------------------------------------------------------- connections


def connected(client, sent=b""):
    sock = socket.create_connection(("127.0.0.1", client.base_url.port), 20)
    sock.sendall(sent)
    return sock


def answer_of(sock):
    """All that comes up to the end of the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            found += part
    sock.close()
    return found


def unfinished():
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n"
    )
    return head.encode() + b"\r\n{"


HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def test_heads_are_bounded():
    lines = [b"x-%d: %s\r\n" % (i, b"y" * 100) for i in range(1000)]
    chunked = unfinished()[:-1].replace(b"content-length: 100", b"transfer-encoding: chunked") + b"1\r\nx\r\n0\r\n"
    with running(tiny_service()) as client:
        for parts in ([HEAD, *lines], [chunked, *lines], [HEAD + b"x: " + b"y" * 100_000], [b"GET /" + b"z" * 100_000]):
            sock = connected(client)
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    sock.sendall(part)
            assert b" 200 " not in answer_of(sock)  # and the connection is closed
        assert b" 400 " in answer_of(connected(client, b"what is this\r\n\r\n"))
        assert client.get("/health", headers={f"x-{i}": "y" * 1000 for i in range(50)}).status_code == 200
        chunked = (b"%c" % byte for byte in json.dumps(SHORT).encode())  # one byte a chunk
        headers = {"content-type": "application/json"}
        assert client.post(COMPLETIONS, content=chunked, headers=headers).status_code == 200


def test_bodies_have_to_be_whole_in_time():
    with running(slowed(tiny_service(), 0.12), request_seconds=0.3) as client:
        start = time.monotonic()
        half = connected(client, unfinished())
        with client.stream("POST", COMPLETIONS, json=SHORT | {"max_tokens": 4}) as response:
            assert response.status_code == 200  # of a whole request, longer than the limit
        assert time.monotonic() - start > 0.3
        answer = answer_of(half)
        assert b" 408 " in answer
        assert b"request_timeout" in answer
        assert time.monotonic() - start < 5


def test_one_connection_too_many_is_told():
    with running(tiny_service(), max_connections=3) as client:
        assert client.get("/health").status_code == 200
        held = [connected(client, HEAD) for _ in range(2)]
        refused = httpx.get(f"{client.base_url}/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert refused.headers["connection"] == "close"
        assert httpx.get(f"{client.base_url}/health").status_code == 200  # busy, and not broken
        for sock in held:
            sock.close()
        until(lambda: httpx.get(f"{client.base_url}/v1/models").status_code == 200)


# ---------------------------------------------------------------------- HTTP


def exchange(client, head, body=b""):
    """Status, headers and body of the answer to a request as it is written here; the connection has to end."""
    return parted(answer_of(connected(client, head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)))


def parted(answer):
    lines, _, content = answer.partition(b"\r\n\r\n")
    first, *rest = lines.decode().split("\r\n")
    return int(first.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in rest)}, content


def test_old_clients_and_other_methods():
    content = json.dumps(SHORT | {"stream": True}).encode()
    post = f"POST {COMPLETIONS} HTTP/1.0\nContent-Type: application/json\nContent-Length: {len(content)}"
    with running(tiny_service()) as client:
        for head in (post, post + "\nConnection: keep-alive"):
            status, headers, text = exchange(client, head, content)
            assert (status, "transfer-encoding" in headers) == (200, False)
            assert text.startswith(b"data: {")
            assert text.endswith(b"data: [DONE]\n\n")
        for path in ("/", "/app.js", "/health", "/health/live", "/v1/models", "/v1/models/tiny", "/openapi.json"):
            got, asked = client.get(path), client.head(path)
            assert (asked.status_code, asked.content) == (200, b"")
            same = ("content-type", "content-length")
            assert [asked.headers[name] for name in same] == [got.headers[name] for name in same]
            assert "date" in got.headers
            assert client.options(path).headers["allow"] == "GET, HEAD, OPTIONS"
            refused = client.post(path, json={})
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
            assert refused.json()["error"]["code"] == "method_not_allowed"
        assert client.head("/metrics").status_code == 200
        assert (client.options(COMPLETIONS).status_code, client.head(COMPLETIONS).status_code) == (204, 405)
        assert client.head("/none").status_code == client.get("/none").status_code == 404
        assert exchange(client, "OPTIONS * HTTP/1.1\nHost: localhost\nConnection: close")[0] == 204


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("/health/ready/", "", 200),
        ("/v1/%6Dodels/tiny?x=%ff", "", 200),
        ("/v1/models/%FF%00", "", 404),
        ("http://localhost:8000/health", "", 200),
        ("HTTP://127.0.0.1", "", 200),
        ("http://evil.example/health", "", 400),
        ("/health", "Host: evil.example", 400),
        ("/health", "Host: LocalHost:5", 200),
        ("/health", "Host: localhost@evil", 400),
        ("/health", "Host: localhost/x", 400),
        ("/health", "Host: localhost\nHost: evil.example", 400),
        ("/health", "Host: [::1]:5", 200),
        ("/health", "Authorization: a\nAuthorization: b", 400),
        ("/health", "Content-Encoding: gzip", 415),
        ("/health", "Expect: 100-continue", 200),
    ],
)
def test_targets_and_headers(client, target, headers, status):
    headers = headers if "Host" in headers else f"Host: localhost\n{headers}".strip()
    assert exchange(client, f"GET {target} HTTP/1.1\nConnection: close\n{headers}")[0] == status


def test_a_body_is_waited_for_where_the_client_waits(client):
    content = json.dumps(SHORT).encode()
    head = unfinished()[:-3].replace(b"json", b"json; charset=utf-8").replace(b"100", b"%d" % len(content))
    sock = connected(client, head + b"expect: 100-continue\r\nconnection: close\r\n\r\n")
    assert sock.recv(1000).startswith(b"HTTP/1.1 100")
    sock.sendall(content)
    assert parted(answer_of(sock))[0] == 200


# ---------------------------------------------------------------------- the queue


def test_a_full_queue_is_answered_with_429_and_its_end_with_service():
    service = slowed(tiny_service(max_rows=2, max_waiting=2), 0.02)
    with running(service) as client, ThreadPoolExecutor(4) as pool:
        body = greedy(prompt="hello", max_tokens=60, logit_bias={"2": -100})
        kept = [pool.submit(client.post, COMPLETIONS, json=body) for _ in range(4)]
        until(lambda: metric(service, "running_rows") == 2 and metric(service, "queue_length") == 2)
        refused = client.post(COMPLETIONS, json=body)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        answers = [future.result() for future in kept]
        assert [a.status_code for a in answers] == [200] * 4
        assert len({a.json()["choices"][0]["text"] for a in answers}) == 1
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200
        until(lambda: is_idle(service))


def test_requests_end_when_their_time_is_over():
    service = slowed(tiny_service(max_rows=1, max_seconds=0.5), 0.01)
    with running(service) as client, ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, COMPLETIONS, json=LONG)
        until(lambda: metric(service, "running_rows") == 1)
        second = pool.submit(client.post, COMPLETIONS, json=LONG)
        assert (first.result().status_code, first.result().json()["error"]["code"]) == (504, "timeout")
        # The second one got the row when the first one's time was over, and then its own was over soon.
        assert second.result().json()["error"]["code"] in ("queue_timeout", "timeout")
        with client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-1][6:])["error"]["code"] == "timeout"
        until(lambda: is_idle(service))
        until(lambda: outcomes(service, "timeout") == 3)
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200


# ---------------------------------------------------------------------- clients that go away


def test_rows_of_clients_that_hang_up_are_freed():
    service = slowed(tiny_service(max_rows=16), 0.005)
    with running(service) as client:
        streams = [raw_stream(client, LONG) for _ in range(8)]
        until(lambda: metric(service, "running_rows") == 8)
        for sock in streams:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            sock.close()
        until(lambda: is_idle(service), 5)
        whole = raw_stream(client, LONG | {"stream": False, "n": 4})
        whole.close()
        waiting = httpx.Client(base_url=client.base_url, timeout=0.3)
        with pytest.raises(httpx.ReadTimeout):
            waiting.post(COMPLETIONS, json=LONG)
        waiting.close()
        until(lambda: is_idle(service), 5)
        until(lambda: outcomes(service, "cancelled") == 10, 5)
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_client_that_leaves_the_queue_never_runs():
    service = slowed(tiny_service(max_rows=1), 0.01)
    with running(service) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, COMPLETIONS, json=greedy(prompt="a", max_tokens=50, logit_bias={"2": -100}))
        until(lambda: metric(service, "running_rows") == 1)
        raw_stream(client, LONG).close()
        second = raw_stream(client, LONG)
        until(lambda: metric(service, "queue_length") == 1)
        second.close()
        until(lambda: metric(service, "queue_length") == 0)
        assert first.result().status_code == 200
        until(lambda: is_idle(service))


def test_slow_readers_are_dropped_and_hold_up_nobody():
    service = tiny_service(max_rows=8, max_unread_tokens=20, stall_seconds=0.3)
    body = LONG | {"logprobs": 5, "skipdecode": {"trace": True}}
    with running(service) as client:
        lazy = [raw_stream(client, body, receive_buffer=2048) for _ in range(3)]
        _, text, _ = offline("hello", 3)
        assert streamed_text(events(client, COMPLETIONS, SHORT)) == text
        until(lambda: outcomes(service, "slow_reader") == 3, 30)
        until(lambda: is_idle(service), 5)
        for sock in lazy:
            sock.close()
        assert client.post(COMPLETIONS, json=SHORT).status_code == 200


# ---------------------------------------------------------------------- steps that raise


def test_a_step_that_raises_fails_its_requests_and_the_server_goes_on():
    service = slowed(tiny_service(), 0.005)
    with running(service) as client:
        body = greedy(prompt="hello", max_tokens=40, logit_bias={"2": -100})
        want = client.post(COMPLETIONS, json=body).json()["choices"]
        until(lambda: is_idle(service))
        calls = []

        def failing():
            calls.append(1)
            if len(calls) == 5:
                raise MemoryError("no room")

        before_steps(service, failing)
        streamed = raw_stream(client, body | {"skipdecode": {"schedule": "nested"}})
        failed = client.post(COMPLETIONS, json=body | {"skipdecode": {"schedule": "nested"}})
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "engine_error"
        assert "no room" not in failed.text
        tail = b""
        while part := streamed.recv(65536):
            tail += part
            if b'"engine_error"' in tail:
                break
        assert b"[DONE]" not in tail
        streamed.close()
        until(lambda: is_idle(service))
        assert metric(service, "step_failures_total") == 1
        assert client.post(COMPLETIONS, json=body).json()["choices"] == want
        assert client.get("/health/ready").status_code == 200


def test_a_model_thread_that_ends_is_seen():
    service = tiny_service()
    with running(service) as client:
        service.worker._admit = None
        assert client.post(COMPLETIONS, json=SHORT).json()["error"]["code"] == "stopping"
        until(lambda: not service.worker.alive)
        assert client.get("/health/live").status_code == 503
        assert client.get("/health/ready").status_code == 503
        assert client.post(COMPLETIONS, json=SHORT).status_code == 503


# ---------------------------------------------------------------------- stopping


def test_a_stopping_server_ends_what_runs_and_takes_nothing_new():
    service = slowed(tiny_service(), 0.01)
    with running(service) as client:
        results = []
        body = greedy(prompt="hello", max_tokens=60, logit_bias={"2": -100})
        thread = threading.Thread(target=lambda: results.append(events(client, COMPLETIONS, body)))
        thread.start()
        until(lambda: metric(service, "running_rows") == 1)
        client.server.should_exit = True
        until(lambda: not client.server.servers or not client.server.servers[0].is_serving())
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{client.base_url}/health")
        thread.join(20)
    assert results[0][-1]["choices"][0]["finish_reason"] == "length"
    assert results[0][-1]["skipdecode"]["completion_tokens"] == 60
    assert not service.worker.alive


def test_what_does_not_end_in_time_is_cut_off():
    service = slowed(tiny_service(), 0.05)
    start = time.monotonic()
    with running(service, drain_seconds=0.5) as client, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(client.post, COMPLETIONS, json=LONG)
        sock = raw_stream(client, LONG)
        until(lambda: metric(service, "running_rows") == 2)
        client.server.should_exit = True
        until(lambda: not service.worker.accepting)
        assert whole.result().json()["error"]["code"] == "stopping"
        stream = answer_of(sock)
    assert time.monotonic() - start < 10
    assert b'"code":"stopping"' in stream
    assert b"[DONE]" not in stream
    assert not service.worker.alive
