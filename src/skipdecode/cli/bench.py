"""Measure the decoding speed of engines and schedules on a model, next to the hardware limit.

All engines run in one process, in turn; results are medians. A row of the table has the speed-up of whole requests
(prompts included) over the same engine at full depth and over transformers at full depth; the same two speed-ups of the
steps after the prompt; their tokens per second; the bound on the decode speed-up by bytes; and the share of the limit
of a step that is reached. The limit is the larger of two times: bytes over the memory read bandwidth, and operations
over the rate of a large matrix product, both measured in the same run. --profile shows where the time of a step goes,
as a table and as a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.cli.arguments import command_line
from skipdecode.cli.options import BASE, MODEL, ThreadOptions
from skipdecode.cli.paths import OVERWRITE
from skipdecode.common.columns import figures
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.common.kinds import heading
from skipdecode.common.options import Reads, Writes, option
from skipdecode.data.prompts import context_length
from skipdecode.errors import UsageError
from skipdecode.models.families import layers_in
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.hub import choose_device, load_model
from skipdecode.models.loading.ref import ModelRef, model_files
from skipdecode.performance.bench.workload import ENGINES, GEOMETRIES, Workload, build

if TYPE_CHECKING:
    from skipdecode.engine.opening import Backend

Open = Callable[[str, Any], "Backend"]
"""Opens a backend from the name of an engine and a model."""


@dataclass(frozen=True, kw_only=True)
class Config(Workload, ThreadOptions):
    """Options of `skipdecode bench`."""

    NEEDS: ClassVar = {"base": ("model",)}

    model: str | None = option(MODEL, positional=True, default=None, path=Reads(model_files))
    base: str | None = option(BASE, default=None, path=Reads(model_files))
    geometry: str | None = option(
        "in place of a model: these sizes with random weights", default=None, choices=tuple(GEOMETRIES)
    )
    dtype: str = option("type of the weights", default="bfloat16", choices=("bfloat16", "float32"))
    device: str | None = option("torch device (default: the first GPU if there is one, else cpu)", default=None)
    engines: tuple[str, ...] = option(
        "fast, fast-int8, fast-int4, fast-w8a8: this package's engine, with the model's weights or quantized weights; "
        "transformers, transformers-static: transformers' generate with its dynamic or its static cache; gated: "
        "transformers with schedules. Only the fast engines and gated run schedules; the others run full depth",
        default=("fast", "transformers"),
        choices=ENGINES,
    )
    out: str | None = option("file for the results (JSON)", default=None, path=Writes())
    png: str | None = option(
        "file for a picture: speed-up and share of the limit against nominal speed-up, by batch size and prompt length",
        default=None,
        path=Writes(),
    )
    profile: str | None = option(
        "file for a trace of 16 decode steps; also prints a table of their times", default=None, path=Writes()
    )
    overwrite: bool = option(OVERWRITE, default=False)


def run(config: Config, open_backend: Open | None = None) -> int:
    """Measure the backends of `open_backend`, by default those of this package; returns 0."""
    ref = _checked(config)
    document, trace = _measured(config, ref, open_backend)
    if config.profile is not None:
        write_whole(config.profile, json.dumps(trace | {"profile": document["profile"]}))
    if config.out is not None:
        write_whole(config.out, json.dumps(document, indent=1) + "\n")
    if config.png is not None:
        from skipdecode.reporting.charts import png
        from skipdecode.reporting.plots import speed_figure

        write_whole(config.png, png(speed_figure(document["rows"])))
    print("\n".join(_report(document)))
    return 0


def _checked(config: Config) -> ModelRef | None:
    """The model, if it is given by name; refuses, before weights are loaded, what cannot be measured."""
    if (config.model is None) == (config.geometry is None):
        raise UsageError("give either a model or --geometry")
    if config.png is not None:
        from skipdecode.reporting.charts import check_matplotlib

        check_matplotlib()
    if config.model is None:
        return None
    ref = ModelRef(config.model, given_base=config.base)
    _check_fits(config, ref.config)
    return ref


def _check_fits(config: Config, model_config: Any) -> None:
    """Refuse lengths and nominal speed-ups that the model cannot have."""
    context, longest = context_length(model_config), max(config.prompt)
    if context is not None and longest + config.new > context:
        raise UsageError(f"--prompt {longest} + --new {config.new} is more than the context of {context} tokens")
    config.schedules(layers_in(model_config))


def _measured(config: Config, ref: ModelRef | None, open_backend: Open | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results, and the trace of --profile."""
    from skipdecode.performance.bench import measure
    from skipdecode.performance.bench.profile import profile

    config.use_threads()
    model = _model(config, ref)
    backends = [(open_backend or measure.open_backend)(name, model) for name in dict.fromkeys(config.engines)]
    try:
        found = measure.measure(backends, config, progress=True)
        settings = asdict(config) | {"command": command_line("bench", config)}
        document = heading("bench") | {"environment": environment(), "config": settings} | found
        if config.profile is None:
            return document, {}
        steps = profile(backends, config)
        return document | {"profile": steps["rows"]}, {"traceEvents": steps["traceEvents"], "displayTimeUnit": "ms"}
    finally:
        for backend in backends:
            backend.close()


