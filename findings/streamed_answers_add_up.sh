#!/usr/bin/env bash
# Guess: chunks of a stream are added by choice, so two answers (n=2) stay two or are refused; the usage of the last chunk is that of the request.
# Instead: LangChain adds all chunks into one text, in which the two answers alternate. The usage of all chunks is summed, so a server that reports the running total in every chunk (vLLM: continuous_usage_stats) is
# counted several times. openai's own accumulator gets both right from the same bytes.
# Matters to: whoever samples several answers to a prompt, or counts tokens, through a client library: the answers are no text that the model wrote, and costs and speeds are several times too high.
# Versions: langchain-openai 1.7.4, langchain-core 1.8.3, openai 3.57.0.
# Users should: send n requests instead of n=2 when they stream, and take counts from a request without a stream.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'langchain-openai==1.7.4' 'langchain-core==1.8.3' 'openai==3.57.0'
venv/bin/python - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import openai
from langchain_openai import ChatOpenAI

TWO = [(0, "Yes", None), (1, "No", None), (0, " sir", None), (1, " madam", None), (0, None, "stop"), (1, None, "stop")]
ONE = [(0, "a", 1), (0, "b", 2), (0, "c", 3), (0, None, 3)]


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for index, text, last in TWO if body.get("n") == 2 else ONE:
            choice = {"index": index, "delta": {"content": text} if text else {}, "finish_reason": None if text else "stop"}
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            if isinstance(last, int):
                chunk["usage"] = {"prompt_tokens": 10, "completion_tokens": last, "total_tokens": 10 + last}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
print("langchain-openai", version("langchain-openai"), "langchain-core", version("langchain-core"), "openai", version("openai"))


def with_langchain(**options):
    total = None
    for chunk in ChatOpenAI(model="m", base_url=url, api_key="none", **options).stream("hi"):
        total = chunk if total is None else total + chunk
    return total


def with_openai(**options):
    client = openai.OpenAI(base_url=url, api_key="none")
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "hi"}], **options) as stream:
        return stream.until_done().get_final_completion()


two, one = with_langchain(n=2), with_langchain(stream_usage=True)
right = [choice.message.content for choice in with_openai(n=2).choices]
usage = with_openai(stream_options={"include_usage": True}).usage
print("two answers, openai:   ", right)
print("two answers, langchain:", repr(two.content), two.response_metadata["finish_reason"])
print("10 + 3 tokens, openai:   ", usage.prompt_tokens, "+", usage.completion_tokens)
print("10 + 3 tokens, langchain:", one.usage_metadata["input_tokens"], "+", one.usage_metadata["output_tokens"])
assert right == ["Yes sir", "No madam"] and (usage.prompt_tokens, usage.completion_tokens) == (10, 3), "openai has changed"
assert two.content == "YesNo sir madam", "the behaviour has changed"
assert (one.usage_metadata["input_tokens"], one.usage_metadata["output_tokens"]) == (40, 9), "the behaviour has changed"
PY
