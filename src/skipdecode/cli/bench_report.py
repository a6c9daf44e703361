"""What `skipdecode bench` prints: its rows as a table, the profile as another, and what needs a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipdecode.cli.columns import table

__all__ = ["report"]


def report(document: dict[str, Any]) -> list[str]:
    """The lines for a `skipdecode bench` document."""
    read = f"large read: {document['bandwidth_gb_s']:.1f} GB/s, {document['environment']['threads']} threads"
    lines = [*_speed(document["rows"]), "", read, *document["notes"]]
    if "profile" in document:
        lines += ["", *_profile(document["profile"], document["rows"])]
    return lines


def _speed(rows: Sequence[dict[str, Any]]) -> list[str]:
    header = ["engine", "batch", "prompt", "nominal", "layers", "tokens/s", "ms/step", "speed-up", "bound"]
    header += ["x transformers", "MB/step", "of bandwidth"]
    cells = [
        [
            r["engine"],
            str(r["batch"]),
            str(r["prompt"]),
            f"{r['nominal_speedup']:g}x",
            f"{r['mean_layers']:.1f}",
            f"{r['decode_tokens_per_s']:.1f}",
            f"{r['ms_per_step']:.2f}",
            f"{r['decode_speedup']:.2f}x",
            f"{r['amdahl_bound']:.2f}x",
            "-" if r["speedup_over_transformers"] is None else f"{r['speedup_over_transformers']:.2f}",
            f"{r['bytes_per_step'] / 1e6:.1f}",
            f"{r['roofline_share']:.0%}",
        ]
        for r in rows
    ]
    return table(header, cells)


def _profile(rows: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each run, with its time a step, and that without the profiler in the way."""
    keys = ("engine", "batch", "prompt", "nominal_speedup")
    plain = {tuple(r[k] for k in keys): r["ms_per_step"] for r in measured}
    lines: list[str] = []
    for run in dict.fromkeys(tuple(r[k] for k in keys) for r in rows):
        mine = [r for r in rows if tuple(r[k] for k in keys) == run]
        engine, batch, prompt, nominal = run
        took = sum(r["ms_per_step"] for r in mine)
        lines.append(
            f"{engine}, batch {batch}, prompt {prompt}, nominal {nominal:g}x: {took:.2f} ms a step "
            f"({plain[run]:.2f} unprofiled)"
        )
        header = ["  part", "ms/step", "share", "calls/step", "us/call", "GB/s", "of bandwidth"]
        cells = [
            [
                f"  {r['kind']}",
                f"{r['ms_per_step']:.3f}",
                f"{r['share']:.1%}",
                f"{r['calls_per_step']:.1f}",
                "" if r["us_per_call"] is None else f"{r['us_per_call']:.1f}",
                "" if r["gb_per_s"] is None else f"{r['gb_per_s']:.1f}",
                "" if r["bandwidth_share"] is None else f"{r['bandwidth_share']:.0%}",
            ]
            for r in mine
        ]
        lines += [*table(header, cells), ""]
    return lines[:-1]
