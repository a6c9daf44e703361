"""Methods: what they decode, what they count, how schedules of one budget are built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skipdecode import Schedule, attach
from skipdecode.engine.opening import Backend, end_tokens
from skipdecode.errors import ScheduleError, UnsupportedModelError
from skipdecode.evaluation.methods import Method
from tiny import LAYERS, tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [11, 12, 13, 14]]
NEW = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def reference(model: Any, prompt: list[int], eos: set[int]) -> list[int]:
    """Greedy decoding by hand, without a cache."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < NEW and not (len(tokens) > len(prompt) and tokens[-1] in eos):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_schedule_is_decoded_and_counted(model: Any):
    schedule = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=6)
    method = Method(Backend(model), schedule)
    result = method.generate(PROMPTS, max_new_tokens=NEW, eos=set())
    with attach(model, schedule):
        expected = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert result.tokens[0] == expected[0, len(PROMPTS[0]) :].tolist()
    assert result.tokens != Method(Backend(model)).generate(PROMPTS, max_new_tokens=NEW, eos=set()).tokens
    assert result.layer_tokens == 2 * sum(schedule.budget(i) for i in range(NEW - 1))
    # Left as it was: nothing is attached any more.
    assert Method(Backend(model)).generate(PROMPTS[:1], max_new_tokens=NEW, eos=set()).tokens[0] == reference(
        model, PROMPTS[0], set()
    )


def test_a_schedule_for_another_depth_is_refused(model: Any):
    with pytest.raises(ScheduleError):
        Method(Backend(model), Schedule.full(LAYERS + 1)).generate(PROMPTS, max_new_tokens=NEW, eos=set())
    with pytest.raises(UnsupportedModelError):
        Backend(torch.nn.Linear(2, 2))


def test_end_tokens_are_the_models_and_the_tokenizers(model: Any):
    from checkpoints import byte_tokenizer

    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [9, 10]
    try:
        assert end_tokens(model, byte_tokenizer()) == {2, 9, 10}
    finally:
        model.generation_config.eos_token_id = before
