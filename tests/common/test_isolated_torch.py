"""Global settings of torch, which neither change what is computed nor are changed by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from skipdecode import LLM, Schedule, attach, evaluate, tune
from skipdecode.common.environment import isolated_torch
from skipdecode.engine.kernels.weights import address
from skipdecode.errors import UnfitModelError
from textgen_tools import save_tiny_model

ROWS = [{"prompt": f"say {i}", "response": f"xyz {i}"} for i in range(12)]
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a device": lambda: torch.device("meta"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}
SETTERS: dict[str, tuple[Callable[[Any], object], Any, Any]] = {
    "float16": (torch.set_default_dtype, torch.float16, torch.float32),
    "bfloat16": (torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float64": (torch.set_default_dtype, torch.float64, torch.float32),
    "a default device": (torch.set_default_device, "meta", None),
    "gradients off": (torch.set_grad_enabled, False, True),
    "deterministic algorithms": (torch.use_deterministic_algorithms, True, False),
    "seeds": (lambda seed: (torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)), 7, 8),
}


def settings() -> list[Any]:
    states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    more = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), torch.get_num_threads()
    return [torch.get_default_dtype(), torch.get_default_device(), *modes, *more, *states]


def computed(model: Path, out: Path, loaded: Any) -> list[Any]:
    """What the public functions compute, each in a short run."""
    found: list[Any] = []
    for engine in ("fast", "transformers"):
        llm = LLM(model, engine=engine, dtype="float32")
        for options in ({}, {"temperature": 0.7, "seed": 3}):
            outputs = llm.generate(["abc", "de"], 6, schedule="2x", template=False, **options)
            found += [output.tokens for output in outputs]
        found.append("".join(llm.stream("abc", 6, template=False)))
    found.append(tune(model, ROWS, out=out, schedule="2x", steps=2, full=True).result["best_dev_loss"])
    scores = evaluate(model, ROWS, "2x", metrics=["rougeL"], max_new_tokens=3, limit=2, full_depth=False)
    found.append(scores.rows[0]["scores"])
    with attach(loaded, Schedule.from_speedup(num_layers=llm.num_layers, nominal_speedup=2, seq_len=8)) as attachment:
        found.append(attachment.schedule.budgets)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("settings") / "model")


@pytest.fixture(scope="module")
def expected(place: Path) -> list[Any]:
    return computed(place, place.parent / "plain", LLM(place).loaded.model)


@pytest.mark.parametrize("name", [*CONTEXTS, *SETTERS])
def test_no_setting_matters_and_none_is_changed(name: str, place: Path, expected: list[Any], tmp_path: Path):
    loaded = LLM(place).loaded.model
    with ExitStack() as stack:
        if name in SETTERS:
            setter, value, before = SETTERS[name]
            stack.callback(setter, before)
            setter(value)
        stack.enter_context(CONTEXTS.get(name, nullcontext)())
        before = settings()
        assert computed(place, tmp_path / "tuned", loaded) == expected
        assert settings() == before


def test_the_last_of_parallel_calls_restores():
    def call() -> torch.dtype:
        with isolated_torch():
            barrier.wait()
            return torch.get_default_dtype()

    barrier = Barrier(2)
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.submit(call), threads.submit(call)
            assert first.result() == second.result() == torch.float32
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_kernel_refuses_a_tensor_of_another_type():
    assert address(torch.zeros(2)) > 0
    for tensor in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, device="meta")):
        with pytest.raises(UnfitModelError):
            address(tensor)
