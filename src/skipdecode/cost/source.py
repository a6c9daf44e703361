"""The measured cost of a model by name, kept in the cache directory for later commands."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

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
from skipdecode.errors import DataError, OutputError, UsageError
from skipdecode.models.families import layers_in, lent_last, projects, unwrap
from skipdecode.models.fit import temporary_fit
from skipdecode.models.loading.checkpoint import Checkpoint, Model, loaded_of, open_checkpoint
from skipdecode.models.loading.hub import DTYPES, choose_device, load_model
from skipdecode.schedule import Schedule

_NOISY = 0.1  # residual of a fit, above which a plan deserves a second measurement
# Of a config: no size depends on it.
_VOLATILE = ("_name_or_path", "transformers_version", "skipdecode", "skipdecode_fit")


@dataclass(frozen=True)
class CostSource:
    """A cost model with the sizes and the type of the weights, its origin as text, and the tokens of a prompt."""

    cost: CostModel
    geometry: ModelGeometry
    dtype: str
    origin: str
    prompt_len: int = 64


def find_cost(
    model: Model,
    *,
    batch: int = 1,
    prompt_len: int = 64,
    remeasure: bool = False,
    until: float = math.inf,
    **engine: Any,
) -> CostSource:
    """The cost model of a model on this machine, measured now (`measure_cost`) or by an earlier call.

    A model that is loaded is measured as it is, without its fit. With `remeasure`, an earlier measurement does not
    count. After `until`, of `time.perf_counter()`, fewer rounds are measured, and the result is not kept. The other
    options are those of `skipdecode.LLM`.

    Raises ModelLoadError if the model is unknown or does not load, UsageError if a value is not accepted.
    """
    checkpoint, loaded = open_checkpoint(model), loaded_of(model)
    loaded_model = None if loaded is None else loaded.model
    if loaded_model is not None:
        kind = str(loaded_model.dtype)
        kind = "auto" if kind == str(getattr(checkpoint.config, "dtype", None)) else kind.removeprefix("torch.")
        engine = {"dtype": kind, "device": str(loaded_model.device)} | engine
    cache = _Conditions.of(checkpoint, batch, prompt_len, **engine)
    if not remeasure and (stored := cache.kept()) is not None:
        return stored
    return cache.measured(loaded_model, until)


def solver_limits(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """Options of `solve` for a model with this config: the paper's order, and prompts, as far as its layers allow."""
    layers = layers_in(config)
    order = lent_last(config, Schedule.constant(layers, layers)).drop_order
    return {"drop_order": order, "prompt": "auto" if projects(config) else "full"}


@dataclass(frozen=True)
class _Conditions:
    """The conditions of a measurement, and the file that keeps it."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: str
    engine: str
    quantization: str
    batch: int
    prompt_len: int

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        batch: int,
        prompt_len: int,
        dtype: str = "auto",
        device: str | None = None,
        engine: str = "auto",
        quantization: str = "none",
    ) -> Self:
        if batch < 1:
            raise UsageError(f"batch={batch} is not accepted: give 1 or more")
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is not accepted: give one of {', '.join(DTYPES)}")
        target = choose_device(device)
        kind = running_dtype(checkpoint, dtype, target, engine)
        return cls(checkpoint, target, kind, engine, quantization, batch, prompt_len)

    @cached_property
    def key(self) -> Any:
        """All that a measurement depends on, JSON-ready: model, options, kernels, machine, versions."""
        options = self.dtype, self.engine, self.quantization, self.batch, self.prompt_len
        sizes = {name: value for name, value in self.checkpoint.config.to_dict().items() if name not in _VOLATILE}
        model = json.dumps(sizes, sort_keys=True, default=str), self.checkpoint.adapter and str(self.checkpoint.adapter)
        sources = b"".join(f.read_bytes() for f in sorted(Path(kernels.__file__).parent.glob("*.*")))
        on_gpu = self.device.type == "cuda"
        here = {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else self.device.type,
            "cpu": cpu_model(),
            "cores": usable_cores(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return json.loads(json.dumps([[options, model, FORMAT], hashlib.sha256(sources).hexdigest(), here]))

    @property
    def path(self) -> Path:
        return cache_dir() / "costs" / f"{hashlib.sha256(json.dumps(self.key).encode()).hexdigest()[:32]}.json"

    def kept(self) -> CostSource | None:
        """The measurement that is kept; None if there is none, or its file is damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, DataError):
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["key"] == self.key:
                return self.source(data["found"])
        return None

    def measured(self, model: transformers.PreTrainedModel | None = None, until: float = math.inf) -> CostSource:
        """A new measurement, which is kept; of a model that is loaded, if it is given."""
        if model is None:
            loaded = load_model(self.checkpoint, dtype=self.dtype, device=str(self.device), require_tokenizer=False)
            model = loaded.model
        with temporary_fit(model, None):  # whose part of a step `CostModel.with_fit` counts
            backend = open_engines(model, self.engine, note, self.quantization, generation_config=False)
        cost = measure_cost(backend, batch=self.batch, prompt_len=self.prompt_len, progress=True, until=until)
        kind, origin = str(unwrap(model).dtype).removeprefix("torch."), _measured_origin(backend, cost, self.device)
        document = {"cost": cost.to_dict(), "dtype": kind, "origin": origin}
        if time.perf_counter() < until:
            with contextlib.suppress(OutputError):  # A cache that cannot be written costs the next call a measurement.
                write_whole(self.path, json.dumps({"key": self.key, "found": document}, indent=1))
        return self.source(document)

    def source(self, document: Any) -> CostSource:
        """The cost of a measurement's JSON."""
        cost, kind = CostModel.from_dict(document["cost"]), str(document["dtype"])
        geometry = ModelGeometry.from_config(self.checkpoint.config, getattr(torch, kind).itemsize)
        return CostSource(cost, geometry, kind, str(document["origin"]), self.prompt_len)


def _measured_origin(backend: Backend, cost: CostModel, device: torch.device) -> str:
    """Describe where a measured cost is from."""
    within = "" if cost.residual is None else f", fit within {cost.residual:.0%}"
    if cost.residual is not None and cost.residual > _NOISY:
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
