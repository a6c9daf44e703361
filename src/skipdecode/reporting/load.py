"""Sections on the server under load: throughput and latency by schedule, memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.reporting.page import Picture, Section, Table
from skipdecode.reporting.plots import Point, Series, bar_figure, line_figure
from skipdecode.reporting.sources import Source, of_kind

__all__ = ["load_sections"]


def load_sections(sources: Sequence[Source]) -> list[Section]:
    """One for each result of benchmarks/serve_load.py."""
    return [_load(source) for source in of_kind(sources, "load")]


def _load(source: Source) -> Section:
    data, config = source.data, source.data.get("config", {})
    schedules: Mapping[str, Any] = data["schedules"]
    rates = [found["tokens_per_s"] for found in schedules.values()]
    words = "; ".join(f"{name}: {rate:.0f} tokens/s" for name, rate in zip(schedules, rates, strict=True))
    pictures = [
        Picture(
            bar_figure(list(schedules), rates, "tokens/s, all streams together"),
            f"Throughput; the schedule's is {data['speedup']:.2f} times full depth's",
            f"Throughput by schedule. {words}.",
        )
    ]
    if data.get("memory_mib"):
        pictures.append(_memory(data["memory_mib"]))
    intro = (
        f"{config.get('streams', '?')} clients at a time for {config.get('seconds', '?')} s, the schedules in turn: "
        f"{data['streams']} streams, {len(data['errors'])} errors, {data['streams_unlike_offline']} texts unlike the "
        "offline ones."
    )
    heading = f"The server under load: {config.get('model', source.name)}"
    return Section(heading, intro, pictures=pictures, tables=[_table(source.name, schedules)])


def _memory(memory: Sequence[Sequence[float]]) -> Picture:
    series = Series("", tuple(Point(at, mib) for at, mib in memory), markers=False)
    label = f"Memory of the server over the run: {memory[0][1]:.0f} MiB at first, {memory[-1][1]:.0f} MiB at the end."
    return Picture(line_figure([series], "seconds", "memory, MiB", from_zero=True), label, label)


def _table(name: str, schedules: Mapping[str, Any]) -> Table:
    parts = {"first_token_s": "first token", "between_chunks_s": "between chunks"}
    head = [
        "schedule",
        "tokens/s",
        "streams",
        *(f"{text} {q}" for text in parts.values() for q in ("p50", "p95", "p99")),
    ]
    rows = [
        [
            schedule,
            f"{found['tokens_per_s']:.1f}",
            str(found["streams"]),
            *(_milliseconds(found[part].get(q)) for part in parts for q in ("p50", "p95", "p99")),
        ]
        for schedule, found in schedules.items()
    ]
    return Table(f"{name}: medians over the phases; latency of every stream", head, rows)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.0f} ms"
