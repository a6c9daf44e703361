"""Shared by all tests: one thread (the suite runs in parallel), no hub."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

from skipdecode import Schedule
from textgen_tools import save_tiny_model
from tiny import SCHEDULES

torch.set_num_threads(1)
# A suite that a shell starts in the background ignores Ctrl-C, and with it the programs that it starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The vLLM plugin has an environment of its own: `make test-vllm`.
collect_ignore = ["vllm/plugin"]
# A busy machine stalls an example now and then: that is no failure.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return SCHEDULES[request.param]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[1, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A cache of the test's own, unless the test is of the embedded model."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
