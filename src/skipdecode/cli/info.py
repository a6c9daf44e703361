"""Versions, devices and kernels of this machine; for a MODEL, its engine, schedule, fit and recipe.

Add the output of --json to a bug report. It has no host name and no user name, except in the path of the cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from skipdecode.cli.options import MODEL, NamedModel
from skipdecode.common.environment import environment
from skipdecode.common.jsonl import PREPARED_FILE, Json, prepared_use, read_json
from skipdecode.common.options import Reads, option
from skipdecode.common.tables import byte_size
from skipdecode.models.loading.checkpoint import Checkpoint, model_files, open_checkpoint


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel):
    follows_prepared: ClassVar = False
    NEEDS: ClassVar = {"base": ("model",), "revision": ("model",)}
    EXCLUDES: ClassVar = {"types": ("model",)}

    model: str = option(f"only this model: {MODEL}", default="", positional=True, path=Reads(model_files))
    types: bool = option("list the supported model types", default=False)
    json: bool = option("print one JSON document", default=False)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model of the name; of a directory of `prepare`, the model and the schedule that it recommends."""
        use = prepared_use(self.model)
        return open_checkpoint(use.get("model", self.model), self.base, [use.get("schedule")])


def run(config: Config) -> int:
    if config.model:
        report = _about(config)
    else:
        report = _types() if config.types else _machine()
    if config.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    width = max(map(len, report))
    print(*(f"{name:<{width}}  {value}" for name, value in report.items() if value is not None), sep="\n")
    return 0


def _about(config: Config) -> Json:
    """The facts about a model by name; None stands for what it does not have."""
    import torch
    from transformers import AutoModelForCausalLM

    from skipdecode.engine.model_reader import read_model
    from skipdecode.errors import UnfitModelError
    from skipdecode.generation.stats import schedule_line
    from skipdecode.models.families import decoder_layers, projection, projects
    from skipdecode.models.fit import Fit

    checkpoint = config.checkpoint
    settings = checkpoint.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    engine = "fast"
    try:
        read_model(model, positions=1)
    except UnfitModelError as e:
        engine = f"transformers ({e})"
    template = checkpoint.recipe.template
    return {
        "model": config.model,
        "model_type": settings.model_type,
        "num_layers": checkpoint.num_layers,
        # Whether a layer computes only keys and values for prompt tokens that it does not run, or queries too; null if
        # prompts have no sets.
        "projects_alone": projection(decoder_layers(model)[0], "q_proj") is not None if projects(settings) else None,
        "engine": engine,
        "base": checkpoint.base if checkpoint.adapter is not None else None,
        "schedule": None if checkpoint.schedule is None else schedule_line(checkpoint.schedule, "the checkpoint's own"),
        "tuned_under": ", ".join(schedule.name for schedule in checkpoint.tuned_under) or None,
        "template": None if template is None else template.text,
        "fit": None if checkpoint.fit is None else Fit.load(checkpoint.fit.file).describe(),
        "result": _result(config),
    }


def _result(config: Config) -> str | None:
    """The line on a model that `prepare` made: the use that it recommends, its speed, and the quality kept."""
    folders = [Path(config.model), config.checkpoint.own_folder.parent]
    file = next((path for folder in folders if (path := folder / PREPARED_FILE).is_file()), None)
    if file is None:
        return None
    document = read_json(file)
    faster = [row for row in document["rows"] if (row.get("request_speedup") or 0) > 1]
    figures = [f"{row['name']} {row['request_speedup']:.2f}x, keeps {row['kept']:.1%}" for row in faster if row["kept"]]
    use = ", ".join(f"{name} {value}" for name, value in document.get("use", {}).items())
    return f"{'; '.join(figures) or 'nothing is faster than full depth'}; recommended: {use}"


def _types() -> Json:
    from skipdecode.engine.model_reader import READERS
    from skipdecode.models.families import FAMILIES

    return {"fast engine": ", ".join(sorted(READERS)), "transformers": ", ".join(sorted(FAMILIES.keys() - READERS))}


def _machine() -> Json:
    import torch

    from skipdecode.common.files import cache_dir
    from skipdecode.engine.kernels.native import native_kernels
    from skipdecode.engine.kernels.targets import find_compiler
    from skipdecode.models.families import FAMILIES
    from skipdecode.models.loading import smollm2
    from skipdecode.models.loading.store import cached_models

    machine = environment()
    kernels, reason = native_kernels(torch.device("cpu"), torch.float32)
    products = ""
    if kernels is not None:
        weights = "int8, w8a8" if kernels.multiplies_bytes else "int8, no w8a8"
        products = f"{kernels.instructions}; {weights}"
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "commit": machine["commit"],
        "python": f"{machine['python']}, {machine['os']}",
        "packages": ", ".join(f"{name} {version}" for name, version in machine["packages"].items()),
        # With the widest vectors that torch uses here, such as AVX2.
        "cpu": f"{machine['cpu']}, {machine['cores']} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": machine["threads"],
        "memory": f"{machine['memory_gib']} GiB",
        "gpus": ", ".join(f"{gpu.name} ({byte_size(gpu.total_memory)})" for gpu in gpus) or "none",
        "CPU kernels": reason or products,
        "C++ compiler": find_compiler() or "none: install g++, or decoding is several times slower",
        "model types": f"{len(FAMILIES)}, listed by --types",
        "embedded model": f"{smollm2.NAME}: {smollm2.WHAT}",
        "cache": str(cache_dir()),
    } | {f"  {model['name']}": f"{byte_size(model['bytes'])}, {model['source']}" for model in cached_models()}
