"""What a JSON schema costs: decode steps with and without it in turn, greedy and sampled, alone and in a batch.

Nothing is drafted but the tokens that the schema forces. Times are CPU seconds of one thread, which other jobs of the
machine change little. Those of a decoding that ends after its first token, with the same prompts, are taken off. A run
that was stopped goes on with the same command.

OMP_NUM_THREADS=1 python benchmarks/structured.py smollm2-135m qwen2.5-coder-0.5b --out results/structured-cpu.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from timeit import timeit
from typing import Any

from shared import config_of, script_parser, write_result

from skipdecode import LLM
from skipdecode.common.bootstrap import Stopwatch
from skipdecode.engine import Request, Sampling
from skipdecode.generation.grammar import Grammars
from skipdecode.models.families import vocabulary_size

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Paris", "Rome", "Oslo", "Berlin"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "city", "tags"],
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 50}  # does not end within the tokens
QUESTION = "Write a JSON array of people, each with name, age, city and tags, about {}."


def measure(llm: LLM, rows: int, temperature: float, options: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of decode steps of `rows` sequences."""
    grammars = Grammars(llm.tokenizer, vocabulary_size(llm.loaded.model), {llm.tokenizer.eos_token_id})
    compile_seconds = timeit(lambda: grammars.compile("json", SCHEMA), number=1)
    prompts = llm.encode([QUESTION.format(f"town number {row}") for row in range(rows)])
    settings: dict[str, Any] = {"temperature": temperature, "seed": 1}
    watch = Stopwatch[str, float](("free", "schema"))

    def decoded(side: str, new: int) -> float:
        grammar = grammars.compile("json", SCHEMA) if side == "schema" else None
        sampling = Sampling(**settings, grammar=grammar)
        engine = llm.backend.engine(max_rows=rows)
        start = time.process_time()
        engine.decode([Request(tuple(prompt.token_ids), new, sampling, exact=False) for prompt in prompts])
        return time.process_time() - start

    def work(side: str) -> float:
        return decoded(side, options.new) - decoded(side, 1)

    for side in watch.sides:
        decoded(side, 2)
    for _ in range(options.rounds):
        watch.lap(work)
    steps, free = options.new - 1, watch.seconds("free", float)
    ratio = watch.ratio("schema", "free", float) or 0.0
    return {
        "model": Path(llm.loaded.name).name,
        "rows": rows,
        "temperature": temperature,
        "step_ms": 1000 * free / steps,
        "ratio": ratio,
        "more_us_per_token": 1e6 * (ratio - 1) * free / steps / rows,
        "first_compile_ms": 1000 * compile_seconds,
    }


def main() -> None:
    """Measure all cases, and write the result."""
    parser = script_parser(__doc__)
    parser.add_argument("--new", type=int, default=96, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("models", nargs="+")
    options = parser.parse_args()
    options.models, models = [Path(model).name for model in options.models], options.models
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    found = before["rows"] if before.get("config") == config_of(options) else []
    done = {(row["model"], row["rows"], row["temperature"]) for row in found}
    for model in models:
        left = [case for case in itertools.product((1, 16), (0.0, 0.7)) if (Path(model).name, *case) not in done]
        llm = LLM(model) if left else None
        for case in left:
            found.append(measure(llm, *case, options))
            print(found[-1], flush=True)
            write_result(options.out, "structured", {"rows": found}, options)


if __name__ == "__main__":
    main()
