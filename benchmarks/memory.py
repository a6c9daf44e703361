"""Peak memory of `generate` and `serve` in fresh processes, beside weights, and beside a process without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from peers import CLI, PORT, serving
from shared import script_parser, write_result

from skipdecode import LLM

ROWS, PROMPT, NEW = 8, 200, 16
PEAK = "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
IDLE = f"""
import importlib, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
importlib.import_module(sys.argv[2])
{PEAK}
"""
GENERATE = f"""
import sys
from skipdecode.cli import main
main(sys.argv[1:])
{PEAK}
"""


def printed(*words: object) -> int:
    """The bytes that a program of Python prints at its end, in KiB."""
    command = [sys.executable, "-c", *map(str, words)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()[-1]) * 1024


def peak(model: str, quantization: str, verb: str, folder: Path) -> int:
    """Bytes: the most that a process held, of 8 prompts of about 200 tokens."""
    options = [model, "--quantization", quantization, "--schedule", "full"]
    prompts = [f"{row} " + "one two " * (PROMPT // 2) for row in range(ROWS)]
    if verb == "serve":
        with serving([*CLI, "serve", *options, "--port", PORT], "/health") as (url, process):
            body = {"model": "m", "prompt": prompts, "max_tokens": NEW, "temperature": 0}
            body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts), encoding="utf-8")
    more = ["--max-new-tokens", str(NEW), "--no-template", "--input", folder / "p.jsonl", "--output", os.devnull]
    return printed(GENERATE, "generate", *options, *more)


def held(model: str, quantization: str) -> tuple[float, float]:
    """Bytes of the weights that greedy decoding reads and of the embedding, and of the keys and values of all rows."""
    llm = LLM(model, quantization=quantization)
    step, embedding = llm.backend.step_bytes(0), llm.loaded.model.get_input_embeddings().weight
    weights = step.fixed + step.layer * llm.backend.num_layers + embedding.nbytes
    return weights, ROWS * (PROMPT + NEW) * step.kv * llm.backend.num_layers


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("models", nargs="+", help="checkpoints, GGUF files or adapters of one base")
    options = parser.parse_args()
    modules, rows = {"generate": "skipdecode.generation.llm", "serve": "skipdecode.serving.app"}, []
    idle = {verb: printed(IDLE, options.models[0], module) for verb, module in modules.items()}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {kind: held(options.models[0], kind) for kind in ("none", "w8a8")}
        cases = [(options.models[0], kind, verb) for kind in sizes for verb in ("generate", "serve")]
        for model, kind, verb in [*cases, *((model, "none", "generate") for model in options.models[1:])]:
            most, (weights, kv) = peak(model, kind, verb, Path(folder)), sizes[kind]
            row = {
                "model": Path(model).name,
                "quantization": kind,
                "verb": verb,
                "peak": most,
                "without_weights": idle[verb],
            }
            row |= {"weights": int(weights), "keys_and_values": int(kv)}
            rows.append(row | {"ratio": (most - idle[verb]) / (weights + kv), "ratio_whole": most / (weights + kv)})
            print(rows[-1], flush=True)
    write_result(options.out, "memory", {"rows": rows})


if __name__ == "__main__":
    main()
