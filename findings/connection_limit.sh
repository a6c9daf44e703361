#!/usr/bin/env bash
# Guess: limit_concurrency=N lets N requests run at a time, so N=1 serves one client after the other.
# Instead: uvicorn counts open connections, the asking one too, and answers 503 when the count reaches N. N=1 refuses every request; N=3 serves two clients, and idle keep-alive clients fill the places.
# Versions: uvicorn 0.54.0, with h11 and with httptools.
# Users should: set the limit to the number of connections plus one, with room for idle clients and health checks, and limit running requests in the application.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'uvicorn==0.54.0' 'httptools==0.9.0'
venv/bin/python - <<'EOF'
import socket
import threading
import time

import uvicorn

print("uvicorn", uvicorn.__version__)


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def ask(port):
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    return client, int(client.recv(1000).split()[1])


for http in ("h11", "httptools"):
    for limit, expected in ((1, [503, 503]), (3, [200, 200, 503])):
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=http, limit_concurrency=limit, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        answers = [ask(listener.getsockname()[1]) for _ in expected]  # one finished request per client, the connection stays open
        print(f"{http}, limit_concurrency={limit}: clients that ask once, one after the other, get", [status for _, status in answers])
        for client, _ in answers:
            client.close()
        server.should_exit = True
        thread.join(30)
        assert [status for _, status in answers] == expected, "the behaviour has changed"
EOF
