"""An OpenAI server on a Ray cluster, one vLLM engine a replica, as many replicas as the load needs.

    pip install 'skipdecode[vllm]' 'ray[llm]'
    python examples/ray_serve_llm.py path/to/tuned-checkpoint --replicas 1 8

For requests that come at any time the checkpoint should carry a flat schedule (docs/vllm.md). Ray pins a release of
vLLM of its own, which must be one that the plugin supports.
"""

from __future__ import annotations

import argparse
import json

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def config(args: argparse.Namespace) -> LLMConfig:
    """The replicas. A checkpoint with a schedule needs no more than its name."""
    least, most = args.replicas
    return LLMConfig(
        model_loading_config={"model_id": args.name, "model_source": args.model},
        deployment_config={"autoscaling_config": {"min_replicas": least, "max_replicas": most}},
        engine_kwargs=args.engine,
    )


def main(argv: list[str] | None = None) -> None:
    """Serve until it is stopped."""
    args = parse(argv)
    serve.run(build_openai_app({"llm_configs": [config(args)]}), blocking=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="checkpoint with a schedule, where every replica finds it")
    parser.add_argument("--name", default="skipdecode", help="what clients call the model")
    parser.add_argument("--replicas", type=int, nargs=2, default=(1, 1), metavar=("LEAST", "MOST"))
    parser.add_argument("--engine", type=json.loads, default={}, help="more of vLLM's engine arguments, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
