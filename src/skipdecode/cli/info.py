"""Versions, devices, supported model types and cached models; for a MODEL, the engine that runs it.

Add the output to a bug report. It has no host name and no user name, except in the path of the cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.cli.options import BASE, MODEL
from skipdecode.common.environment import environment, limit_threads
from skipdecode.common.options import Options, Reads, option
from skipdecode.models.loading.ref import model_files


@dataclass(frozen=True)
class Config(Options):
    """Options of `skipdecode info`."""

    NEEDS: ClassVar = {"base": ("model",)}

    model: str | None = option(f"only this model: {MODEL}", default=None, positional=True, path=Reads(model_files))
    base: str | None = option(BASE, default=None, path=Reads(model_files))


def run(config: Config) -> int:
    """Print the report as JSON."""
    report = _report() if config.model is None else _about(config.model, config.base)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    return 0


def _about(model: str, base: str | None) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from skipdecode.engine.model_spec import read_model
    from skipdecode.errors import UnfitModelError
    from skipdecode.models.families import decoder_layers, projection, projects
    from skipdecode.models.loading.ref import ModelRef

    config = ModelRef(model, given_base=base).config
    with torch.device("meta"):
        read = AutoModelForCausalLM.from_config(config)
    layers, engine = decoder_layers(read), "fast"
    try:
        read_model(read, positions=1)
    except UnfitModelError as e:
        engine = f"transformers ({e})"
    return {
        "model": model,
        "model_type": config.model_type,
        "num_layers": len(layers),
        # Whether a layer computes only keys and values for prompt tokens that it does not run, or queries too; null if
        # prompts have no sets.
        "projects_alone": projection(layers[0], "q_proj") is not None if projects(config) else None,
        "engine": engine,
    }


def _report() -> dict[str, Any]:
    import torch

    from skipdecode import __version__
    from skipdecode.common.files import cache_dir
    from skipdecode.engine.model_spec import READERS
    from skipdecode.models.families import FAMILIES
    from skipdecode.models.loading import smollm2
    from skipdecode.models.loading.beside import cached_models

    limit_threads()
    machine = environment()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "skipdecode": __version__,
        "commit": machine["commit"],
        "python": machine["python"],
        "packages": machine["packages"],
        "os": machine["os"],
        "cpu": {
            "model": machine["cpu"],
            "cores": machine["cores"],
            "torch_threads": machine["threads"],
            "simd": torch.backends.cpu.get_cpu_capability(),  # the widest vectors that torch uses here, such as AVX2
            "memory_gib": machine["memory_gib"],
        },
        "gpus": [{"name": g.name, "memory_gib": round(g.total_memory / 2**30, 1)} for g in gpus],
        "model_types": sorted(FAMILIES),
        "fast_model_types": sorted(READERS),
        "embedded_model": {"name": smollm2.NAME, "what": smollm2.WHAT},
        "cache": {"path": str(cache_dir()), "models": cached_models()},
    }
