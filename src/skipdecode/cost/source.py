"""The measured cost of a model by name, kept in the cache directory for later commands."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from skipdecode.common.environment import cpu_model, usable_cores
from skipdecode.common.files import cache_dir, write_whole
from skipdecode.common.jsonl import read_json
from skipdecode.common.progress import note
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.measure import measure_cost
from skipdecode.cost.model import FORMAT, CostModel
from skipdecode.engine import kernels
from skipdecode.engine.opening import Backend, open_engines, running_dtype
from skipdecode.errors import DataError, OutputError
from skipdecode.models.fit import temporary_fit
from skipdecode.models.loading.checkpoint import Checkpoint, Model, loaded_of, open_checkpoint
from skipdecode.models.loading.hub import choose_device, load_model

_NOISY = 0.1  # residual of a fit, above which a plan deserves a second measurement
# Of a config: no size depends on it.
_VOLATILE = ("_name_or_path", "transformers_version", "skipdecode", "skipdecode_fit")


@dataclass(frozen=True)
class CostSource:
    """A cost model with the sizes and the type of the weights, and its origin as text."""

    cost: CostModel
    geometry: ModelGeometry
    dtype: str
    origin: str


def find_cost(
    model: Model,
    *,
    batch: int = 1,
    prompt_len: int = 64,
    remeasure: bool = False,
    until: float = math.inf,
    dtype: str = "auto",
    device: str | None = None,
    engine: str = "auto",
    quantization: str = "none",
) -> CostSource:
    """The cost model of a model on this machine, measured now (`measure_cost`) or by an earlier call.

    A model that is loaded is measured as it is, without its fit. With `remeasure`, an earlier measurement does not
    count. After `until`, of `time.perf_counter()`, fewer rounds are measured, and the result is not stored. The other
    options are those of `skipdecode.LLM`.

    Raises ModelLoadError if the model is unknown or does not load, UsageError if a value is not accepted.
    """
    checkpoint, loaded = open_checkpoint(model), loaded_of(model)
    if loaded is not None:
        dtype, device = str(loaded.model.dtype), str(loaded.model.device)
        is_own = dtype == str(getattr(checkpoint.config, "dtype", None))
        dtype = "auto" if is_own else dtype.removeprefix("torch.")
    target = choose_device(device)
    dtype = running_dtype(checkpoint, dtype, target, engine)
    key = _conditions(checkpoint, target, [dtype, engine, quantization, batch, prompt_len])
    file = cache_dir() / "costs" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    stored = None if remeasure else _stored(file, key)
    if stored is None:
        loaded = loaded or load_model(checkpoint, dtype=dtype, device=str(target), require_tokenizer=False)
        with temporary_fit(loaded.model, None):  # whose part of a step `CostModel.with_fit` counts
            backend = open_engines(loaded.model, engine, note, quantization, generation_config=False)
        cost = measure_cost(backend, batch=batch, prompt_len=prompt_len, until=until)
        dtype, origin = str(loaded.model.dtype).removeprefix("torch."), _measured_origin(backend, cost, target)
        if time.perf_counter() < until:
            document = {"cost": cost.to_dict(), "dtype": dtype, "origin": origin}
            with contextlib.suppress(OutputError):  # A cache that cannot be written costs the next call a measurement.
                write_whole(file, json.dumps({"key": key, "found": document}, indent=1))
    else:
        cost, dtype, origin = stored
    geometry = ModelGeometry.from_config(checkpoint.config, getattr(torch, dtype).itemsize)
    return CostSource(cost, geometry, dtype, origin)


def _conditions(checkpoint: Checkpoint, device: torch.device, options: list[str | int]) -> Any:
    """All that a measurement depends on, JSON-ready: model, options, kernels, machine, versions."""
    sizes = {name: value for name, value in checkpoint.config.to_dict().items() if name not in _VOLATILE}
    model = [json.dumps(sizes, sort_keys=True, default=str), checkpoint.adapter and str(checkpoint.adapter)]
    sources = b"".join(f.read_bytes() for f in sorted(Path(kernels.__file__).parent.glob("*.*")))
    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return [[options, model, FORMAT], hashlib.sha256(sources).hexdigest(), machine]


def _stored(file: Path, key: Any) -> tuple[CostModel, str, str] | None:
    """The cost, the type of the weights and the origin in a file; None if there is no such file, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, DataError):
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["key"] == key:
            document = data["found"]
            return CostModel.from_dict(document["cost"]), str(document["dtype"]), str(document["origin"])
    return None


def _measured_origin(backend: Backend, cost: CostModel, device: torch.device) -> str:
    """Describe where a measured cost is from."""
    residual = cost.residual or 0.0
    within = f", fit within {residual:.0%}"
    if residual > _NOISY:
        within += ": noisy, so measure again (remeasure) when the machine is quiet"
    where = f"threads: {torch.get_num_threads()}" if device.type == "cpu" else f"device: {device.type}"
    engine = "transformers" if backend.fast is None else "the fast engine"
    return f"measured here with {engine} ({where}{within})"


def read_cost(path: str | Path) -> CostModel:
    """The cost model in a JSON file, or in the output of skipdecode plan; raises DataError with the path."""
    values = read_json(Path(path))
    plan = values.get("cost") if isinstance(values, dict) else None
    try:
        return CostModel.from_dict(values if plan is None else plan)
    except DataError as e:
        raise DataError(f"{path}: {e}") from None
