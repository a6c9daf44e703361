"""Versions, devices, families, cached models; of a MODEL, its engine, and if prompts can leave keys and values alone.

What to paste into a bug report. Names no host and no user, except in the path of the cache.
"""

from __future__ import annotations

import importlib.metadata
import json
import textwrap
from dataclasses import dataclass
from typing import Any

from skipdecode.cli.options import MODEL
from skipdecode.common.environment import environment, package_version
from skipdecode.common.options import Options, Reads, option
from skipdecode.models.loading.ref import model_files

__all__ = ["Config", "run"]

_NOT_FOR_USERS = "dev"


@dataclass(frozen=True)
class Config(Options):
    """Options of `skipdecode info`."""

    model: str | None = option(f"only this model: {MODEL}", default=None, positional=True, path=Reads(model_files))
    json: bool = option("print one JSON document", default=False)


def run(config: Config) -> int:
    """Print the report on stdout."""
    report, text = (_report(), _text) if config.model is None else (_about(config.model), _line)
    print(json.dumps(report, indent=2) if config.json else text(report))
    return 0


def _about(model: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from skipdecode.engine.model_spec import read_model
    from skipdecode.errors import UnfitModelError
    from skipdecode.models.families import decoder_layers
    from skipdecode.models.gate import query_projection
    from skipdecode.models.loading.ref import ModelRef

    config = ModelRef(model).config
    with torch.device("meta"):
        read = AutoModelForCausalLM.from_config(config)
    layers, engine = decoder_layers(read), "fast"
    alone = query_projection(layers[0]) is not None
    try:
        read_model(read, positions=1)
    except UnfitModelError as e:
        engine = f"transformers ({e})"
    about = {"model": model, "model_type": config.model_type, "num_layers": len(layers), "projects_alone": alone}
    return about | {"engine": engine}


def _line(about: dict[str, Any]) -> str:
    parts = "keys and values" if about["projects_alone"] else "queries, keys and values"
    head = "{model}: {model_type}, {num_layers} layers; engine {engine}".format_map(about)
    return f"{head}; a layer that prompts do not run makes {parts} of them, nothing else"


def _report() -> dict[str, Any]:
    import torch

    from skipdecode import __version__
    from skipdecode.common.files import cache_dir
    from skipdecode.engine.model_spec import READERS
    from skipdecode.models.families import FAMILIES
    from skipdecode.models.loading import smollm2
    from skipdecode.models.loading.hub import choose_device
    from skipdecode.models.loading.store import cached_models

    machine = environment()
    device = choose_device(None).type
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    models = [{"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source} for m in cached_models()]
    return {
        "skipdecode": __version__,
        "commit": machine["commit"],
        "python": machine["python"],
        "packages": machine["packages"],
        "extras": _extras(),
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
        "embedded_model": {"name": smollm2.NAME, "what": smollm2.WHAT, "dtype": smollm2.running_dtype(device)},
        "cache": {"path": str(cache_dir()), "models": models},
    }


def _extras() -> dict[str, dict[str, str | None]]:
    """For each optional extra, the version of each package it brings; None for an absent one."""
    from packaging.requirements import Requirement

    try:
        metadata = importlib.metadata.metadata("skipdecode")
    except importlib.metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    extras = sorted(set(metadata.get_all("Provides-Extra") or []) - {_NOT_FOR_USERS})
    brings = {e: [r.name for r in wanted if r.marker is not None and r.marker.evaluate({"extra": e})] for e in extras}
    return {extra: {name: package_version(name) for name in names} for extra, names in brings.items()}


def _text(report: dict[str, Any]) -> str:
    cpu, cache, packages = report["cpu"], report["cache"], report["packages"]
    versions = [
        f"python {report['python']}",
        *(f"{p} {v}" for p, v in packages.items() if p in ("torch", "transformers")),
    ]
    memory = "unknown memory" if cpu["memory_gib"] is None else f"{cpu['memory_gib']} GiB"
    lines = [
        f"skipdecode {report['skipdecode']}" + (f" ({report['commit'][:12]})" if report["commit"] else ""),
        "  " + ", ".join(versions) + f", {report['os']}",
        "extras",
        *(f"  {extra:<12} {_extra_line(extra, found)}" for extra, found in report["extras"].items()),
        "devices",
        f"  {'cpu':<12} {cpu['model']}, {cpu['cores']} cores ({cpu['torch_threads']} torch threads), "
        f"{cpu['simd']}, {memory}",
        *(f"  {f'cuda:{i}':<12} {g['name']}, {g['memory_gib']} GiB" for i, g in enumerate(report["gpus"])),
        *([] if report["gpus"] else ["  no GPU that torch can use"]),
        "supported families (model types)",
        *textwrap.wrap(", ".join(report["model_types"]), 100, initial_indent="  ", subsequent_indent="  "),
        f"  in the fast engine: {', '.join(report['fast_model_types'])}",
        "embedded model",
        *textwrap.wrap(
            "{name}: {what}; runs in {dtype} here (--dtype auto)".format_map(report["embedded_model"]),
            100,
            initial_indent="  ",
            subsequent_indent="  ",
        ),
        f"cached models in {cache['path']}",
        *(f"  {m['name']:<12} {m['bytes'] / 1e6:,.0f} MB, {m['source'] or 'source unknown'}" for m in cache["models"]),
        *([] if cache["models"] else ["  none yet"]),
    ]
    return "\n".join(lines)


def _extra_line(extra: str, found: dict[str, str | None]) -> str:
    if missing := [package for package, version in found.items() if version is None]:
        return f"absent: {', '.join(missing)} (pip install 'skipdecode[{extra}]')"
    return ", ".join(f"{package} {version}" for package, version in found.items())
