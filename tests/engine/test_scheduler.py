"""Scheduling, without torch: who joins when."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skipdecode.engine.requests import Request
from skipdecode.engine.scheduler import Scheduler
from skipdecode.engine.sequence import Sequence
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule


def sequences(*new_tokens, pages=1):
    made = [Sequence(i, Request((5,) * 10, n), Schedule.full(8)) for i, n in enumerate(new_tokens)]
    for sequence in made:
        sequence.pages = pages
    return made


def lengths(admitted):
    return [sequence.request.max_new_tokens for sequence in admitted]


def test_scheduling_imports_no_torch():
    code = "import sys, skipdecode.engine.scheduler, skipdecode.engine.batch; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_static_batches_hold_requests_of_like_length_longest_first():
    scheduler = Scheduler(2)
    scheduler.submit(sequences(5, 50, 7, 40))
    assert lengths(scheduler.admit(0)) == [50, 40]
    assert scheduler.admit(2) == scheduler.admit(1) == []
    assert lengths(scheduler.admit(0)) == [7, 5]
    assert scheduler.waiting == 0


def test_refill_below_lets_the_next_group_in_when_few_are_left():
    scheduler = Scheduler(5, refill_below=0.5)
    scheduler.submit(sequences(*range(1, 9)))
    assert len(scheduler.admit(0)) == 5
    assert scheduler.admit(3) == []
    assert len(scheduler.admit(2)) == 3


def test_continuous_fills_every_free_row_in_order():
    scheduler = Scheduler(3, refill_below=1, in_order=True)
    scheduler.submit(sequences(5, 50, 7, 40))
    assert [s.number for s in scheduler.admit(0)] == [0, 1, 2]
    assert [s.number for s in scheduler.admit(2)] == [3]


def test_bad_settings_are_refused():
    with pytest.raises(UsageError, match="max_rows=0"):
        Scheduler(0)
    with pytest.raises(UsageError, match="refill_below=2"):
        Scheduler(1, 2)
