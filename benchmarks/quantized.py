"""Quantized weights with schedules, next to transformers, llama.cpp and vLLM: request time and quality on E2E.

Our engine in bf16, int8 and W8A8, each at full depth and under the split schedules of the checkpoint at nominal
2x and 3x; the others at full depth. `quality`: scores over those of bf16 at full depth, which may be measured on a busy
machine. `times`: all take turns on the same prompts, outputs are as long as the references, and end tokens end nothing;
nothing else should run meanwhile. llama.cpp is asked over HTTP, one request a sequence; no engine reuses prompts of
an earlier round. Finished pieces stay in `--work`, and the same command goes on. What else is needed: see `peers.py`.

    python benchmarks/quantized.py --data e2e/test.jsonl --out results/quantized-smollm2-135m.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from timeit import timeit
from typing import Any

import httpx
import torch
from peers import CLI, SPLITS, add_places, checkpoint_of, gguf_of, llama_server, serving, vllm_settings
from quality_table import NEEDED, retained
from shared import call, config_of, e2e_prompts, script_parser, write_result
from speed import Generated

from skipdecode import Schedule
from skipdecode.common.environment import environment
from skipdecode.common.journal import KeptValues
from skipdecode.common.kinds import read_result
from skipdecode.common.progress import note, progress_bar
from skipdecode.data.chats import response_ids
from skipdecode.data.source import load_records
from skipdecode.data.tasks import load_task
from skipdecode.engine.opening import open_engines
from skipdecode.evaluation.methods import Generation, Method
from skipdecode.evaluation.results import RUN_FILE, load_run
from skipdecode.evaluation.settings import EvaluationSettings
from skipdecode.evaluation.speed import ROUNDS, WHAT, speed_entries, time_equal_lengths
from skipdecode.models.loading.hub import load_model

QUANTIZATIONS = {"bf16": "none", "int8": "int8", "W8A8": "w8a8"}
KINDS = ("bf16", "q8_0", "q4_0")
RIVALS = ("transformers", "llama.cpp", "vllm")
# Reads batches from standard input, and answers each with its seconds; vLLM itself writes to standard output too.
VLLM = """
import json, os, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], enable_prefix_caching=False, seed=0, skip_tokenizer_init=True)
for line in sys.stdin:
    prompts, lengths = json.loads(line)
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    start = time.perf_counter()
    found = llm.generate(asked, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(each.outputs[0].token_ids) for each in found] == lengths
    print(seconds, file=answers, flush=True)
"""
Clock = Callable[[Sequence[Sequence[int]], Sequence[int]], float]
"""From prompts and the numbers of their new tokens to the seconds that a program takes for them together."""

# ---------------------------------------------------------------------- quality


def quality(options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Scores of every row of ours, and the shares of the scores of bf16 at full depth."""
    place = options.work / f"quality-{options.records or 'all'}"
    runs = {}
    for name, kind in QUANTIZATIONS.items():
        for methods in (("full",), SPLITS):
            if not all((place / kind / method / RUN_FILE).exists() for method in methods):
                note(f"quality of {name}: {', '.join(methods)}")
                evaluate(options, checkpoint, place / kind, kind, methods)
            runs |= {(name, method): load_run(place / kind / method) for method in methods}
    full, rows = runs["bf16", "full"], {}
    for (name, method), run in runs.items():
        kept, scores = retained(run, full, EvaluationSettings().resamples), run.data["metrics"]
        rows[f"{name}, {method}"] = {
            "kept": {metric: kept[metric] for metric in NEEDED},
            **{metric: scores[metric]["score"] for metric in NEEDED},
            "layers_per_token": run.layers_per_token,
        }
    return {"records": full.data["n"], "data_sha256": full.data["config"]["data_sha256"], "rows": rows}


def evaluate(options: argparse.Namespace, checkpoint: Path, out: Path, kind: str, methods: Sequence[str]) -> None:
    """Generate and score; an interrupted evaluation goes on after its last batch."""
    words = ["full"] if "full" in methods else [*(options.work / f"{name}.json" for name in methods), "--no-full-depth"]
    limit = ["--limit", str(options.records)] if options.records else []
    about = ["--task", "e2e", "--data", options.data, "--quantization", kind, "--dtype", "bfloat16", "--out", out]
    scoring = ["--no-teacher-forced", "--batch-size", "32", "--bertscore-model", "minilm", *limit]
    call(*CLI, "eval", checkpoint, *about, *scoring, "--methods", *words)


# ---------------------------------------------------------------------- times


