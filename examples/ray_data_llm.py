"""Generate for a large set of prompts on a Ray cluster: one vLLM engine a worker, prompts sorted by expected length.

    pip install '.[vllm]' 'ray[llm]'
    python examples/ray_data_llm.py path/to/tuned-checkpoint prompts.jsonl texts --workers 8

Lines of the input have `prompt`, and may have `expected`, the output's length as far as it is known (any unit); else
the prompt's length stands for it. Requests of like length start together and end together, so under a schedule that
falls with the position the rows of a step are of like depth: the engines take the policy `refill` (docs/vllm.md).

Ray pins a release of vLLM of its own, which must be one that the plugin supports.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ray
from ray.data import DataContext
from ray.data.llm import build_processor, vLLMEngineProcessorConfig


def with_length(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the length to sort by."""
    expected = row.get("expected")
    return {"prompt": row["prompt"], "expected": float(len(row["prompt"]) if expected is None else expected)}


def engine(args: argparse.Namespace) -> vLLMEngineProcessorConfig:
    """The workers. A checkpoint with a schedule needs only its name; the policy `refill` is for offline sets."""
    return vLLMEngineProcessorConfig(
        model_source=args.model,
        engine_kwargs={"additional_config": {"skipdecode": {"policy": "refill"}}} | args.engine,
        concurrency=(args.workers, args.workers),
        # One batch is one sorted run of requests; a second one at hand keeps the engine from waiting.
        batch_size=args.batch_size,
        max_concurrent_batches=2,
        log_engine_metrics=False,  # as Ray metrics, which take ray[serve]
        max_pending_requests=2 * args.batch_size,  # all wait in vLLM's own queue, from which groups join
        placement_group_config={"bundles": [{"CPU": 1, "GPU": args.gpus_per_worker}]},
        chat_template_stage=False,
    )


def main(argv: list[str] | None = None) -> None:
    """Read, sort, generate, write."""
    args = parse(argv)
    ray.init(num_cpus=args.cpus)
    DataContext.get_current().execution_options.preserve_order = True  # sorting would be in vain without
    sampling = {"temperature": 0.0, "max_tokens": args.max_tokens} | args.sampling
    generate = build_processor(
        engine(args),
        preprocess=lambda row: {"prompt": row["prompt"], "sampling_params": sampling},
        postprocess=lambda row: {"prompt": row["prompt"], "text": row["generated_text"]},
    )
    rows = ray.data.read_json(str(args.prompts), lines=True).map(with_length).sort("expected", descending=True)
    generate(rows).write_json(str(args.out))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="checkpoint with a schedule, where every worker finds it")
    parser.add_argument("prompts", type=Path, help="JSON lines")
    parser.add_argument("out", type=Path, help="folder for JSON lines")
    parser.add_argument("--workers", type=int, default=1, help="engines")
    parser.add_argument("--gpus-per-worker", type=int, default=1, help="0: on CPUs")
    parser.add_argument("--cpus", type=int, help="of the local Ray that is started where there is no cluster")
    parser.add_argument("--batch-size", type=int, default=512, help="prompts that an engine gets at a time")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--sampling", type=json.loads, default={}, help="more of vLLM's SamplingParams, as JSON")
    parser.add_argument("--engine", type=json.loads, default={}, help="more of vLLM's engine arguments, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
