"""Whether prompts and wide steps run at the speed of this machine's products: bf16, fp32, and bytes (w8a8).

One prompt of each length at full depth, and decode steps of a batch, in alternation with products of 512 rows in bf16
and fp32: of each the better of torch's `F.linear` (on the model's own matrices, and on one of 1024 x 1024) and of the
package's kernels. Prompts are compared with the faster of the two types. Ratios are formed within a round; medians of
them count.

    python benchmarks/product_speed.py --out results/product-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from timeit import repeat
from typing import Any

import torch
from machine import measure_products, step_flops
from shared import script_parser, write_result
from torch.nn import functional

from skipdecode import Schedule
from skipdecode.common.bootstrap import Stopwatch
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.measure import Shape, step_seconds
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.kernels.spec import LayerRows
from skipdecode.engine.opening import Backend
from skipdecode.engine.rows import TokenRows
from skipdecode.models.families import unwrap
from skipdecode.models.loading.hub import load_model

ROWS = 512
TYPES = ("bfloat16", "float32")
Side = tuple[str, str, int]
"""What is timed, the weights, and tokens or rows."""


def prompt_call(fast: FastModel, tokens: int) -> Callable[[], object]:
    """The forward of one prompt at full depth, with the logits behind its last token."""
    kv = fast.new_kv()
    kv.reserve(1, tokens, fast.num_layers * kv.layout.pages(tokens))
    slot, layers = kv.open(), tuple(range(fast.num_layers))
    kv.extend(slot, layers, tokens)
    ids = [7 + i % 900 for i in range(tokens)]
    of_layers = [LayerRows(0, 0, tokens)] * (len(layers) - 1) + [LayerRows(0, tokens - 1, tokens)]
    rows = TokenRows(ids, [slot] * tokens, list(range(tokens)), of_layers, 1)
    return lambda: fast.forward(rows, kv)


def prompt_flops(model: Any, geometry: ModelGeometry, tokens: int) -> float:
    """Operations of that forward: of the top layer all tokens but the last one have keys and values only."""
    (fixed, layer, cached), layers = step_flops(model, geometry, 1), geometry.num_layers - 1
    products = layers * tokens * layer + layer + fixed
    attention = (layers * tokens * (tokens + 1) / 2 + tokens) * cached
    projection = 2.0 * geometry.hidden_size * geometry.keys[0]
    return products + (tokens - 1) * projection + attention


def linear_rate(fast: FastModel) -> float:
    """Operations a second of `F.linear` on a layer's matrices, 512 rows."""
    layer = fast.spec.layers[0]
    weights = [spec.weight for spec in (layer.qkv, layer.out, layer.mlp_in, layer.mlp_out)]
    inputs = [torch.randn(ROWS, weight.shape[1]).to(weight.dtype) for weight in weights]

    def all_of_them() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            functional.linear(x, weight)

    return 2 * ROWS * sum(weight.numel() for weight in weights) / min(repeat(all_of_them, number=1, repeat=5))


def sides_of(options: argparse.Namespace) -> tuple[Callable[[int], float], dict[Side, Callable[[], float]]]:
    """The operations of a prompt by its tokens; and what takes turns: products, prompts, decode steps, in seconds."""
    loaded = {name: unwrap(load_model(options.model, dtype=name, require_tokenizer=False).model) for name in TYPES}
    model = loaded["bfloat16"]
    geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)
    models = {name: open_model(each) for name, each in loaded.items()} | {"w8a8": open_model(model, "w8a8")}
    full = Schedule.full(geometry.num_layers)
    sides: dict[Side, Callable[[], float]] = {
        ("product", name, ROWS): lambda name=name: 1 / max(linear_rate(models[name]), measure_products(name))
        for name in TYPES
    }
    sides["product", "w8a8", ROWS] = lambda: 1 / measure_products("w8a8")
    for name, fast in models.items():
        for tokens in options.tokens:
            call = prompt_call(fast, tokens)
            sides["prompt", name, tokens] = lambda call=call: min(repeat(call, number=1, repeat=3))
        for batch in options.batches:
            step = Backend(loaded.get(name, model), fast), full, Shape(batch, options.prompt, 9)
            sides["decode step", name, batch] = lambda step=step: statistics.median(step_seconds(*step))
    return lambda tokens: prompt_flops(model, geometry, tokens), sides


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; returns what was found."""
    flops, sides = sides_of(options)
    for work in sides.values():  # to warm up
        work()
    watch = Stopwatch[Side, float](sides)
    for _ in range(options.rounds):
        watch.lap(lambda side: sides[side]())
    rates = {name: 1e-9 / watch.seconds(("product", name, ROWS), float) for name in (*TYPES, "w8a8")}
    best, rows = max(TYPES, key=rates.__getitem__), []
    for kind, sizes in (("prompt", options.tokens), ("decode step", options.batches)):
        for side in ((kind, name, size) for size in sizes for name in (*TYPES, "w8a8")):
            rows.append(row(watch, side, best, flops(side[2]) if kind == "prompt" else None))
            print(json.dumps(rows[-1]), flush=True)
    return {"products_gflop_s": rates, "rows": rows}


def row(watch: Stopwatch[Side, float], side: Side, best: str, flops: float | None) -> dict[str, Any]:
    """The row of a prompt, with its operations and their share of the faster type's product, or of a decode step."""
    what, weights, size = side
    seconds = watch.seconds(side, float)
    found = {"what": what, "weights": weights, "batch" if flops is None else "tokens": size, "seconds": seconds}
    if flops is not None:
        share = watch.ratio(("product", best, ROWS), side, float) or 0.0
        found |= {"gflop_s": flops / seconds / 1e9, "of_best_product": flops * share}
    return found | {"over_bf16": watch.ratio((what, "bfloat16", size), side, float)}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512], help="of a prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="rows of decode steps")
    parser.add_argument("--prompt", type=int, default=64, help="tokens behind a decode step")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write_result(options.out, "product-speed", run(options), options)


if __name__ == "__main__":
    main()
