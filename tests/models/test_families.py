"""Each row of the table of families, on a real model of the installed transformers, in a short form of the oracle."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from every import decoded, suited
from oracle import active_tokens, oracle_logits
from skipdecode import attach
from skipdecode.errors import ScheduleError, UnsupportedModelError
from skipdecode.models.families import lenders
from tiny import LATER, RANDOM_NESTED, SCHEDULES, ragged_prompts, shared_model

NEW = 4


@pytest.mark.parametrize("family", LATER)
@torch.no_grad()
def test_cached_equals_uncached_in_a_ragged_batch(family: str) -> None:
    model, (ids, mask) = shared_model(family), ragged_prompts((7, 3))
    for schedule in (replace(SCHEDULES["constant"], prompt="max_exit"), RANDOM_NESTED):
        if (schedule := suited(family, schedule)) is None:
            continue
        text = decoded(model, schedule, ids, mask, NEW)
        whole = torch.cat([mask, mask.new_ones(2, NEW)], 1)
        active = active_tokens(schedule, 7, 7 + NEW)
        expected = oracle_logits(model, text.sequences, whole, active)[:, 6:-1]
        torch.testing.assert_close(torch.stack(text.logits, 1), expected, rtol=0, atol=1e-4)


@pytest.mark.skipif("gemma4_text" not in LATER, reason="this transformers has no Gemma 4")
def test_layers_that_others_read_are_dropped_last_or_the_schedule_is_refused() -> None:
    model = shared_model("gemma4_text")  # layers 5 to 7 read the keys and values of 1 and 4
    assert lenders(model.config) == {5: 1, 6: 4, 7: 1}
    with pytest.raises(ScheduleError, match="layer 5 reads the keys and values of layer 1"):
        attach(model, SCHEDULES["paper"])
    with attach(model, "1.6x") as attachment:
        assert attachment.schedule.drop_order == (2, 3, 5, 6, 4)
    with pytest.raises(ScheduleError, match="8 layers"):
        attach(model, "4x")
    config = copy.deepcopy(model.config)
    config.layer_types = ["sliding_attention"] * 7 + ["full_attention"]  # what such a small config without any gets
    with pytest.raises(UnsupportedModelError, match="no layer makes the keys and values"):
        lenders(config)
