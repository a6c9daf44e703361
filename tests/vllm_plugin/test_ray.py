"""The Ray Data example on a local Ray cluster of two workers, each with an engine of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import byte_tokenizer
from engines import paper, reference, save_tiny

pytestmark = pytest.mark.several
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_data_llm.py"
PROMPTS, NEW = 24, 20
ENGINE = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "block_size": 32, "enforce_eager": True}


def test_two_workers_generate_what_transformers_gives(tmp_path: Path):
    pytest.importorskip("ray.data", reason="no ray[data] in this environment")
    checkpoint, prompts, out = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "texts"
    model = save_tiny(checkpoint, paper(), vocab_size=259)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(checkpoint)
    texts = ["ab" * (1 + number % 11) + chr(97 + number) for number in range(PROMPTS)]
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts), encoding="utf-8")
    command = [sys.executable, str(EXAMPLE), str(checkpoint), str(prompts), str(out), "--workers", "2"]
    command += ["--gpus-per-worker", "0", "--cpus", "8", "--batch-size", "6", "--max-tokens", str(NEW)]
    command += ["--engine", json.dumps(ENGINE), "--sampling", json.dumps({"ignore_eos": True})]
    # Not what engines of this process have set.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_PP", "VLLM_DIST", "VLLM_USE"))}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for file in sorted(out.glob("*.json*")) for line in file.read_text().splitlines()]
    ids = [tokenizer(t)["input_ids"] for t in texts]
    expected = reference(model, paper(), ids, [NEW] * PROMPTS)
    assert {r["prompt"]: r["text"] for r in rows} == {
        text: tokenizer.decode(tokens, skip_special_tokens=True) for text, tokens in zip(texts, expected, strict=True)
    }
