"""Fits in vLLM: token for token what transformers' gates give with the same bridges and prompt maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines import (
    compiled_graphs,
    count_preemptions,
    engine,
    generate,
    paper,
    pieces_of,
    prompts,
    reference,
    save_tiny,
)
from fits import random_fit
from skipdecode import Schedule
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.fit import Fit, set_fit
from tiny import LAYERS

LOWER, GAPS = (0, 1, 2, 3), (0, 1, 3, 6)
LENGTHS, NEW = (9, 4, 17, 40, 3, 25), (20, 30, 5, 12, 28, 16)
SCHEDULES = {
    "paper": paper("paper"),
    "shallow-prompt": paper("shallow-prompt", prompt="max_exit"),
    "no-warm-up": paper("no-warm-up", min_exit_layer=2, seq_len=6, warmup_layers=0),
    "split": Schedule.split(LAYERS, 4, (6, 5, 3), name="split"),
    "gaps": Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (7, 7, 4, 3), 1, GAPS, name="gaps"),
    # The fit has no maps for these prompts: the one projects by the layer's own weights, the other not at all.
    "projected": Schedule(LAYERS, (1, 2, 4, 3), (6, 5, 4), 1, (0, 2, 5), name="projected"),
    "passing": Schedule(LAYERS, (1, 2, 4, 3), (5, 4), 1, (0, 3, 4, 5, 6, 7), name="passing"),
}


def save_fitted(folder: Path, model_type: str = "llama", taps: int = 0, **changes: Any) -> Any:
    """A tiny checkpoint with bridges, and maps for two prompt sets; returns the transformers model with its fit."""
    model = save_tiny(folder, SCHEDULES["paper"], model_type, **changes)
    random_fit(model, [LOWER, GAPS], taps=taps).save(folder / FIT_FILE)
    set_fit(model, Fit.load(folder / FIT_FILE))
    return model


def options(**more: Any) -> dict[str, Any]:
    rest = [s.to_dict() for name, s in SCHEDULES.items() if name != "paper"]
    return {"additional_config": {"skipdecode": {"schedules": rest}}} | more


@pytest.fixture(scope="module", params=[0, 2], ids=["no tap", "two taps"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_fitted(folder, taps=request.param)


@pytest.fixture(scope="module", params=["eager", "compiled"])
def running(checkpoint: Any, request: pytest.FixtureRequest) -> Any:
    with engine(checkpoint[0], **options(enforce_eager=request.param == "eager")) as llm:
        graphs = compiled_graphs()
        yield llm
        assert compiled_graphs() == graphs
        assert pieces_of(llm).eager == (request.param == "eager")


@pytest.mark.parametrize("name", SCHEDULES)
def test_ragged_requests(checkpoint: Any, running: Any, name: str):
    texts, (folder, model) = prompts(LENGTHS), checkpoint
    expected = reference(model, SCHEDULES[name], texts, NEW)
    assert generate(running, texts, NEW, [name] * len(texts)) == expected
    set_fit(model, None)
    without = reference(model, SCHEDULES[name], texts, NEW)
    set_fit(model, Fit.load(folder / FIT_FILE))
    assert without != expected, "the fit must matter for this test"


def test_prompts_in_chunks(checkpoint: Any):
    texts, new = prompts((90, 7, 61, 33)), (15, 25, 9, 30)
    with engine(checkpoint[0], **options(max_num_batched_tokens=16, enable_prefix_caching=False)) as llm:
        for name, schedule in SCHEDULES.items():
            expected = reference(checkpoint[1], schedule, texts, new)
            assert generate(llm, texts, new, [name] * 4) == expected, name


def test_preempted_texts_and_shared_prefixes(checkpoint: Any):
    """The last token of a prompt takes bridges; the same token of a longer prompt does not, so they share no block."""
    long = prompts([100])[0]
    texts = [long[:64], long, long[:33], *prompts([20 + i for i in range(5)], seed=2)]
    new = [70] * len(texts)
    with engine(checkpoint[0], **options(num_gpu_blocks_override=14, enable_prefix_caching=True)) as llm:
        preempted = count_preemptions(llm)
        for name, schedule in SCHEDULES.items():
            expected = reference(checkpoint[1], schedule, texts, new)
            assert generate(llm, texts, new, [name] * len(texts)) == expected, name
        assert preempted


@pytest.mark.parametrize("model_type", ["gemma3_text", "opt", "qwen3", "qwen2", "granite", "mixtral", "olmo2"])
def test_family(tmp_path: Path, model_type: str):
    taps = int(model_type in ("gemma3_text", "opt", "qwen3"))
    model = save_fitted(tmp_path, model_type, taps)
    # The two best logits are 1e-3 apart or more. With seed 1 they are 1e-5 apart for OPT, and machines differ.
    texts, new = prompts((9, 4, 17, 40), seed=2), (20, 30, 7, 16)
    names = ["paper", "no-warm-up", *([] if model_type == "olmo2" else ["split", "gaps"])]
    expected = {name: reference(model, SCHEDULES[name], texts, new) for name in names}
    more = [SCHEDULES[name].to_dict() for name in names[1:]]
    with engine(tmp_path, max_num_batched_tokens=24, additional_config={"skipdecode": {"schedules": more}}) as llm:
        for name, tokens in expected.items():
            assert generate(llm, texts, new, [name] * 4) == tokens, name
