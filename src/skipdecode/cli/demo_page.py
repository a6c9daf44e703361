"""What `skipdecode demo` shows: texts side by side and a table of figures, or one JSON document."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipdecode.cli.columns import side_by_side, table
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.engine.base import EngineStats

__all__ = ["Outcome", "Part", "document", "page"]


@dataclass(frozen=True)
class Outcome:
    """What one schedule gave: the texts of all prompts, the figures of one round, the seconds of its fastest."""

    name: str
    schedule: Schedule
    texts: list[str]
    stats: EngineStats
    decode_s: float

    @property
    def layers(self) -> float:
        return self.stats.layer_reads / self.stats.steps

    def figures(self, full: Outcome) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.name,
            "schedule": self.schedule.to_dict(),
            "layers_per_token": self.layers,
            "nominal_speedup": full.layers / self.layers,
            "measured_decode_speedup": full.decode_s / self.decode_s,
            "decode_tokens_per_s": self.stats.fed_tokens / self.decode_s,
            "kv_bytes": self.stats.kv_bytes_peak,
            "kv_saved_share": 1 - self.stats.kv_bytes_peak / self.stats.kv_bytes_full_peak,
            "texts": self.texts,
        }


@dataclass(frozen=True)
class Part:
    """One model: its prompts (id, text), what every schedule gave (full depth first), and a word on what it shows."""

    title: str
    engine: str
    prompts: list[tuple[str, str]]
    outcomes: list[Outcome]
    remark: str

    def figures(self) -> list[dict[str, Any]]:
        """JSON-ready, one for each schedule."""
        return [o.figures(self.outcomes[0]) for o in self.outcomes]


def document(config: dict[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """All parts, JSON-ready."""
    from skipdecode.common.environment import environment

    return {
        "config": config,
        "parts": [
            {
                "title": part.title,
                "engine": part.engine,
                "prompts": [{"id": name, "prompt": text} for name, text in part.prompts],
                "runs": part.figures(),
            }
            for part in parts
        ],
        "environment": environment(),
    }


def page(parts: Sequence[Part]) -> list[str]:
    """All parts as lines for the terminal at hand."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 160)
    return [line for part in parts for line in _part(part, width)]


def _part(part: Part, width: int) -> list[str]:
    # A constant schedule is there for its figures; its text says no more than that of the one with the same mean.
    shown = [o for o in part.outcomes if not o.name.startswith("constant")]
    lines = ["", *textwrap.wrap(f"== {part.title}", width)]
    for i, (_, text) in enumerate(part.prompts):
        lines += ["", f"> {text}", ""]
        lines += side_by_side([o.name for o in shown], [o.texts[i] for o in shown], width)
    rows = [
        [
            f["name"],
            f"{f['layers_per_token']:.1f}",
            f"{f['nominal_speedup']:.2f}x",
            f"{f['measured_decode_speedup']:.2f}x",
            f"{f['decode_tokens_per_s']:.0f}",
            f"{f['kv_saved_share']:.0%}",
        ]
        for f in part.figures()
    ]
    layers = part.outcomes[0].schedule.num_layers
    name = f"{len(part.prompts)} rows, {part.engine} engine"
    header = [name, f"layers of {layers}", "nominal", "measured", "tokens/s", "KV saved"]
    return [*lines, "", *table(header, rows), "", *textwrap.wrap(part.remark, width)]
