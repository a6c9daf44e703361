"""An OpenAI server on a Ray cluster, one vLLM engine a replica, as many replicas as the load needs.

    pip install '.[vllm]' 'ray[llm]'
    python examples/ray_serve_llm.py path/to/tuned-checkpoint --replicas 2 8

Run it on the head of a cluster, or alone: then Ray starts on this machine. It stays until it is interrupted; the
replicas stay as long as the cluster. Run again with another checkpoint, it replaces them one by one.

For requests that come at any time the checkpoint should carry a flat schedule (docs/vllm.md). Ray pins a release of
vLLM of its own, which must be one that the plugin supports.
"""

import argparse
import json
from typing import Any

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """How many replicas. Ray Serve LLM's own target is 10^9 requests a replica, with which none is ever added."""
    least, most = args.replicas
    return {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": args.requests}


def engines(args: argparse.Namespace) -> LLMConfig:
    """The replicas. A checkpoint with a schedule needs no more than its name."""
    return LLMConfig(
        model_loading_config={"model_id": args.name, "model_source": args.model},
        deployment_config={"autoscaling_config": scaling(args)},
        placement_group_config={"bundle_per_worker": {"CPU": 1}} if args.cpu else None,
        engine_kwargs=args.engine,
    )


def main(args: argparse.Namespace) -> None:
    """Serve until it is stopped."""
    # Before the first application: on every node that has a replica, for clients on other machines too.
    serve.start(http_options={"host": args.host, "port": args.port})
    # As many ways in as engines: no node is the only one. They are light: where there is room, engines decide.
    ways_in = {"autoscaling_config": scaling(args), "ray_actor_options": {"num_cpus": 0}}
    app = build_openai_app({"llm_configs": [engines(args)], "ingress_deployment_config": ways_in})
    serve.run(app, blocking=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="checkpoint with a schedule, where every replica finds it")
    parser.add_argument("--name", default="skipdecode", help="what clients call the model")
    parser.add_argument("--replicas", type=int, nargs=2, default=(1, 1), metavar=("LEAST", "MOST"))
    parser.add_argument("--requests", type=int, default=64, help="running at once in a replica, before another starts")
    parser.add_argument("--cpu", action="store_true", help="engines on CPUs: a replica takes two of Ray's")
    parser.add_argument("--host", default="0.0.0.0", help="0.0.0.0: reached from other machines")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine", type=json.loads, default={}, help="more of vLLM's engine arguments, as JSON")
    main(parser.parse_args())
