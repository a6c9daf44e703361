"""Sections on speed: decoding against nominal, engines against the memory's bandwidth, the server under load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from skipdecode.reporting.page import Card, Picture, Section, table
from skipdecode.reporting.plots.lines import Chart, Point, Series
from skipdecode.reporting.plots.standard import share_chart, speed_chart
from skipdecode.reporting.sources import Source, of_kind

__all__ = ["BENCH", "bench_section", "decode_section", "load_section", "speed_cards"]

_DECODE = {
    "nominal": "{nominal_speedup:g}x",
    "layers": "{mean_layers:.1f}",
    "tokens/s": "{decode_tokens_per_s:.1f}",
    "measured": "{decode_speedup:.2f}x",
    "cost model": "{predicted_speedup:.2f}x",
}
BENCH = {
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
}
_LATENCIES = {"first_token_s": "first token", "between_chunks_s": "between chunks"}
_QUANTILES = ("p50", "p95", "p99")


def decode_section(source: Source) -> Section:
    """A result of benchmarks/decode_speed.py."""
    rows = source.data["rows"]
    tip = "{decode_speedup:.2f}x at nominal {nominal_speedup:g}x, {decode_tokens_per_s:.1f} tokens/s"
    points = [Point(r["nominal_speedup"], r["decode_speedup"], tip=tip.format_map(r)) for r in rows]
    predicted = [Point(r["nominal_speedup"], r["predicted_speedup"]) for r in rows]
    series = [Series("measured", points), Series("cost model", predicted, "--")]
    chart = Chart(series, "nominal speed-up", "decode speed-up", diagonal="nominal")
    words = ", ".join(f"{p.y:.2f}x at {p.x:g}x" for p in points)
    picture = Picture(chart, "Measured, and what the cost model says", f"Decode speed-up against nominal: {words}.")
    heading = f"Decoding through transformers: {_subject(source)}"
    return Section(heading, pictures=[picture], tables=[table(_made_by(source), rows, _DECODE)])


def bench_section(source: Source) -> Section:
    """A result of `skipdecode bench`."""
    rows = source.data["rows"]
    row_words = "{engine}, batch {batch}, nominal {nominal_speedup:g}x: "
    words = "; ".join((row_words + "{decode_speedup:.2f}x").format_map(r) for r in rows)
    best = (row_words + "{roofline_share:.0%}").format_map(max(rows, key=lambda r: float(r["roofline_share"])))
    skipping = {r["engine"] for r in rows if r["nominal_speedup"] > 1}
    pictures = [
        Picture(
            speed_chart([r for r in rows if r["engine"] in skipping] or rows),
            "Decode speed-up of each engine over itself at full depth; faint: what the bytes of the layers left allow",
            f"Decode speed-up against nominal: {words}",
        ),
        Picture(
            share_chart(rows),
            _limits(source),
            f"Share of a step's limit; the most is {best}.",
        ),
    ]
    heading = f"Engines: {_subject(source)}"
    columns = {name: form for name, form in BENCH.items() if name != "request" or rows[0].get("request_speedup")}
    return Section(heading, pictures=pictures, tables=[table(_made_by(source), rows, columns)])


def _limits(source: Source) -> str:
    """What 100% is; results of earlier versions know bytes alone."""
    read, rates = f"a large read, {source.data['bandwidth_gb_s']:.1f} GB/s", source.data.get("products_gflop_s")
    if not rates:
        return f"Bytes that a step must read over its time; 100%: {read}"
    large = ", ".join(f"{rate:.0f} GFLOP/s in {kind}" for kind, rate in rates.items())
    return (
        f"The longer of a step's bytes over {read}, and its operations over a large product's, {large}, over its time"
    )


def _subject(source: Source) -> str:
    config = source.data.get("config", {})
    return PurePath(str(config.get("model") or config.get("geometry") or source.name)).name


def _made_by(source: Source) -> str:
    command = source.data.get("config", {}).get("command")
    return f"{source.name}: {command}" if command else source.name


def speed_cards(sources: Sequence[Source]) -> list[Card]:
    """The best of each benchmark of speed alone."""
    cards = []
    for source in of_kind(sources, "bench"):
        over = [r for r in source.data["rows"] if r["nominal_speedup"] == 1 and r.get("speedup_over_transformers")]
        best = max(over, key=lambda r: float(r["speedup_over_transformers"]), default=None)
        if best is not None and best["speedup_over_transformers"] > 1:
            how = "{engine} engine, batch {batch}; quality is not measured here".format_map(best)
            answer = f"{best['speedup_over_transformers']:.1f}x", "transformers' decode speed at full depth", [how]
            cards.append(Card(f"Engine on {_subject(source)}", [answer], _machine(source)))
    for source in of_kind(sources, "decode-speed"):
        best = max(source.data["rows"], key=lambda r: float(r["decode_speedup"]))
        how = f"nominal {best['nominal_speedup']:g}x, through transformers; quality is not measured here"
        answer = f"{best['decode_speedup']:.2f}x", "decoding", [how]
        cards.append(Card(f"Speed of {_subject(source)}", [answer], _machine(source)))
    return cards


def _machine(source: Source) -> str:
    return str(source.data.get("environment", {}).get("cpu", ""))


def load_section(source: Source) -> Section:
    """A result of benchmarks/serve_load.py: throughput and latency by schedule, memory over time."""
    data, config = source.data, source.data.get("config", {})
    pictures = []
    if memory := data.get("memory_mib"):
        series = Series("", [Point(at, mib) for at, mib in memory], markers=False)
        chart = Chart([series], "seconds", "memory, MiB", from_zero=True)
        first, last = memory[0][1], memory[-1][1]
        label = f"Memory of the server over the run: {first:.0f} MiB at first, {last:.0f} MiB at the end."
        pictures.append(Picture(chart, label, label))
    intro = (
        f"{config.get('streams', '?')} clients at a time for {config.get('seconds', '?')} s, the schedules in turn: "
        f"{data['streams']} streams, {len(data['errors'])} errors, {data['streams_unlike_offline']} texts unlike the "
        f"offline ones. The schedule's throughput is {data['speedup']:.2f} times full depth's."
    )
    columns = {"schedule": "{name}", "tokens/s": "{tokens_per_s:.1f}", "streams": "{streams}"}
    columns |= {f"{text} {q}": f"{{{part}_{q}:.0f}} ms" for part, text in _LATENCIES.items() for q in _QUANTILES}
    rows = [{"name": name, **found, **_milliseconds(found)} for name, found in data["schedules"].items()]
    caption = f"{source.name}: medians over the phases; latency of every stream"
    heading = f"The server under load: {config.get('model', source.name)}"
    return Section(heading, intro, pictures=pictures, tables=[table(caption, rows, columns)])


def _milliseconds(found: Mapping[str, Any]) -> dict[str, float]:
    quantiles = {f"{part}_{q}": found[part].get(q) for part in _LATENCIES for q in _QUANTILES}
    return {name: 1000 * seconds for name, seconds in quantiles.items() if seconds is not None}
