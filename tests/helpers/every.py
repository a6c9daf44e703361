"""Every family for the tests that walk all of them: parameters of pytest, and schedules that a family accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skipdecode import Schedule, attach
from skipdecode.errors import ScheduleError
from skipdecode.models.families import FAMILIES, lenders, lent_last
from tiny import LATER, OPTIONS, shared_model

GREEDY = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
EVERY = [*sorted(OPTIONS), *(pytest.param(each, marks=pytest.mark.slow) for each in LATER)]


def suited(family: str, schedule: Schedule) -> Schedule | None:
    """The schedule in an order that models of the family accept; None if they refuse it, and so they should."""
    config = shared_model(family).config
    try:
        schedule = lent_last(config, schedule)
    except ScheduleError:
        assert lenders(config)
        return None
    if not (schedule.projected and (FAMILIES[family].recurrent or lenders(config))):
        return schedule
    with pytest.raises(ScheduleError, match="full or max_exit"):
        attach(shared_model(family), schedule)
    return None


@torch.no_grad()
def decoded(model: Any, schedule: Schedule, ids: torch.Tensor, mask: torch.Tensor, new: int, **options: Any) -> Any:
    """Greedy text, `new` tokens a row, under a schedule with a cache: what `generate` returns, logits included."""
    fit = options.pop("fit", None)
    with attach(model, schedule, fit):
        return model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new, use_cache=True, **GREEDY, **options
        )
