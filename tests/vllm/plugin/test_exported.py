"""Exported checkpoints in vLLM without the plugin: token for token the text that the schedule gave; the example."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoints import byte_tokenizer
from engines import paper, prompts, reference, save_tiny
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


def test_the_example_generates_under_the_schedule_and_at_full_depth(tmp_path: Path):
    model, tokenizer, texts = save_tiny(tmp_path, paper(), vocab_size=259), byte_tokenizer(), ["hello", "a b c d"]
    tokenizer.save_pretrained(tmp_path)
    main = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "vllm_offline.py"))["main"]
    settings = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "block_size": 32, "enforce_eager": True}
    found = list(main(str(tmp_path), texts, 16, **settings).values())
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for given, schedule in zip(found, (paper(), Schedule.full(LAYERS)), strict=True):
        wanted = [tokenizer.decode(row, skip_special_tokens=True) for row in reference(model, schedule, ids, [16, 16])]
        # vLLM holds back half of a character at the end.
        assert [text.rstrip("\ufffd") for text in given] == [text.rstrip("\ufffd") for text in wanted]
    assert found[0] != found[1]
