"""Sections on tuning: loss curves."""

from __future__ import annotations

from collections.abc import Sequence

from skipdecode.reporting.page import Picture, Section, Table
from skipdecode.reporting.plots import loss_figure
from skipdecode.reporting.sources import Source, of_kind

__all__ = ["training_section"]


def training_section(sources: Sequence[Source]) -> Section:
    """The loss curve of every log."""
    logs = of_kind(sources, "tuning")
    intro = "Thin lines are single steps. A schedule that is sampled now and then has a line of its own."
    return Section("Loss while tuning", intro, pictures=[_curve(log) for log in logs])


def _curve(log: Source) -> Picture:
    rows = log.data
    dev = [r for r in rows if r["kind"] == "dev"]
    steps = max(r["step"] for r in rows)
    label = f"Cross-entropy per response token over {steps} steps."
    if dev:
        best = min(dev, key=lambda r: float(r["cross_entropy"]))
        label += f" Best on dev: {best['cross_entropy']:.4f} at step {best['step']}."
    names = list(dict.fromkeys(name for r in dev for name in r if name not in ("kind", "step")))
    table = Table(
        "Losses on the dev set",
        ["step", *(n.replace("_", " ") for n in names)],
        [[str(r["step"]), *(f"{r[n]:.4f}" if isinstance(r.get(n), float) else "–" for n in names)] for r in dev],
    )
    return Picture(loss_figure(rows), f"{log.name}. {label}", label, table if dev else None)
