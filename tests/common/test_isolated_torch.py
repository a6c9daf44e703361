"""Global settings of torch, which neither change what is computed nor are changed by it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from skipdecode import LLM, evaluate, tune
from skipdecode.common.environment import isolated_torch
from skipdecode.engine.kernels.weights import address
from skipdecode.errors import UnfitModelError
from textgen_tools import save_tiny_model

ROWS = [{"prompt": f"say {i}", "response": f"xyz {i}"} for i in range(12)]
CONTEXTS: dict[str, Any] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a device": lambda: torch.device("meta"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}
SETTERS: dict[str, tuple[Any, Any, Any]] = {  # with the value before
    "float16": (torch.set_default_dtype, torch.float16, torch.float32),
    "float64": (torch.set_default_dtype, torch.float64, torch.float32),
    "a default device": (torch.set_default_device, "meta", None),
    "gradients off": (torch.set_grad_enabled, False, True),
    "deterministic algorithms": (torch.use_deterministic_algorithms, True, False),
}


def settings() -> list[Any]:
    random_states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    more = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), torch.get_num_threads()
    return [torch.get_default_dtype(), torch.get_default_device(), *modes, *more, *random_states]


def computed(model: Path, out: Path) -> list[Any]:
    found: list[Any] = []
    for engine in ("fast", "transformers"):
        llm = LLM(model, engine=engine, dtype="float32")
        outputs = llm.generate(["abc", "de"], 6, schedule="2x", template=False, temperature=0.7, seed=3)
        found += [*(output.tokens for output in outputs), "".join(llm.stream("abc", 6, template=False))]
    found.append(tune(model, ROWS, out=out, schedule="2x", steps=2, full=True).result["best_dev_loss"])
    scores = evaluate(model, ROWS, "2x", metrics=["rougeL"], max_new_tokens=3, limit=2, full_depth=False)
    return [*found, scores.rows[0]["scores"]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    model = Path(save_tiny_model(tmp_path_factory.mktemp("settings") / "model"))
    return model, computed(model, model.parent / "tuned")


@pytest.mark.parametrize("name", [*CONTEXTS, *SETTERS])
def test_no_setting_matters_and_none_is_changed(name: str, expected: tuple[Path, list[Any]], tmp_path: Path):
    model, wanted = expected
    with ExitStack() as stack:
        if name in SETTERS:
            setter, value, default = SETTERS[name]
            stack.callback(setter, default)
            setter(value)
        else:
            stack.enter_context(CONTEXTS[name]())
        before = settings()
        assert computed(model, tmp_path / "tuned") == wanted
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
            calls = [threads.submit(call) for _ in range(2)]
            assert [each.result() for each in calls] == [torch.float32] * 2
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_kernel_refuses_a_tensor_of_another_type():
    for tensor in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, device="meta")):
        with pytest.raises(UnfitModelError):
            address(tensor)
