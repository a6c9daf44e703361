"""The measured cost of a model by name, kept in the cache directory for later commands; and what it solves."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from skipdecode.cost.solve import SPREAD, solve
from skipdecode.engine import kernels
from skipdecode.engine.opening import Backend, open_engines, running_dtype
from skipdecode.errors import DataError, OutputError, ScheduleError, UsageError
from skipdecode.models.families import layers_in, lent_last, projects, unwrap
from skipdecode.models.fit import Fit, keep_fit, own_fit_kept
from skipdecode.models.loading.hub import DTYPES, LoadedModel, Model, choose_device, load_model, ref_of
from skipdecode.models.loading.ref import ModelRef
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
    model: Model, *, batch: int = 1, prompt_len: int = 64, remeasure: bool = False, **engine: Any
) -> CostSource:
    """The cost model of a model on this machine, measured now (`measure_cost`) or by an earlier call.

    A model that is loaded is measured as it is, without its fit. With `remeasure`, an earlier measurement does not
    count. The other options are those of `skipdecode.LLM`.

    Raises ModelLoadError if the model is unknown or does not load, UsageError if a value is not accepted.
    """
    ref, loaded = ref_of(model), getattr(model, "loaded", model)
    given = loaded.model if isinstance(loaded, LoadedModel) else None
    if given is not None:
        kind = str(given.dtype)
        kind = "auto" if kind == str(getattr(ref.config, "dtype", None)) else kind.removeprefix("torch.")
        engine = {"dtype": kind, "device": str(given.device)} | engine
    place = _Place.of(ref, batch, prompt_len, **engine)
    if not remeasure and (found := place.kept()) is not None:
        return found
    return place.measured(given)


def kept_cost(ref: ModelRef, **engine: Any) -> CostSource | None:
    """The newest cost that an earlier `find_cost` kept for this model; None if there is none. Loads no weights."""
    place = _Place.of(ref, 1, 1, **engine)
    for path in sorted((cache_dir() / "costs").glob("*.json"), key=os.path.getmtime, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, DataError, UsageError):
            data = json.loads(path.read_text(encoding="utf-8"))
            (asked, *model), *here = data["key"]
            if [[[*asked[:3], *place.key[0][0][3:]], *model], *here] == place.key:
                return replace(place, batch=asked[3], prompt_len=asked[4]).source(data["found"])
    return None


def wall_solver(
    ref: ModelRef, seq_len: int, carried: Schedule | None = None, **engine: Any
) -> Callable[[float], Schedule]:
    """What makes the schedule for a wall-clock speed-up of whole requests, for `parse_schedule`.

    The cost is the newest one that was measured for the model on this machine, with its batch and prompt length; a fit
    of the checkpoint is counted. The drop order, positions and prompts are those of `carried`, if it has a drop order.

    `seq_len`: generation positions over which the depth decreases, unless `carried` has a drop order. `engine`: as for
    `find_cost`.
    """

    def solved(target: float) -> Schedule:
        source = kept_cost(ref, **engine)
        if source is None:
            raise ScheduleError(
                f"{target:g}x-wall needs times that were measured on this machine, and there are none for {ref.name}: "
                f"run skipdecode plan {ref.name} for this speed-up first"
            )
        cost = source.cost
        if (file := ref.fit) is not None:
            fit = Fit.load(file)
            cost = cost.with_fit(source.geometry, fit.rank, fit.taps)
        if carried is None or not carried.drop_order:
            return solve(cost, target, seq_len, prompt_len=source.prompt_len, **solver_limits(ref.config))
        found = solve(
            cost,
            target,
            carried.seq_len if carried.seq_len > 1 else seq_len,
            prompt=carried.prompt,
            warmup_layers=carried.warmup_layers,
            spread=0.0 if carried.is_flat else SPREAD,
            drop_order=carried.drop_order,
            prompt_len=source.prompt_len,
        )
        return replace(found, family=carried.family)

    return solved


def solver_limits(config: Any) -> dict[str, Any]:
    """Options of `solve` for a model with this config: the paper's order, and prompts, as far as its layers allow."""
    layers = layers_in(config)
    order = lent_last(config, Schedule.constant(layers, layers)).drop_order
    return {"drop_order": order, "prompt": "auto" if projects(config) else "full"}


@dataclass(frozen=True)
class _Place:
    """What a measurement is made of, and where it is kept."""

    ref: ModelRef
    device: torch.device
    dtype: str
    engine: str
    quantization: str
    batch: int
    prompt_len: int

    @classmethod
    def of(
        cls,
        ref: ModelRef,
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
        return cls(ref, target, running_dtype(ref, dtype, target, engine), engine, quantization, batch, prompt_len)

    @cached_property
    def key(self) -> Any:
        """All that a measurement depends on, JSON-ready: model, options, kernels, machine, versions."""
        asked = self.dtype, self.engine, self.quantization, self.batch, self.prompt_len
        sizes = {name: value for name, value in self.ref.config.to_dict().items() if name not in _VOLATILE}
        model = json.dumps(sizes, sort_keys=True, default=str), self.ref.adapter and str(self.ref.adapter)
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
        return json.loads(json.dumps([[asked, model, FORMAT], hashlib.sha256(sources).hexdigest(), here]))

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

    def measured(self, model: Any = None) -> CostSource:
        """A new measurement, which is kept; of a model that is loaded, if it is given."""
        if model is None:
            model = load_model(self.ref, dtype=self.dtype, device=str(self.device), require_tokenizer=False).model
        with own_fit_kept(model):
            keep_fit(model, None)  # whose part of a step `CostModel.with_fit` counts
            backend = open_engines(model, self.engine, note, self.quantization, generation_config=False)
        cost = measure_cost(backend, batch=self.batch, prompt_len=self.prompt_len, progress=True)
        kind, origin = str(unwrap(model).dtype).removeprefix("torch."), _measured_origin(backend, cost, self.device)
        found = {"cost": cost.to_dict(), "dtype": kind, "origin": origin}
        with contextlib.suppress(OutputError):  # A cache that cannot be written costs the next call a measurement.
            write_whole(self.path, json.dumps({"key": self.key, "found": found}, indent=1))
        return self.source(found)

    def source(self, found: Any) -> CostSource:
        """The cost of a measurement's JSON."""
        cost, kind = CostModel.from_dict(found["cost"]), str(found["dtype"])
        geometry = ModelGeometry.from_config(self.ref.config, getattr(torch, kind).itemsize)
        return CostSource(cost, geometry, kind, str(found["origin"]), self.prompt_len)


def _measured_origin(backend: Backend, cost: CostModel, device: torch.device) -> str:
    """Where a measured cost is from, in words."""
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
