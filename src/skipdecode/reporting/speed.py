"""The section on speed: engines, their speed-up against nominal and against the memory's bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from skipdecode.reporting.page import Card, Picture, Section, table
from skipdecode.reporting.plots.standard import share_chart, speed_chart
from skipdecode.reporting.sources import Source, of_kind

__all__ = ["BENCH", "bench_section", "speed_cards"]

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
    return cards


def _machine(source: Source) -> str:
    return str(source.data.get("environment", {}).get("cpu", ""))
