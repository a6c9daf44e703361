"""Run by test_memory.py in a process of its own: peak memory of the engine next to what it must hold, as JSON."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import torch

from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.opening import load
from tiny import tiny_model

ROWS, PROMPT, NEW = 16, 120, 24


def resident(what: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since `reset`."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) * 1024


def decode(model: FastModel, rows: int, nominal: float) -> FastEngine:
    layers, vocabulary = model.num_layers, model.vocab_size
    engine = FastEngine(model, Schedule.from_speedup(layers, nominal, NEW), max_rows=rows)
    for _ in engine.run([Request(tuple((i + j) % vocabulary for j in range(PROMPT)), NEW) for i in range(rows)]):
        pass
    return engine


def main() -> None:
    torch.set_num_threads(1)
    # Libraries load parts of themselves on first use: that is part of what an engine finds.
    folder, nominal, kind = sys.argv[1:]
    tiny = tiny_model("llama", max_position_embeddings=1024).bfloat16()
    with tempfile.TemporaryDirectory() as other:
        tiny.save_pretrained(other)
        decode(open_model(load(other, require_tokenizer=False).model), 2, 1)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = load(folder, dtype="bfloat16", require_tokenizer=False).model
    engine = decode(open_model(model, None if kind == "none" else kind), ROWS, float(nominal))
    spec, short = engine.model.spec, engine.model.head.short  # greedy decoding reads the head's 8-bit copy alone
    layers = sum(linear.nbytes for x in spec.layers for linear in (x.qkv, x.out, x.mlp_in, x.mlp_out))
    weights = layers + (short or spec.head).nbytes + model.get_input_embeddings().weight.nbytes
    figures = {"before": before, "weights": weights, "kv": engine.stats.kv_bytes_peak, "peak": resident("VmHWM")}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
