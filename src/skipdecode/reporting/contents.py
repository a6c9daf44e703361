"""What a report holds: every section that the sources have something for, in the order in which a reader asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skipdecode.evaluation.compare import Pair
from skipdecode.reporting.outputs import length_sections, sample_sections
from skipdecode.reporting.page import Section, render
from skipdecode.reporting.provenance import environment_sections, other_sections, settings_sections
from skipdecode.reporting.quality import nominal_sections, pair_sections, quality_sections, quality_tiles
from skipdecode.reporting.schedules import calibration_sections, depth_sections, training_sections
from skipdecode.reporting.sources import Source
from skipdecode.reporting.speed import bench_sections, decode_sections, load_sections, speed_tiles

__all__ = ["html_report"]

_SECTIONS: Sequence[Callable[[Sequence[Source]], list[Section]]] = (
    sample_sections,
    nominal_sections,
    decode_sections,
    bench_sections,
    load_sections,
    depth_sections,
    calibration_sections,
    training_sections,
    length_sections,
    other_sections,
    environment_sections,
    settings_sections,
)


def html_report(sources: Sequence[Source], pairs: Sequence[Pair] = (), *, title: str = "skipdecode report") -> str:
    """One HTML document without outside parts; the same text for the same sources.

    Parameters
    ----------
    sources : sequence of Source
        At least one.
    pairs : sequence of Pair
        Runs compared, from `compare_runs`.

    Raises
    ------
    MissingExtraError
        matplotlib or Jinja2 is not installed.
    """
    sections = [*quality_sections(sources), *pair_sections(pairs)]
    sections += [section for make in _SECTIONS for section in make(sources)]
    count = f"{len(sources)} result{'' if len(sources) == 1 else 's'}"
    subtitle = f"{count}: {', '.join(source.name for source in sources)}"
    return render(title, subtitle, [*quality_tiles(sources), *speed_tiles(sources)], sections)
