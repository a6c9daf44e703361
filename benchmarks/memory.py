"""Peak memory of `generate` and `serve` in fresh processes, beside weights, and beside a process without weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
from machine import held_bytes
from peers import CLI, PORT, serving
from shared import script_parser, write_result

from skipdecode import LLM

ROWS, PROMPT, NEW = 8, 200, 16
STATUS = "open('/proc/self/status').read().split('VmHWM:')[1].split()[0]"
IDLE = "import sys, skipdecode.serving.app, transformers as t; t.AutoTokenizer.from_pretrained(sys.argv[1])"
GENERATE = "import sys; from skipdecode.cli import main; main(sys.argv[1:])"


def printed(program: str, *words: str) -> int:
    """The most bytes that a program of Python held."""
    command = [sys.executable, "-c", f"{program}; print({STATUS})", *words]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()[-1]) * 1024


def peak(model: str, quantization: str, verb: str) -> int:
    """The most bytes that a verb held, of 8 prompts of about 200 tokens."""
    options = [model, "--quantization", quantization, "--schedule", "full"]
    prompts = [f"{row} " + "one two " * (PROMPT // 2) for row in range(ROWS)]
    if verb == "generate":
        most = ["--max-new-tokens", str(NEW), "--no-template", "--output", os.devnull]
        return printed(GENERATE, verb, *options, *most, *prompts)
    with serving([*CLI, verb, *options, "--port", PORT], "/health") as (url, process):
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": prompts, "max_tokens": NEW, "temperature": 0}
        httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
        return int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("models", nargs="+", help="checkpoints, GGUF files or adapters of one base")
    options, rows = parser.parse_args(), []
    idle = printed(IDLE, options.models[0])
    for model, kind in [(options.models[0], "w8a8"), *((model, "none") for model in options.models)]:
        llm = LLM(model, quantization=kind)
        (head, layer, kv), embedding = held_bytes(llm.backend.fast, 0), llm.loaded.model.get_input_embeddings().weight
        weights = int(head + layer * llm.num_layers + embedding.nbytes)
        needed = weights + ROWS * (PROMPT + NEW) * kv * llm.num_layers
        for verb in ("generate", "serve"):
            row = {"model": Path(model).name, "quantization": kind, "verb": verb, "peak": peak(model, kind, verb)}
            found = {"ratio": (row["peak"] - idle) / needed, "ratio_with_libraries": row["peak"] / needed}
            rows.append(row | {"without_weights": idle, "weights": weights, "needed": needed} | found)
            print(rows[-1], flush=True)
    write_result(options.out, "memory", {"rows": rows})


if __name__ == "__main__":
    main()
