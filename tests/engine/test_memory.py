"""Memory of the engine: exactly what its rows need, and little beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernel_reference import kernels_or_skip
from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.checkpoint import open_checkpoint
from tiny import LAYERS, tiny_model

FALLING = Schedule.from_speedup(LAYERS, 2, 20)
FORWARD_BYTES = 22e6
"""Buffers of SmolLM2-135M's largest forward: part of the fixed part that docs/architecture.md states."""
AT_EXIT = Schedule.paper(LAYERS, min_exit_layer=2, max_exit_layer=6, seq_len=12, prompt="max_exit")


@pytest.mark.parametrize("schedule", [FALLING, AT_EXIT, Schedule.even(LAYERS, 4)], ids=["falling", "prompt", "flat"])
@pytest.mark.parametrize("refill_below", [0, 0.5, 1])
def test_rows_of_any_age_hold_their_active_tokens_within_a_page(schedule: Schedule, refill_below: float):
    kernels_or_skip()
    engine = FastEngine(tiny_model("llama"), schedule, max_rows=3, refill_below=refill_below)
    prompts = [tuple(range(3, 3 + n)) for n in (5, 40, 17, 1, 33, 16, 9)]
    requests = [Request(p, 4 + 5 * i) for i, p in enumerate(prompts)]
    engine.submit(requests)
    output = [0] * len(requests)
    kv = engine.kv
    while engine.has_work:
        for out in engine.step():
            output[out.request] = 0 if out.finish_reason else out.position + 1
        exact = pages = 0
        for prompt, new in zip(prompts, output, strict=True):
            if new:  # The newest token was not fed yet; the one before it ran the budget of its position.
                layers = len(schedule.prompt_layers()) if new == 1 else schedule.budget(new - 2)
                exact += (len(prompt) + new - 1) * layers * kv.layout.bytes(1) / kv.layout.page_tokens
                pages += layers
        assert exact <= kv.bytes_held <= exact + pages * kv.layout.page_bytes
    assert kv.bytes_held == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("nominal", "kind"), [("1", "none"), ("2", "none"), ("1", "w8a8")])
def test_peak_memory_is_weights_and_cache_and_a_fixed_part(tmp_path: Path, nominal: str, kind: str):
    """SmolLM2-135M geometry from a file, 16 rows of 144 tokens; docs/architecture.md states the fixed part."""
    config = open_checkpoint(smollm2.NAME).config
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    probe = Path(__file__).parents[1] / "helpers" / "memory_probe.py"
    call = [sys.executable, str(probe), str(tmp_path), nominal, kind]
    figures = json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
    needed = figures["before"] + figures["weights"] + figures["kv"]
    assert figures["peak"] < 1.1 * needed
    # Without the libraries, which alone would hide much. A second copy of keys and values, or of the head, shows.
    assert figures["peak"] - figures["before"] < 1.1 * (figures["weights"] + figures["kv"] + FORWARD_BYTES)
