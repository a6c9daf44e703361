"""Run by test_memory.py in a process of its own: peak memory of the engine next to what it must hold, as JSON."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request
from skipdecode.models.loading.smollm2 import known_config
from tiny import tiny_model

ROWS, PROMPT, NEW = 16, 120, 24


def resident(what: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since `reset`."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) * 1024


def decode(model: object, rows: int, nominal: float) -> FastEngine:
    layers, vocabulary = model.config.num_hidden_layers, model.config.vocab_size
    engine = FastEngine(model, Schedule.from_speedup(layers, nominal, NEW), max_rows=rows)
    for _ in engine.run([Request(tuple((i + j) % vocabulary for j in range(PROMPT)), NEW) for i in range(rows)]):
        pass
    return engine


def main() -> None:
    torch.set_num_threads(1)
    # Libraries load parts of themselves on first use: that is part of what an engine finds.
    decode(tiny_model("llama", max_position_embeddings=1024).bfloat16(), 2, 1)
    gc.collect()
    before = resident("VmRSS")
    model = AutoModelForCausalLM.from_config(known_config(), dtype=torch.bfloat16).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    engine = decode(model, ROWS, float(sys.argv[1]))
    if (short := engine.model.head.short) is not None:
        weights += short.nbytes
    figures = {
        "before": before,
        "weights": weights,
        "kv": engine.stats.kv_bytes_peak,
        "peak": resident("VmHWM"),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
