"""Exported checkpoints in vLLM without the plugin: token for token the text that the schedule gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engines import prompts, reference, save_tiny
from skipdecode import Schedule
from skipdecode.models.loading.export import cut_model
from tiny import LAYERS

SCHEDULE = Schedule(LAYERS, (5, 2, 4), (5,), prompt="max_exit")
# Plain, tied, layers of two kinds, experts, and one that the plugin does not know.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gemma3_text": {},
    "qwen3_moe": {},
    "opt": {},
    "gpt2": {"n_embd": 128},
}
TEXTS, NEW = prompts((9, 4, 17, 40)), (20, 30, 7, 16)
STOCK = """
import json, sys
from pathlib import Path
from engines import engine, generate
texts, new, *folders = json.loads(sys.stdin.read())
found = []
for folder in folders:
    with engine(Path(folder)) as llm:
        found.append(generate(llm, texts, new))
print(json.dumps(found))
"""


def test_stock_vllm_gives_the_text_of_the_schedule(tmp_path: Path):
    expected = []
    for name, changes in MODELS.items():
        model = save_tiny(tmp_path / name, None, name, **changes)
        expected.append(reference(model, SCHEDULE, TEXTS, NEW))
        cut_model(model, SCHEDULE.layers(0))
        model.save_pretrained(tmp_path / name)
    helpers = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "helpers"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", STOCK],
        input=json.dumps([TEXTS, NEW, *(str(tmp_path / name) for name in MODELS)]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(helpers), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert dict(zip(MODELS, json.loads(done.stdout.splitlines()[-1]), strict=True)) == dict(
        zip(MODELS, expected, strict=True)
    )
