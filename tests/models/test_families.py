"""Each row of the table of families, on a real model of the installed transformers, in a short form of the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oracle import active_tokens, oracle_logits
from skipdecode import attach
from tiny import LATER, RANDOM_NESTED, SCHEDULES, ragged_prompts, shared_model

NEW = 4


@pytest.mark.parametrize("family", LATER)
@torch.no_grad()
def test_cached_equals_uncached_in_a_ragged_batch(family: str) -> None:
    model, (ids, mask) = shared_model(family), ragged_prompts((7, 3))
    for schedule in (replace(SCHEDULES["constant"], prompt="max_exit"), RANDOM_NESTED):
        with attach(model, schedule):
            text = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=NEW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        whole = torch.cat([mask, mask.new_ones(2, NEW)], 1)
        active = active_tokens(schedule, 7, 7 + NEW)
        expected = oracle_logits(model, text.sequences, whole, active)[:, 6:-1]
        torch.testing.assert_close(torch.stack(text.logits, 1), expected, rtol=0, atol=1e-4)
