#!/usr/bin/env bash
# Guess: LiteLLM translates an option to the scale of the server, so frequency_penalty=0, OpenAI's "no penalty", stays no penalty. The prefixes ollama/ and ollama_chat/ differ in the endpoint only.
# Instead: ollama_chat/ sends the number itself as repeat_penalty, which divides logits and is neutral at 1. A small penalty of 0.2 makes positive logits of tokens that
# occurred five times as large: the model is told to repeat itself. ollama/ sends frequency_penalty, which Ollama knows too.
# Matters to: whoever compares models through one client: the same request decodes with a penalty against repetition on one server and a reward for it on another.
# Versions: litellm 1.110.2.
# Users should: pass repeat_penalty= on Ollama's scale and no frequency_penalty, and read what one request really sends.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'litellm==1.110.2'
export LITELLM_LOCAL_MODEL_COST_MAP=True
venv/bin/python - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm

received = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "options" in body:
            received.append(body["options"])
        answer = {"model": "m", "created_at": "2026-01-01T00:00:00Z", "message": {"role": "assistant", "content": "x"}, "response": "x"}
        data = json.dumps(answer | {"done": True, "prompt_eval_count": 1, "eval_count": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
litellm.suppress_debug_info = True
print("litellm", version("litellm"))
for prefix in "ollama_chat", "ollama":
    for penalty in 0.0, 0.2:
        received.clear()
        messages = [{"role": "user", "content": "hi"}]
        litellm.completion(f"{prefix}/m", messages, api_base=f"http://127.0.0.1:{server.server_port}", frequency_penalty=penalty)
        print(f"{prefix}/ frequency_penalty={penalty}: the server gets {received[-1]}")
        name = "repeat_penalty" if prefix == "ollama_chat" else "frequency_penalty"
        assert received[-1] == {name: penalty}, "the behaviour has changed"
PY
