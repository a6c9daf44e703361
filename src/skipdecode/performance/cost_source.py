"""The cost model of a model by name: measured if its weights are on this machine, else predicted from its config.

A measurement is kept in the cache directory, and later commands use it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from skipdecode.common.environment import cpu_model, usable_cores
from skipdecode.common.files import cache_dir, write_whole
from skipdecode.common.progress import note
from skipdecode.engine import kernels
from skipdecode.engine.loading import running_dtype
from skipdecode.engine.opening import Backend, open_engines
from skipdecode.errors import DataError, ModelLoadError, OutputError, UsageError
from skipdecode.models.families import FAMILIES, unwrap
from skipdecode.models.fit import keep_fit
from skipdecode.models.loading.hub import DTYPES, choose_device, load_model
from skipdecode.models.loading.ref import ModelRef, check_config_values
from skipdecode.performance.cost import FORMAT, CostModel
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.machine import measure_machine
from skipdecode.performance.measure import measure_cost

_NOISY = 0.1  # residual of a fit, above which a plan deserves a second measurement
_UNKNOWN_DTYPE = torch.bfloat16
# Of a config: no size depends on it.
_VOLATILE = (
    "_name_or_path",
    "transformers_version",
    "skipdecode",
    "skipdecode_fit",
)


@dataclass(frozen=True)
class CostSource:
    """A cost model with the sizes and the type of the weights, and its origin as text."""

    cost: CostModel
    geometry: ModelGeometry
    dtype: str
    origin: str


def find_cost(
    ref: ModelRef,
    *,
    batch: int = 1,
    prompt_len: int = 64,
    dtype: str = "auto",
    device: str | None = None,
    measure: bool | None = None,
    engine: str = "auto",
    quantization: str = "none",
    remeasure: bool = False,
) -> CostSource:
    """The cost model of a model by name on this machine; `measure_cost` describes the measurement.

    Parameters
    ----------
    ref : ModelRef
        A model, or the file of a config (JSON), which has no weights.
    dtype : str
        Of the weights, one of `skipdecode.models.loading.hub.DTYPES`; for "auto" see `running_dtype`, bf16 if unknown.
    device : str, optional
        A torch device; default: the first GPU if there is one, else the CPU.
    measure : bool, optional
        Load the weights and time decode steps, or predict from bytes and FLOPs. Default: measure if no download is
        needed.
    engine : {"auto", "fast", "transformers"}
        The engine that is timed; auto: the fast engine if it supports the model.
    quantization : {"none", "int8", "w8a8"}
        See `skipdecode.engine.opening.open_fast`.
    remeasure : bool
        Measure even if an earlier calibration was kept.

    Raises
    ------
    ModelLoadError
        If the model is unknown or does not load.
    UsageError
        If a value is not accepted, or a config file is to be measured.
    """
    if batch < 1:
        raise UsageError(f"batch={batch} is not accepted: give 1 or more")
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not accepted: give one of {', '.join(DTYPES)}")
    only_config = Path(ref.name).is_file()
    if remeasure and measure is False:
        raise UsageError("--remeasure and --no-measure exclude each other: give one")
    wanted = measure or remeasure
    if only_config and wanted:
        flag = "--measure" if measure else "--remeasure"
        raise UsageError(f"{ref.name} is a config without weights, so nothing can be measured: leave out {flag}")
    if wanted or (measure is None and not only_config and ref.has_weights()):
        target = choose_device(device)
        asked = running_dtype(ref, dtype, target, engine), engine, quantization, batch, prompt_len
        return _kept_or_measured(ref, target, asked, remeasure)
    if quantization != "none":
        raise UsageError(f"the cost of --quantization {quantization} is measured, not predicted: add --measure")
    return _predicted(ref, batch, dtype, device)


def _kept_or_measured(
    ref: ModelRef, device: torch.device, asked: tuple[str, str, str, int, int], remeasure: bool
) -> CostSource:
    """What an earlier call found for a model of these sizes, without its weights; else measured, and kept."""
    key = _key(ref, device, asked)
    path = cache_dir() / "costs" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"

    def source(found: Any) -> CostSource:
        cost, kind = CostModel.from_dict(found["cost"]), str(found["dtype"])
        return CostSource(cost, find_geometry(ref, kind, device)[0], kind, str(found["origin"]))

    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, DataError):  # A damaged file is as none.
        if not remeasure and (data := json.loads(path.read_text(encoding="utf-8")))["key"] == key:
            return source(data["found"])
    found = _measured(ref, device, *asked)
    with contextlib.suppress(OutputError):  # A cache that cannot be written costs the next call a measurement.
        write_whole(path, json.dumps({"key": key, "found": found}, indent=1))
    return source(found)


def _measured(
    ref: ModelRef, device: torch.device, dtype: str, engine: str, quantization: str, batch: int, prompt_len: int
) -> dict[str, Any]:
    """A new measurement, JSON-ready."""
    model = load_model(ref, dtype=dtype, device=str(device), require_tokenizer=False).model
    keep_fit(model, None)  # whose part of a step `CostModel.with_fit` counts
    backend = open_engines(model, engine, note, quantization)
    cost = measure_cost(backend, batch=batch, prompt_len=prompt_len, progress=True)
    kind, origin = _dtype_name(unwrap(model).dtype), _measured_origin(backend, cost, device)
    return {"cost": cost.to_dict(), "dtype": kind, "origin": origin}


def _key(ref: ModelRef, device: torch.device, asked: Any) -> Any:
    """All that a measurement depends on, JSON-ready: model, options, kernels, machine, versions."""
    sizes = {name: value for name, value in ref.config.to_dict().items() if name not in _VOLATILE}
    model = json.dumps(sizes, sort_keys=True, default=str), ref.adapter and str(ref.adapter)
    sources = b"".join(f.read_bytes() for f in sorted(Path(kernels.__file__).parent.glob("*.*")))
    here = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return json.loads(json.dumps([[asked, model, FORMAT], hashlib.sha256(sources).hexdigest(), here]))


def find_geometry(ref: ModelRef, dtype: str, device: torch.device) -> tuple[ModelGeometry, torch.dtype]:
    """The sizes of a model by name, and the dtype of its weights, from its config alone; see `find_cost`."""
    if (path := Path(ref.name)).is_file():
        config, chosen = _config_of_file(path), dtype
    else:
        config, chosen = ref.config, running_dtype(ref, dtype, device)
    kind = _dtype(config, chosen)
    return ModelGeometry.from_config(config, kind.itemsize), kind


def _measured_origin(backend: Backend, cost: CostModel, device: torch.device) -> str:
    """Where a measured cost is from, in words."""
    within = "" if cost.residual is None else f", fit within {cost.residual:.0%}"
    if cost.residual is not None and cost.residual > _NOISY:
        within += ": noisy, so use --remeasure when the machine is quiet"
    where = f"threads: {torch.get_num_threads()}" if device.type == "cpu" else f"device: {device.type}"
    engine = "transformers" if backend.fast is None else "the fast engine"
    return f"measured here with {engine} ({where}{within})"


def _predicted(ref: ModelRef, batch: int, dtype: str, device: str | None) -> CostSource:
    target = choose_device(device)
    geometry, kind = find_geometry(ref, dtype, target)
    machine = measure_machine(target, kind)
    cost = CostModel.predicted(geometry, machine, batch)
    origin = (
        f"predicted from bytes and FLOPs for an engine at the limit of this machine "
        f"({machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s, measured here)"
    )
    return CostSource(cost, geometry, _dtype_name(kind), origin)


def _dtype(config: Any, dtype: str) -> torch.dtype:
    if dtype != "auto":
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    own = getattr(config.get_text_config(decoder=True), "dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own.removeprefix("torch."), None)
    return own if isinstance(own, torch.dtype) else _UNKNOWN_DTYPE


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _config_of_file(path: Path) -> Any:
    """A config from a JSON file, with its family's defaults."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"{path} is not the JSON of a model's config: {e}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} is not a model's config: a JSON object is needed")
    check_config_values(str(path), values)
    family = values.get("model_type")
    if family not in CONFIG_MAPPING:
        raise ModelLoadError(
            f"{path} has the model_type {family!r}, which transformers does not know: accepted are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    try:
        return AutoConfig.for_model(**values)
    except Exception as e:  # Of many classes, all about the user's file.
        raise ModelLoadError(
            f"{path} does not load as the config of a {family}: {' '.join(str(e).split())[:300]}"
        ) from e
