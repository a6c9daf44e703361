"""Measurements of this machine that later commands use again: small JSON files in the cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from skipdecode.common.environment import cpu_model, usable_cores
from skipdecode.common.files import cache_dir, write_whole
from skipdecode.engine import kernels
from skipdecode.errors import DataError, OutputError

__all__ = ["remembered"]

T = TypeVar("T")


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
