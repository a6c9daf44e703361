"""Decoding speed of engines and schedules on a model, side by side, next to the limit that memory sets.

All run in one process, in turn; medians count. Only decode steps are timed, not prompts. A row tells tokens a second,
the speed-up over the same engine at full depth and over transformers, the bound that bytes set for that speed-up, and
the share of the memory's read bandwidth (measured in the same run) that was reached.
--profile says where the time of a step goes, as a table and as a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.bench_report import report
from skipdecode.cli.options.option import option
from skipdecode.cli.options.threads import ThreadOptions
from skipdecode.errors import OutputError, UsageError
from skipdecode.performance.bench.workload import DRAFTING, GEOMETRIES, PEERS, Workload, build

if TYPE_CHECKING:
    from skipdecode.performance.bench.peers import Peer

__all__ = ["Config", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ThreadOptions):
    """Options of `skipdecode bench`."""

    model: str | None = option("a local directory, a hub id, or smollm2-135m", positional=True, default=None)
    geometry: str | None = option(
        "instead of a model: these sizes with random weights", default=None, choices=tuple(GEOMETRIES)
    )
    dtype: str = option("of the weights", default="bfloat16", choices=("bfloat16", "float32"))
    device: str | None = option("torch device (default: the first GPU if there is one, else cpu)", default=None)
    batches: tuple[int, ...] = option("rows decoded together, one or more values", default=(1, 8))
    prompt: tuple[int, ...] = option("prompt tokens of a row, one or more values", default=(64,))
    new: int = option("new tokens of a row", default=128)
    nominal: tuple[float, ...] = option("nominal speed-ups; 1, full depth, is always run", default=(1.0, 2.0, 3.0, 5.0))
    engines: tuple[str, ...] = option(
        "fast, fast-int8, fast-int4: the package's own, with the model's weights or quantized ones; transformers, "
        "transformers-static: its generate, untouched, with its dynamic or a static cache; gated: transformers under "
        "the schedules; early-exit, prompt-lookup: transformers' drafting, one row, on a real text; llama.cpp-TYPE: "
        "llama.cpp with the same weights in that type (CPUs only); vllm: where installed. Only fast ones and gated run "
        "schedules, the others full depth",
        default=("fast", "transformers"),
        choices=PEERS,
    )
    exit_layer: int | None = option("layers that draft in early-exit (default: a quarter)", default=None)
    rounds: int = option("times that everything runs, in turn", default=3)
    out: str | None = option("file for the results as JSON", default=None)
    png: str | None = option(
        "file for a picture: speed-up and share of the bandwidth against nominal, step time against batch and prompt",
        default=None,
    )
    profile: str | None = option("file for a trace of decode steps; also prints where their time goes", default=None)


def run(config: Config) -> int:
    """Measure; returns 0."""
    workload = _checked(config)
    document, trace = _measured(config, workload)
    if config.profile is not None:
        _write(config.profile, json.dumps(trace | {"profile": document["profile"]}).encode())
    if config.out is not None:
        _write(config.out, (json.dumps(document, indent=1) + "\n").encode())
    if config.png is not None:
        from skipdecode.reporting.plots import speed_png

        _write(config.png, speed_png(document["rows"]))
    print("\n".join(report(document)))
    return 0


def _checked(config: Config) -> Workload:
    if (config.model is None) == (config.geometry is None):
        raise UsageError("what to measure is not clear: give either a model or --geometry")
    config.check_threads()
    for name in (config.out, config.png, config.profile):
        if name is not None and not Path(name).parent.is_dir():
            raise UsageError(f"the folder of {name} does not exist: make it, or name another")
    return Workload(config.batches, config.prompt, config.new, config.nominal, config.rounds)


def _measured(config: Config, workload: Workload) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results, and the trace of the profile, if one was asked for."""
    from skipdecode.common.environment import environment
    from skipdecode.performance.bench.measure import measure
    from skipdecode.performance.bench.profile import profile

    config.use_threads()
    model, peers = _peers(config, workload)
    layers = model.config.num_hidden_layers
    try:
        found = measure(peers, workload, layers, model.device, progress=True)
        settings = {f.name: getattr(config, f.name) for f in fields(config)}
        document = {"environment": environment(), "config": settings | {"command": _command(config)}} | found
        if config.profile is None:
            return document, {}
        steps = profile(peers, workload, layers, found["bandwidth_gb_s"] * 1e9)
        return document | {"profile": steps["rows"]}, {"traceEvents": steps["traceEvents"], "displayTimeUnit": "ms"}
    finally:
        for peer in peers:
            peer.close()


def _peers(config: Config, workload: Workload) -> tuple[Any, list[Peer]]:
    """The model, and the engines that are to run it."""
    import torch

    from skipdecode.models.families import unwrap
    from skipdecode.models.loading.hub import choose_device, load_model
    from skipdecode.performance.bench.peers import make_peer

    tokenizer = None
    if config.geometry is not None:
        model = build(config.geometry, getattr(torch, config.dtype), choose_device(config.device))
    else:
        loaded = load_model(str(config.model), dtype=config.dtype, device=config.device, require_tokenizer=False)
        model, tokenizer = unwrap(loaded.model), loaded.tokenizer
    context, longest = getattr(model.config, "max_position_embeddings", None), max(workload.prompts)
    if context is not None and longest + workload.new > context:
        raise UsageError(f"--prompt {longest} + --new {config.new} is more than the context of {context} tokens")
    names = dict.fromkeys(config.engines)
    text = _text(tokenizer) if tokenizer is not None and names.keys() & DRAFTING else None
    return model, [make_peer(name, model, text=text, exit_layer=config.exit_layer) for name in names]


def _text(tokenizer: Any) -> list[int]:
    """The demo's prompts, a line each: what drafting methods continue."""
    listed = json.loads(resources.files("skipdecode.cli").joinpath("demo_prompts.json").read_text(encoding="utf-8"))
    ids: list[int] = tokenizer("\n".join(prompt["text"] for prompt in listed))["input_ids"]
    return ids


def _command(config: Config) -> str:
    """The command line that gives this config."""
    words = ["skipdecode", "bench"]
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None or (field.default is not MISSING and value == field.default):
            continue
        values = value if isinstance(value, tuple) else (value,)
        words += [] if field.metadata["positional"] else ["--" + field.name.replace("_", "-")]
        words += [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return shlex.join(words)


def _write(name: str, content: bytes) -> None:
    try:
        Path(name).write_bytes(content)
    except OSError as e:
        raise OutputError(f"cannot write {name}: {e.strerror or e}") from None