class Rival(Method):
    """A program that decodes at full depth outside this process, whose prompts and steps are timed together."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self._clock = name, clock

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int], eos: set[int], rows: int = 0
    ) -> Generation:
        lengths = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        return Generation([], 0.0, self._clock(prompts, lengths), 0, sum(lengths) - len(lengths), max(lengths) - 1)


def llama_clock(url: str, pool: ThreadPoolExecutor) -> Clock:
    """llama.cpp's server, asked for all sequences at once, without streaming."""
    client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))

    def ask(prompt: Sequence[int], new: int) -> None:
        body = {"prompt": list(prompt), "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        found = client.post("/completion", json=body).raise_for_status().json()["tokens_predicted"]
        if found != new:
            raise SystemExit(f"llama.cpp gave {found} tokens in place of {new}")

    return lambda prompts, lengths: timeit(lambda: list(pool.map(ask, prompts, lengths)), number=1)


@contextlib.contextmanager
def vllm_clock(options: argparse.Namespace, checkpoint: Path) -> Iterator[Clock]:
    """vLLM's `LLM` with its defaults, but for the prefix cache, in a process of its own environment."""
    command = [options.vllm_env / "bin/python", "-c", VLLM, checkpoint]
    variables = vllm_settings(options) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), env=variables, **pipes) as process:
        worker: Any = process

        def clock(prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
            print(json.dumps([list(map(list, prompts)), list(lengths)]), file=worker.stdin, flush=True)
            if not (seconds := worker.stdout.readline()):
                raise SystemExit("vLLM's process ended early; see above")
            return float(seconds)

        yield clock


@contextlib.contextmanager
def sides(options: argparse.Namespace, checkpoint: Path, model: Any) -> Iterator[list[Method]]:
    """All that take turns, bf16 at full depth first."""
    schedules = [None, *(Schedule.load(options.work / f"{name}.json") for name in SPLITS)]
    methods = []
    for name, kind in QUANTIZATIONS.items():
        backend = open_engines(model, "fast", note, kind)
        methods += [Method(backend, s, f"{name}, {'full' if s is None else s.name}") for s in schedules]
    if "transformers" in options.rivals:
        methods.append(Generated(model))
        # On processors without bf16 instructions, fp32 is the faster type of torch's products.
        whole = load_model(str(checkpoint), dtype="float32").model
        methods.append(Generated(whole, "transformers fp32"))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max(options.batches)))
        for kind in KINDS if "llama.cpp" in options.rivals else ():
            command = llama_server(options, gguf_of(checkpoint, kind), max(options.batches))
            url, _ = stack.enter_context(serving(command, "/health"))
            methods.append(Rival(f"llama.cpp {kind}", llama_clock(url, pool)))
        if "vllm" in options.rivals:
            methods.append(Rival("vLLM", stack.enter_context(vllm_clock(options, checkpoint))))
        yield methods


def times(options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Request times of all sides, in turn, for each batch size."""
    loaded = load_model(str(checkpoint), dtype="bfloat16")
    records, prompts = load_records(load_task("e2e"), str(options.data)), e2e_prompts(options.data, loaded.tokenizer)
    references = response_ids([record.references[0] for record in records.items], loaded.tokenizer)
    rows: dict[str, dict[str, Any]] = {}
    with sides(options, checkpoint, loaded.model) as methods:
        for batch in options.batches:
            count = min(len(prompts), options.alone if batch == 1 else batch * options.groups)
            chosen = [i * len(prompts) // count for i in range(count)]
            work: Any = [prompts[i] for i in chosen], [len(references[i]) for i in chosen]
            about = {
                "sides": [method.name for method in methods],
                "records": chosen,
                "threads": torch.get_num_threads(),
            }
            file = options.work / f"times-{batch}.jsonl"
            with progress_bar(ROUNDS * count, "record", name=f"batch {batch}") as bar:
                kept = KeptValues(file, about, pieces="turns", remedy=f"remove {file}")
                turns = time_equal_lengths(methods, *work, batch_size=batch, kept=kept, progress=bar.update)
                kept.close()
            for method in methods:
                found = speed_entries(turns, method, methods[0], EvaluationSettings(), {})
                rows.setdefault(method.name, {})[str(batch)] = {
                    "batch_seconds": found["speed"]["seconds"] * batch / count,
                    "request_speedup": found["request_speedup"],
                    "request_speedup_interval": found["request_speedup_interval"],
                }
    return {"what": WHAT, "rounds": ROUNDS, "rows": rows}


def main() -> None:
    parser = script_parser(__doc__)
    add_places(parser, "runs/quantized")
    parser.add_argument("--parts", nargs="+", choices=("quality", "times"), default=["quality", "times"])
    parser.add_argument("--records", type=int, help="of quality (default: all)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="sequences together")
    parser.add_argument("--alone", type=int, default=24, help="records of batch 1")
    parser.add_argument("--groups", type=int, default=6, help="batches of more sequences")
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=RIVALS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint = checkpoint_of(options)
    for part in options.parts:
        before = read_result(options.out, "benchmark") if options.out.is_file() else {}
        done = {name: before[name] for name in ("quality", "times") if name in before}
        found = {"quality": quality, "times": times}[part](options, checkpoint)
        done[part] = {"config": config_of(options), "environment": environment(), **found}
        write_result(options.out, "quantized", done)


if __name__ == "__main__":
    main()
