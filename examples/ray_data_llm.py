"""Generate for a large set of prompts on a Ray cluster: one vLLM engine a worker, prompts sorted by expected length.

    pip install '.[vllm]' 'ray[llm]'
    python examples/ray_data_llm.py path/to/tuned-checkpoint prompts.jsonl texts --workers 8

Lines of the input have `prompt`, and may have `expected`, the output's length as far as it is known (any unit); else
the prompt's length stands for it. Requests of like length start together and end together, so under a schedule that
falls with the position the rows of a step are of like depth: the engines take the policy `refill` (docs/vllm.md).
Ray pins a release of vLLM of its own, which must be one that the plugin supports.
"""

import argparse
import json
from typing import Any

import ray
from ray.data import DataContext
from ray.data.llm import build_processor, vLLMEngineProcessorConfig


def with_length(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the length to sort by."""
    expected = row.get("expected")
    return {"prompt": row["prompt"], "expected": float(len(row["prompt"]) if expected is None else expected)}


def main(args: argparse.Namespace) -> None:
    """Read, sort, generate, write."""
    ray.init(num_cpus=args.cpus)
    DataContext.get_current().execution_options.preserve_order = True  # sorting would be in vain without
    config = vLLMEngineProcessorConfig(
        model_source=args.model,  # a checkpoint with a schedule needs no more; the policy is for offline sets
        engine_kwargs={"additional_config": {"skipdecode": {"policy": "refill"}}} | args.engine,
        concurrency=(args.workers, args.workers),
        batch_size=args.batch_size,  # one sorted run of requests; a second one at hand keeps the engine from waiting
        max_concurrent_batches=2,
        log_engine_metrics=False,  # as Ray metrics, which take ray[serve]
        max_pending_requests=2 * args.batch_size,  # all wait in vLLM's own queue, from which groups join
        placement_group_config={"bundles": [{"CPU": 1, "GPU": args.gpus_per_worker}]},
        chat_template_stage=False,
    )
    sampling = {"temperature": 0.0, "max_tokens": 256} | args.sampling
    generate = build_processor(
        config,
        preprocess=lambda row: {"prompt": row["prompt"], "sampling_params": sampling},
        postprocess=lambda row: {"prompt": row["prompt"], "text": row["generated_text"]},
    )
    rows = ray.data.read_json(args.prompts, lines=True).map(with_length).sort("expected", descending=True)
    generate(rows).write_json(args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("model", "prompts", "out"):
        parser.add_argument(name)
    for name, default in (("workers", 1), ("gpus-per-worker", 1), ("cpus", None), ("batch-size", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)  # no GPUs: CPUs; cpus: of a local Ray
    for name in ("sampling", "engine"):  # more of vLLM's SamplingParams and engine arguments, as JSON
        parser.add_argument(f"--{name}", type=json.loads, default={})
    main(parser.parse_args())
