"""Sections on speed: measured against nominal, the share of the memory's bandwidth, rows in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from skipdecode.reporting.outcomes import Outcome, by_data, outcomes_of
from skipdecode.reporting.page import Picture, Section, Table, Tile
from skipdecode.reporting.plots import Point, Series, line_figure, share_figure, speed_figure
from skipdecode.reporting.sources import Source, of_kind

__all__ = ["speed_sections", "speed_tiles"]


def speed_sections(sources: Sequence[Source]) -> list[Section]:
    """Measured runs of a task, then each benchmark."""
    sections = [_outcomes(group) for group in by_data(outcomes_of(sources))]
    sections += [_decode(source) for source in of_kind(sources, "decode")]
    return sections + [_bench(source) for source in of_kind(sources, "bench")]


def _outcomes(group: Sequence[Outcome]) -> Section:
    curves: dict[str, list[Point]] = {}
    for o in group:
        if not o.full and o.nominal is not None and o.speed is not None:
            tip = f"{o.name}: {o.speed.text('{:.2f}')}x measured at {o.nominal:.2f}x nominal"
            curves.setdefault(o.curve, []).append(Point(o.nominal, o.speed.value, y_bounds=o.speed.bounds, tip=tip))
    if not curves:
        return Section("Speed-up")
    series = [Series(name, tuple(points)) for name, points in curves.items()]
    figure = line_figure(series, "nominal speed-up", "measured speed-up", diagonal="nominal")
    words = "; ".join(f"{n}: " + ", ".join(f"{p.y:.2f}x at {p.x:.1f}x" for p in ps) for n, ps in curves.items())
    picture = Picture(figure, "What a nominal speed-up is worth in decoding time", f"Measured against nominal. {words}")
    note = "Embeddings, the output head and attention do not shrink with the layers, so less than nominal is gained."
    return Section(f"Speed-up against nominal: {group[0].task}", note, pictures=[picture])


def _decode(source: Source) -> Section:
    rows = source.data["rows"]
    measured = Series("measured", tuple(_decode_point(r) for r in rows))
    predicted = tuple(Point(r["nominal_speedup"], r["predicted_speedup"]) for r in rows)
    series = [measured, Series("cost model", predicted, "--")]
    figure = line_figure(series, "nominal speed-up", "decode speed-up", diagonal="nominal")
    words = ", ".join(f"{r['decode_speedup']:.2f}x at {r['nominal_speedup']:g}x" for r in rows)
    label = f"Decode speed-up against nominal: {words}."
    table = Table(
        _made_by(source),
        ["nominal", "layers", "tokens/s", "measured", "cost model"],
        [
            [
                f"{r['nominal_speedup']:g}x",
                f"{r['mean_layers']:.1f}",
                f"{r['decode_tokens_per_s']:.1f}",
                f"{r['decode_speedup']:.2f}x",
                f"{r['predicted_speedup']:.2f}x",
            ]
            for r in rows
        ],
    )
    heading = f"Decoding through transformers: {_subject(source)}"
    return Section(heading, pictures=[Picture(figure, "Measured, and what the cost model says", label)], tables=[table])


def _decode_point(row: Mapping[str, Any]) -> Point:
    return Point(
        row["nominal_speedup"],
        row["decode_speedup"],
        tip=f"{row['decode_speedup']:.2f}x at nominal {row['nominal_speedup']:g}x, {row['decode_tokens_per_s']:.1f} "
        "tokens/s",
    )


def _bench(source: Source) -> Section:
    rows = source.data["rows"]
    best = max(rows, key=lambda r: float(r["roofline_share"]))
    pictures = [
        Picture(
            speed_figure(rows),
            "Decode speed-up of each engine over itself at full depth; faint: what the bytes of the layers left allow",
            "Decode speed-up against nominal: " + "; ".join(_words(r, f"{r['decode_speedup']:.2f}x") for r in rows),
        ),
        Picture(
            share_figure(rows),
            f"Bytes that a step must read over its time; 100%: a large read, {source.data['bandwidth_gb_s']:.1f} GB/s",
            f"Share of the read bandwidth; the most is {_words(best, format(best['roofline_share'], '.0%'))}.",
        ),
    ]
    head = ["engine", "batch", "prompt", "nominal", "layers", "tokens/s", "speed-up", "byte bound", "x transformers"]
    table = Table(_made_by(source), [*head, "of bandwidth"], [_bench_cells(r) for r in rows])
    return Section(f"Engines: {_subject(source)}", pictures=pictures, tables=[table])


def _words(row: Mapping[str, Any], value: str) -> str:
    return f"{row['engine']}, batch {row['batch']}, nominal {row['nominal_speedup']:g}x: {value}"


def _bench_cells(row: Mapping[str, Any]) -> list[str]:
    bound, over = row.get("amdahl_bound"), row.get("speedup_over_transformers")
    return [
        row["engine"],
        str(row["batch"]),
        str(row.get("prompt", "–")),
        f"{row['nominal_speedup']:g}x",
        f"{row['mean_layers']:.1f}",
        f"{row['decode_tokens_per_s']:.1f}",
        f"{row['decode_speedup']:.2f}x",
        "–" if bound is None else f"{bound:.2f}x",
        "–" if over is None else f"{over:.2f}x",
        f"{row['roofline_share']:.0%}",
    ]


def _subject(source: Source) -> str:
    config = source.data.get("config", {})
    return PurePath(str(config.get("model") or config.get("geometry") or source.name)).name


def _made_by(source: Source) -> str:
    command = source.data.get("config", {}).get("command")
    return f"{source.name}: {command}" if command else source.name


def speed_tiles(sources: Sequence[Source]) -> list[Tile]:
    """The best of each kind of benchmark."""
    tiles = []
    rows = [(s, r) for s in of_kind(sources, "bench") for r in s.data["rows"] if r.get("speedup_over_transformers")]
    rows = [(s, r) for s, r in rows if r["nominal_speedup"] == 1 and r["speedup_over_transformers"] > 1]
    if rows:
        source, best = max(rows, key=lambda entry: float(entry[1]["speedup_over_transformers"]))
        where = f"batch {best['batch']}, {_subject(source)}"
        tiles.append(
            Tile(
                f"{best['speedup_over_transformers']:.1f}x",
                f"transformers' decode speed at full depth with the {best['engine']} engine ({where})",
            )
        )
    decoded = [(s, r) for s in of_kind(sources, "decode") for r in s.data["rows"]]
    if decoded:
        source, best = max(decoded, key=lambda entry: float(entry[1]["decode_speedup"]))
        text = f"measured in decoding at nominal {best['nominal_speedup']:g}x ({_subject(source)}, transformers)"
        tiles.append(Tile(f"{best['decode_speedup']:.2f}x", text))
    return tiles
