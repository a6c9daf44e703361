"""Whether prompts and wide steps run at the speed of this machine's products: bf16, and bytes against bytes (w8a8).

One prompt of each length at full depth, and decode steps of a batch, in alternation with the bf16 product of 512 rows:
the better of torch's `F.linear` (on the model's own matrices, and on one of 1024 x 1024) and of the package's kernels.
Ratios are formed within a round; medians of them count.

    python benchmarks/product_speed.py --out results/product-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from skipdecode import Schedule
from skipdecode.common.environment import environment
from skipdecode.common.kinds import heading
from skipdecode.common.stopwatch import timed
from skipdecode.engine.batch import TokenRows
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.opening import Backend
from skipdecode.models.families import unwrap
from skipdecode.models.loading.hub import load_model
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.machine import measure_products
from skipdecode.performance.timing import Shape, step_seconds

ROWS = 512


def prompt_call(fast: FastModel, tokens: int) -> Callable[[], object]:
    """The forward of one prompt at full depth, with the logits behind its last token."""
    kv = fast.new_kv()
    kv.reserve(1, tokens, fast.num_layers * kv.layout.pages(tokens))
    slot, layers = kv.open(), tuple(range(fast.num_layers))
    kv.extend(slot, layers, tokens)
    ids = [7 + i % 900 for i in range(tokens)]
    rows = TokenRows(ids, [slot] * tokens, list(range(tokens)), [tokens] * len(layers), [tokens - 1])
    return lambda: fast.forward(rows, kv)


def prompt_flops(geometry: ModelGeometry, tokens: int) -> float:
    """Operations of that forward: of the top layer all tokens but the last one have keys and values only."""
    layers = geometry.num_layers - 1
    products = layers * tokens * geometry.layer_flops() + geometry.layer_flops() + geometry.fixed_flops()
    attention = (layers * tokens * (tokens + 1) / 2 + tokens) * geometry.kv_flops_per_token()
    return products + (tokens - 1) * geometry.projection_flops() + attention


def linear_rate(fast: FastModel) -> float:
    """Operations a second of `F.linear` on a layer's matrices, 512 rows."""
    layer = fast._spec.layers[0]
    weights = [spec.weight for spec in (layer.qkv, layer.out, layer.mlp_in, layer.mlp_out)]
    inputs = [torch.randn(ROWS, weight.shape[1]).to(weight.dtype) for weight in weights]

    def all_of_them() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            functional.linear(x, weight)

    return 2 * ROWS * sum(weight.numel() for weight in weights) / min(timed(all_of_them) for _ in range(5))


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; returns the result document."""
    model = unwrap(load_model(options.model, dtype="bfloat16", require_tokenizer=False).model)
    geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)
    models = {"bfloat16": open_model(model), "w8a8": open_model(model, "w8a8")}
    backends = {name: Backend(model, fast) for name, fast in models.items()}
    full = Schedule.full(geometry.num_layers)
    calls = {(name, n): prompt_call(fast, n) for n in options.tokens for name, fast in models.items()}
    rates: dict[str, list[float]] = {"bfloat16": [], "w8a8": []}
    prompts: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    steps: dict[tuple[str, int], list[float]] = {(name, b): [] for b in options.batches for name in models}
    for number in range(options.rounds + 1):
        kept = number > 0  # the first round warms up
        best = max(linear_rate(models["bfloat16"]), measure_products("bfloat16"))
        rates["bfloat16"] += [best] * kept
        rates["w8a8"] += [measure_products("w8a8")] * kept
        for key, call in calls.items():
            prompts[key] += [min(timed(call) for _ in range(3))] * kept
        for name, batch in steps:
            shape = Shape(batch, options.prompt, 9)
            took = statistics.median(step_seconds(backends[name], full, shape))
            steps[name, batch] += [took] * kept
    table = [_row(geometry, prompts, rates, *key) for key in prompts]
    table += [_step_row(steps, *key) for key in steps]
    for row in table:
        print(json.dumps(row), flush=True)
    config = {k: v for k, v in vars(options).items() if k != "out"}
    found = {"products_gflop_s": {k: statistics.median(v) / 1e9 for k, v in rates.items()}, "rows": table}
    return {**heading("benchmark", "product-speed"), "environment": environment(), "config": config} | found


def _row(geometry: ModelGeometry, times: Any, rates: Any, name: str, tokens: int) -> dict[str, Any]:
    flops, took = prompt_flops(geometry, tokens), times[name, tokens]
    shares = [flops / s / rate for s, rate in zip(took, rates["bfloat16"], strict=True)]
    gains = [a / b for a, b in zip(times["bfloat16", tokens], took, strict=True)]
    return {
        "what": "prompt",
        "weights": name,
        "tokens": tokens,
        "seconds": statistics.median(took),
        "gflop_s": flops / statistics.median(took) / 1e9,
        "of_bf16_product": statistics.median(shares),
        "over_bf16": statistics.median(gains),
    }


def _step_row(times: Any, name: str, batch: int) -> dict[str, Any]:
    gains = [a / b for a, b in zip(times["bfloat16", batch], times[name, batch], strict=True)]
    took = statistics.median(times[name, batch])
    return {
        "what": "decode step",
        "weights": name,
        "batch": batch,
        "seconds": took,
        "over_bf16": statistics.median(gains),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512], help="of a prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="rows of decode steps")
    parser.add_argument("--prompt", type=int, default=64, help="tokens behind a decode step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    document = run(options)
    document["config"]["command"] = " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
