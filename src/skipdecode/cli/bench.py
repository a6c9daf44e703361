"""Decoding speed of engines and schedules on a model, side by side, next to the limit that memory sets.

All run in one process, in turn; medians count. Only decode steps are timed, not prompts. A row tells tokens a second,
the speed-up over the same engine at full depth and over transformers, the bound that bytes set for that speed-up, and
the share of the memory's read bandwidth (measured in the same run) that was reached.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.bench.geometries import GEOMETRIES
from skipdecode.bench.workload import Workload
from skipdecode.cli.columns import table
from skipdecode.cli.options import option
from skipdecode.errors import OutputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Config", "run"]

_ENGINES = ("fast", "transformers", "gated")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `skipdecode bench`."""

    model: str | None = option("a local directory, a hub id, or smollm2-135m", positional=True, default=None)
    geometry: str | None = option(
        "instead of a model: these sizes with random weights", default=None, choices=tuple(GEOMETRIES)
    )
    dtype: str = option("of the weights", default="bfloat16", choices=("bfloat16", "float32"))
    batches: tuple[int, ...] = option("rows decoded together, one or more values", default=(1, 8))
    prompt: int = option("prompt tokens of a row", default=64)
    new: int = option("new tokens of a row", default=128)
    nominal: tuple[float, ...] = option("nominal speed-ups; 1, full depth, is always run", default=(1.0, 2.0, 3.0, 5.0))
    engines: tuple[str, ...] = option(
        "fast: the package's own; transformers: its generate, untouched, at full depth; gated: transformers under the "
        "schedules",
        default=("fast", "transformers"),
        choices=_ENGINES,
    )
    rounds: int = option("times that everything runs, in turn", default=3)
    threads: int | None = option("CPU threads (default: torch's choice)", default=None)
    out: str | None = option("file for the results as JSON", default=None)
    png: str | None = option("file for a picture: speed-up against nominal, and share of the bandwidth", default=None)


def run(config: Config) -> int:
    """Measure; returns 0."""
    workload = _checked(config)
    document = _measured(config, workload)
    if config.out is not None:
        _write(config.out, (json.dumps(document, indent=1) + "\n").encode())
    if config.png is not None:
        from skipdecode.plots import speed_png

        _write(config.png, speed_png(document["rows"]))
    print("\n".join(_page(document)))
    return 0


def _checked(config: Config) -> Workload:
    if (config.model is None) == (config.geometry is None):
        raise UsageError("what to measure is not clear: give either a model or --geometry")
    if config.threads is not None and config.threads < 1:
        raise UsageError(f"--threads {config.threads} is not accepted: give 1 or more")
    for name in (config.out, config.png):
        if name is not None and not Path(name).parent.is_dir():
            raise UsageError(f"the folder of {name} does not exist: make it, or name another")
    return Workload(config.batches, config.prompt, config.new, config.nominal, config.rounds)


def _measured(config: Config, workload: Workload) -> dict[str, Any]:
    import torch

    from skipdecode.bench.geometries import build
    from skipdecode.bench.measure import measure
    from skipdecode.bench.peers import make_peer
    from skipdecode.environment import environment
    from skipdecode.models.families import unwrap
    from skipdecode.models.hub import load_model

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.geometry is not None:
        model = build(config.geometry, getattr(torch, config.dtype))
    else:
        model = unwrap(load_model(str(config.model), dtype=config.dtype, require_tokenizer=False).model)
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and workload.prompt + workload.new > context:
        raise UsageError(f"--prompt {config.prompt} + --new {config.new} is more than the context of {context} tokens")
    peers = [make_peer(name, model) for name in dict.fromkeys(config.engines)]
    found = measure(model, peers, workload, progress=True)
    settings = {f.name: getattr(config, f.name) for f in fields(config)}
    return {"environment": environment(), "config": settings | {"command": _command(config)}} | found


def _command(config: Config) -> str:
    """The command line that gives this config."""
    words = ["skipdecode", "bench"]
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None or (field.default is not MISSING and value == field.default):
            continue
        values = value if isinstance(value, tuple) else (value,)
        words += [] if field.metadata["positional"] else [f"--{field.name}"]
        words += [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return shlex.join(words)


def _write(name: str, content: bytes) -> None:
    try:
        Path(name).write_bytes(content)
    except OSError as e:
        raise OutputError(f"cannot write {name}: {e.strerror or e}") from None


def _page(document: dict[str, Any]) -> Sequence[str]:
    header = ["engine", "batch", "nominal", "layers", "tokens/s", "speed-up", "bound", "x transformers", "of bandwidth"]
    rows = [
        [
            r["engine"],
            str(r["batch"]),
            f"{r['nominal_speedup']:g}x",
            f"{r['mean_layers']:.1f}",
            f"{r['decode_tokens_per_s']:.1f}",
            f"{r['decode_speedup']:.2f}x",
            f"{r['amdahl_bound']:.2f}x",
            "-" if r["speedup_over_transformers"] is None else f"{r['speedup_over_transformers']:.2f}",
            f"{r['roofline_share']:.0%}",
        ]
        for r in document["rows"]
    ]
    read = f"large read: {document['bandwidth_gb_s']:.1f} GB/s, {document['environment']['threads']} threads"
    return [*table(header, rows), "", read]
