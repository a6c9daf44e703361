"""Decoding speed of engines and schedules on a model, side by side, next to the limit that the machine sets.

All run in one process, in turn; medians count. A row tells the speed-up of whole requests, prompts included, over the
same engine at full depth and over transformers at full depth; then the same two of the steps after the prompt, their
tokens a second, the bound that bytes set for their speed-up, and the share of a step's limit that was reached: the
longer of its bytes over the memory's read bandwidth and its operations over the rate of a large product, both measured
in the same run.
--profile says where the time of a step goes, as a table and as a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from skipdecode.cli.arguments import command_line
from skipdecode.cli.columns import figures
from skipdecode.cli.options import MODEL, ThreadOptions
from skipdecode.cli.paths import OVERWRITE
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.common.kinds import heading
from skipdecode.common.options import Reads, Writes, option
from skipdecode.data.prompts import context_length
from skipdecode.errors import UsageError
from skipdecode.models.families import layers_in
from skipdecode.models.loading.hub import choose_device, load_model
from skipdecode.models.loading.ref import ModelRef, model_files
from skipdecode.performance.bench.workload import ENGINES, GEOMETRIES, Workload, build

if TYPE_CHECKING:
    from skipdecode.engine.opening import Backend

Open = Callable[[str, Any], "Backend"]
"""From the name of an engine and a model to its backend."""

__all__ = ["Config", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(Workload, ThreadOptions):
    """Options of `skipdecode bench`."""

    model: str | None = option(MODEL, positional=True, default=None, path=Reads(model_files))
    geometry: str | None = option(
        "instead of a model: these sizes with random weights", default=None, choices=tuple(GEOMETRIES)
    )
    dtype: str = option("of the weights", default="bfloat16", choices=("bfloat16", "float32"))
    device: str | None = option("torch device (default: the first GPU if there is one, else cpu)", default=None)
    engines: tuple[str, ...] = option(
        "fast, fast-int8, fast-int4, fast-w8a8: the package's own, with the model's weights or quantized ones; "
        "transformers, transformers-static: its generate, untouched, with its dynamic or a static cache; gated: "
        "transformers under the schedules. Only fast ones and gated run schedules, the others full depth",
        default=("fast", "transformers"),
        choices=ENGINES,
    )
    out: str | None = option("file for the results as JSON", default=None, path=Writes())
    png: str | None = option(
        "file for a picture: speed-up and share of the limit against nominal, for each batch and prompt",
        default=None,
        path=Writes(),
    )
    profile: str | None = option(
        "file for a trace of 16 decode steps; also prints where their time goes", default=None, path=Writes()
    )
    overwrite: bool = option(OVERWRITE, default=False)


def run(config: Config, open_backend: Open | None = None) -> int:
    """Measure what `open_backend` opens, by default the package's own backends; returns 0."""
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
    """The model, where it is one by name; refuses, before weights are loaded, what cannot be measured."""
    if (config.model is None) == (config.geometry is None):
        raise UsageError("what to measure is not clear: give either a model or --geometry")
    if config.png is not None:
        from skipdecode.reporting.charts import check_matplotlib

        check_matplotlib()
    if config.model is None:
        return None
    ref = ModelRef(config.model)
    _check_fits(config, ref.config)
    return ref


def _check_fits(config: Config, model_config: Any) -> None:
    """Refuse texts and nominal speed-ups that the model does not have room for."""
    context, longest = context_length(model_config), max(config.prompt)
    if context is not None and longest + config.new > context:
        raise UsageError(f"--prompt {longest} + --new {config.new} is more than the context of {context} tokens")
    config.schedules(layers_in(model_config))


def _measured(config: Config, ref: ModelRef | None, open_backend: Open | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results, and the trace of the profile, if one was asked for."""
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
    model = load_model(ref, dtype=config.dtype, device=config.device, require_tokenizer=False).model
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


# ---------------------------------------------------------------------- report

_BESIDE_REPORT = {
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
    from skipdecode.reporting.contents import BENCH

    rows = [row | {"mb_per_step": row["bytes_per_step"] / 1e6} for row in document["rows"]]
    rates = "".join(f", products in {kind}: {rate:.0f} GFLOP/s" for kind, rate in document["products_gflop_s"].items())
    read = f"large read: {document['bandwidth_gb_s']:.1f} GB/s{rates}, {document['environment']['threads']} threads"
    lines = [*figures(BENCH | _BESIDE_REPORT, rows), "", read]
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
