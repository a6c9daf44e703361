"""Serve a model, and ask it for JSON that fits a schema, under a schedule, with OpenAI's client.

pip install '.[structured]' openai
python examples/structured_output.py smollm2-135m 2x:flat
"""

import subprocess
import sys
import time
import urllib.request
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

PORT = 8765


class Weather(BaseModel, extra="forbid"):
    """What the answer has to be."""

    sky: Literal["clear", "cloudy", "rain"]
    wind: Literal[0, 1, 2, 3]


def ask(url: str) -> Weather | None:
    """One question, under the last schedule of /v1/models: the one that the command line gave."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0]
    schedule = model.skipdecode["schedules"][-1]["name"]
    answer = client.chat.completions.parse(
        model=model.id,
        messages=[{"role": "user", "content": "The weather in Oslo, as JSON with sky and wind."}],
        response_format=Weather,
        extra_body={"skipdecode": {"schedule": schedule}},
    )
    return answer.choices[0].message.parsed


def main(model: str, schedule: str) -> Weather | None:
    """Start the server, ask, and stop it."""
    command = [sys.executable, "-m", "skipdecode", "serve", model, "--schedule", schedule, "--port", str(PORT)]
    server, url = subprocess.Popen(command), f"http://127.0.0.1:{PORT}"
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health/ready").close()
                break
            except OSError:
                time.sleep(0.5)
        return ask(url)
    finally:
        server.terminate()


if __name__ == "__main__":
    print(main(*sys.argv[1:3]))
