"""How often the engine's greedy tokens are those of gated transformers in bf16, on E2E records.

Both round in bf16, in other places, so near ties fall differently. Per schedule:

prefix          Tokens before the first difference of a record's two outputs, over all tokens of transformers' outputs.
teacher_forced  Share of positions where the engine, fed with transformers' output, would have said the same token.
same_records    Share of records with equal outputs.

`floor` is the same for transformers against itself, one row at a time against the batch: what padding and batch alone
change. `exact` is teacher-forced too: how often the engine, and transformers, say what fp32 arithmetic on the same
weights says. Greedy outputs in fp32 are equal token for token (tests/engine/test_engine.py and test_gated_engine.py).

    python benchmarks/agreement.py --data test.jsonl --out results/agreement-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shared import e2e_prompts, merged, script_parser, write_result
from tqdm import tqdm

from skipdecode import Schedule, attach
from skipdecode.data.tasks import load_task
from skipdecode.engine import FastEngine, GatedEngine, Request
from skipdecode.engine.base import QUANTIZATIONS
from skipdecode.engine.batch import TokenRows
from skipdecode.engine.depth import DepthOrder, LayerRows
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.opening import end_tokens
from skipdecode.evaluation.speed import batches
from skipdecode.models.loading.hub import load_model

Rows = Sequence[Sequence[int]]


@torch.inference_mode()
def forced_tokens(model: FastModel, schedule: Schedule, prompts: Rows, outputs: Rows) -> list[list[int]]:
    """The engine's top token at each position of given outputs, in decode steps of one batch."""
    order, kv = DepthOrder(schedule), model.new_kv()
    longest = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    kv.reserve(len(prompts), longest, len(prompts) * model.num_layers * kv.layout.pages(longest))
    slots = [kv.open() for _ in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    for row, prompt in enumerate(prompts):
        layers, n = schedule.prompt_layers(), len(prompt)
        kv.extend(slots[row], layers, n)
        rows = [LayerRows(0, 0, n * (layer in layers)) for layer in range(model.num_layers)]
        logits = model.forward(TokenRows(list(prompt), [slots[row]] * n, list(range(n)), rows, 1), kv)
        found[row].append(int(logits[0].argmax()))
    for position in range(max(map(len, outputs)) - 1):
        alive = [row for row, output in enumerate(outputs) if position + 1 < len(output)]
        budget, fed = schedule.budget(position), [len(prompts[row]) + position for row in alive]
        for row, at in zip(alive, fed, strict=True):
            kv.extend(slots[row], order.layers(budget), at + 1)
        tokens = [outputs[row][position] for row in alive]
        runs = order.layers(budget)
        rows = [LayerRows(0, 0, len(alive) * (layer in runs)) for layer in range(model.num_layers)]
        logits = model.forward(TokenRows(tokens, [slots[row] for row in alive], fed, rows, len(alive)), kv)
        for row, token in zip(alive, logits.argmax(-1).tolist(), strict=True):
            found[row].append(token)
    return found


@torch.inference_mode()
def parallel_tokens(model: Any, schedule: Schedule, prompts: Rows, outputs: Rows) -> list[list[int]]:
    """transformers' top token at each position of given outputs, in one forward a record, without padding."""
    found = []
    with attach(model, schedule):
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor([[*prompt, *output[:-1]]])
            logits = model(input_ids=ids, use_cache=False, prompt_length=len(prompt)).logits
            found.append(logits[0, len(prompt) - 1 :].argmax(-1).tolist())
    return found


def same(found: Rows, expected: Rows) -> float:
    """Share of equal tokens, place by place."""
    pairs = [(a, b) for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def agreement(found: Rows, expected: Rows) -> dict[str, float]:
    """`prefix` and `same_records` of outputs against transformers'."""
    common = 0
    for one, two in zip(found, expected, strict=True):
        common += next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return {
        "prefix": common / sum(map(len, expected)),
        "same_records": sum(list(a) == list(b) for a, b in zip(found, expected, strict=True)) / len(expected),
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all schedules."""
    loaded = load_model(options.model, dtype=options.dtype)
    model = merged(loaded.model)
    precise = copy.deepcopy(model).float()
    kind = None if options.quantization == "none" else options.quantization
    task, fast = load_task("e2e"), open_model(model, quantization=kind)
    prompts = e2e_prompts(options.data, loaded.tokenizer, options.records)
    ends = end_tokens(model, loaded.tokenizer)

    def decode(engine: FastEngine | GatedEngine, texts: Rows) -> list[list[int]]:
        requests = [Request(tuple(text), task.max_new_tokens, stop_ids=ends) for text in texts]
        return [row.tokens for row in engine.decode(requests)]

    rows = []
    for nominal in options.nominal:
        schedule = loaded.schedule.with_speedup(nominal)
        expected: list[list[int]] = []
        found: list[list[int]] = []
        forced: list[list[int]] = []
        alone: list[list[int]] = []
        for indices in tqdm(batches([len(p) for p in prompts], options.batch), desc=f"nominal {nominal}"):
            texts = [prompts[i] for i in indices]
            expected += decode(GatedEngine(model, schedule, max_rows=len(texts)), texts)
            found += decode(FastEngine(fast, schedule, max_rows=len(texts)), texts)
            forced += forced_tokens(fast, schedule, texts, expected[-len(texts) :])
            if len(alone) < options.floor_records:
                alone += [decode(GatedEngine(model, schedule), [text])[0] for text in texts]
        order = [prompts[i] for indices in batches([len(p) for p in prompts], options.batch) for i in indices]
        exact = parallel_tokens(precise, schedule, order, expected)
        rounded = parallel_tokens(model, schedule, order, expected)
        rows.append(
            {"nominal_speedup": nominal, "records": len(prompts), "tokens": sum(map(len, expected))}
            | {"teacher_forced": same(forced, expected)}
            | agreement(found, expected)
            | {
                "floor": agreement(alone, expected[: len(alone)])
                | {"records": len(alone), "teacher_forced": same(rounded, expected)},
                "exact": {"engine": same(forced, exact), "transformers": same(expected, exact)},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--model", default="e2e-smollm2-135m", help="a model that carries the schedule that it was tuned for"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none", choices=QUANTIZATIONS, help="as the engine reads them")
    parser.add_argument("--data", type=Path, required=True, help="E2E records (JSONL)")
    parser.add_argument("--records", type=int, default=192)
    parser.add_argument("--floor-records", type=int, default=32, help="records that are also decoded one by one")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--nominal", type=float, nargs="+", default=[1.0, 2.0])
    options = parser.parse_args()
    write_result(options.out, "agreement", {"rows": run(options)}, options)


if __name__ == "__main__":
    main()
