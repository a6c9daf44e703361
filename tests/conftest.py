"""Shared by all tests: one thread (the suite runs in parallel), no hub."""

from __future__ import annotations

import os
import signal
import threading

os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

from skipdecode import Schedule
from tiny import LAYERS

torch.set_num_threads(1)
# A suite that a shell starts in the background ignores Ctrl-C, and with it the programs that it starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The vLLM plugin has an environment of its own: `make test-vllm`.
collect_ignore = ["vllm_plugin"]
# A busy machine stalls an example now and then: that is no failure.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")

# A drop order with no pattern, and budgets that stay level, jump by several layers and fall to the floor.
RANDOM_NESTED = Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (8, 7, 7, 4, 4, 3, 2), name="random-nested")
SCHEDULES = {
    "paper": Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8),
    "even": Schedule.even(LAYERS, (6, 5, 4)),
    "constant": Schedule.constant(LAYERS, 4),
    "random-nested": RANDOM_NESTED,
    "early-termination": Schedule.top_down(LAYERS, (7, 6, 5, 4)),
    "no-warm-up": Schedule.paper(LAYERS, min_exit_layer=2, max_exit_layer=6, seq_len=6, warmup_layers=0),
}


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return SCHEDULES[request.param]