def _model(config: Config, ref: ModelRef | None) -> Any:
    """The model; an adapter is merged into its weights."""
    import torch

    if ref is None:
        model = build(str(config.geometry), getattr(torch, config.dtype), choose_device(config.device))
        _check_fits(config, model.config)
        return model
    return merge_adapter(load_model(ref, dtype=config.dtype, device=config.device, require_tokenizer=False).model)


# ---------------------------------------------------------------------- report

_COLUMNS = {
    "engine": "{engine}",
    "batch": "{batch}",
    "prompt": "{prompt}",
    "nominal": "{nominal_speedup:g}x",
    "layers": "{mean_layers:.1f}",
    "request": "{request_speedup:.2f}x",
    "decode": "{decode_speedup:.2f}x",
    "tokens/s": "{decode_tokens_per_s:.1f}",
    "byte bound": "{amdahl_bound:.2f}x",
    "x transformers": "{speedup_over_transformers:.2f}x",
    "of limit": "{roofline_share:.0%}",
    "request x transformers": "{request_speedup_over_transformers:.2f}x",
    "ms/step": "{ms_per_step:.2f}",
    "MB/step": "{mb_per_step:.1f}",
    "limit": "{limit}",
}
_PROFILE = {
    "  part": "  {kind}",
    "ms/step": "{ms_per_step:.3f}",
    "share": "{share:.1%}",
    "calls/step": "{calls_per_step:.1f}",
    "us/call": "{us_per_call:.1f}",
}
_RUN = ("engine", "batch", "prompt", "nominal_speedup")


def _report(document: dict[str, Any]) -> list[str]:
    rows = [row | {"mb_per_step": row["bytes_per_step"] / 1e6} for row in document["rows"]]
    rates = "".join(f", products in {kind}: {rate:.0f} GFLOP/s" for kind, rate in document["products_gflop_s"].items())
    read = f"large read: {document['bandwidth_gb_s']:.1f} GB/s{rates}, {document['environment']['threads']} threads"
    lines = [*figures(_COLUMNS, rows), "", read]
    unprofiled = {tuple(r[k] for k in _RUN): r["ms_per_step"] for r in rows}
    parts: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in document.get("profile", ()):
        parts.setdefault(tuple(row[k] for k in _RUN), []).append(row)
    for (engine, batch, prompt, nominal), mine in parts.items():
        took = sum(r["ms_per_step"] for r in mine)
        name = f"{engine}, batch {batch}, prompt {prompt}, nominal {nominal:g}x"
        lines += ["", f"{name}: {took:.2f} ms a step ({unprofiled[engine, batch, prompt, nominal]:.2f} unprofiled)"]
        lines += figures(_PROFILE, mine, absent="")
    return lines
