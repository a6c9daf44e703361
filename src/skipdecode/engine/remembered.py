"""Measurements of this machine that later commands use again, such as the rates of its products.

They are small JSON files in the cache directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from skipdecode.common.environment import cpu_model, usable_cores
from skipdecode.common.files import cache_dir, write_whole
from skipdecode.common.stopwatch import timed
from skipdecode.engine import kernels
from skipdecode.engine.kernels import native_kernels
from skipdecode.engine.kernels.quantize import quantize
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.errors import DataError, OutputError

T = TypeVar("T")
_ROWS, _SIZE = 512, 1024
PRODUCT_FLOPS = 2 * _ROWS * _SIZE**2
_CPU, _KINDS, _ROUNDS = torch.device("cpu"), ("bfloat16", "float32"), 6


def remembered(
    folder: str, about: Any, device: Any, measure: Callable[[], Any], read: Callable[[Any], T], again: bool = False
) -> T:
    """What `read` makes of a measurement (JSON-ready) that an earlier call kept in `folder`, else of a new one.

    A kept one is for the same `about` (JSON-ready), kernels, machine and versions. A file is measured `again` if it is
    damaged: its data cannot be parsed, or `read` raises KeyError, TypeError, ValueError or DataError.
    """
    key = _key(about, device)
    path = cache_dir() / folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, DataError):
        if not again and (data := json.loads(path.read_text(encoding="utf-8")))["key"] == key:
            return read(data["found"])
    found = measure()
    with contextlib.suppress(OutputError):  # A cache that cannot be written costs the next call a measurement.
        write_whole(path, json.dumps({"key": key, "found": found}, indent=1))
    return read(found)


def _key(about: Any, device: Any) -> Any:
    sources = b"".join(f.read_bytes() for f in sorted(Path(kernels.__file__).parent.glob("*.*")))
    here = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return json.loads(json.dumps([about, hashlib.sha256(sources).hexdigest(), here]))


# ---------------------------------------------------------------------- products


def cpu_products(arithmetic: str) -> dict[str, Callable[[], object]]:
    """A product of 512 rows in torch ("transformers") and, if they run here, in the kernels ("fast").

    `arithmetic` is the type of the factors: the name of a torch dtype, or "w8a8" for bytes, which stands for bf16 on a
    CPU that does not multiply bytes.
    """
    dtype = torch.bfloat16 if arithmetic == "w8a8" else getattr(torch, arithmetic)
    # Random numbers, like a model's: products of constants take less power and run a little faster.
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(_ROWS, _SIZE, generator=random), torch.randn(_SIZE, _SIZE, generator=random).to(dtype)
    work: dict[str, Callable[[], object]] = {"transformers": partial(torch.nn.functional.linear, x.to(dtype), weight)}
    native, _ = native_kernels(_CPU, dtype)
    if native is not None:
        in_bytes = arithmetic == "w8a8" and native.multiplies_bytes
        call = native.linear(LinearSpec(quantize(weight, "w8a8") if in_bytes else weight))
        work["fast"] = partial(call, x, torch.empty(_ROWS, _SIZE), _ROWS, False)
    return work


def product_rates(engine: str = "fast") -> dict[str, float]:
    """Operations per second of an engine's products on this CPU, by type: bfloat16 and float32.

    They are measured once, in turn, in less than a second. Without kernels, "fast" is torch.
    """
    return remembered("products", engine, _CPU, partial(_measured, engine), _rates)


def _measured(engine: str) -> dict[str, float]:
    products = {kind: cpu_products(kind) for kind in _KINDS}
    work = {kind: each.get(engine, each["transformers"]) for kind, each in products.items()}
    rounds = [{kind: timed(each) for kind, each in work.items()} for _ in range(_ROUNDS)]
    return {kind: PRODUCT_FLOPS / min(each[kind] for each in rounds) for kind in _KINDS}


def _rates(found: dict[str, float]) -> dict[str, float]:
    return {kind: float(found[kind]) for kind in _KINDS}
