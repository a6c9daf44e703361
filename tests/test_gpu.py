"""What only a CUDA device can show: that graphs are captured, repeat the eager steps, and share their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skipdecode import Schedule, attach
from skipdecode.cli import main
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.fast_model import DenseModel
from skipdecode.engine.model_spec import READERS
from skipdecode.performance.machine import measure_bandwidth
from textgen_tools import save_tiny_model
from tiny import LAYERS, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: graphs can be captured on one only"),
]
NEW = 20
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(3, 40)), (11, 12, 13, 14, 15, 16, 17)]
LINEAR = Schedule.from_speedup(LAYERS, 2, NEW)


def tokens(model: DenseModel, **options: Any) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in PROMPTS]
    for out in FastEngine(model, LINEAR, **options).run([Request(p, NEW) for p in PROMPTS]):
        rows[out.request].append(out.token)
    return rows


@pytest.mark.parametrize("family", sorted(READERS))
def test_graphs_give_the_tokens_of_transformers(family: str):
    model = tiny_model(family).cuda()
    got = tokens(DenseModel(model))
    with attach(model, LINEAR):
        for prompt, row in zip(PROMPTS, got, strict=True):
            ids = torch.tensor([prompt], device="cuda")
            assert row == model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_leaves_the_logits_of_the_eager_step(dtype: torch.dtype):
    model = DenseModel(tiny_model("llama").to(dtype).cuda())
    kv = model.new_kv()
    kv.reserve(4, 60, 0)
    slots = [kv.open() for _ in range(3)]
    places = kv.places(slots)
    with torch.inference_mode():
        for position in range(4):
            kv.cache.load(places, [5, 6, 7], [position] * 3, [3, 2, *[3] * (LAYERS - 2)], 4)
            model._decoder.step(kv.cache, 4, 64, range(LAYERS))
            eager = kv.cache.logits.clone()
            kv.cache.logits.zero_()
            kv.cache.graphs.run("step", lambda: model._decoder.step(kv.cache, 4, 64, range(LAYERS)))
            torch.testing.assert_close(kv.cache.logits[places], eager[places], rtol=1e-3, atol=1e-3)
    assert len(kv.cache.graphs) == 1


def test_graphs_share_a_pool_and_give_it_back():
    model = DenseModel(tiny_model("llama", hidden_size=512, intermediate_size=4096).bfloat16().cuda())
    first = tokens(model)
    (cache,) = model._users
    assert len(cache.graphs) > 3
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    assert tokens(model) == first
    assert torch.cuda.memory_reserved() <= held + 2**21
    cache.graphs.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held
    assert tokens(model) == first


def test_verbs_choose_it(tmp_path: Any, capsys: Any):
    model = save_tiny_model(tmp_path)
    assert main(["bench", model, "--device", "cuda", "--prompt", "6", "--new", "9", "--rounds", "1"]) == 0
    assert "fast" in capsys.readouterr().out
    assert main(["generate", model, "one", "--device", "cuda", "--max-new-tokens", "8"]) == 0
    assert "through transformers" not in capsys.readouterr().err
    assert measure_bandwidth("cuda") > 1e9
