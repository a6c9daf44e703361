"""What a report holds: every section that the sources have something for, in the order in which a reader asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skipdecode.evaluation.compare import Pair
from skipdecode.reporting.outputs import length_sections, sample_sections
from skipdecode.reporting.page import Section, render
from skipdecode.reporting.provenance import environment_sections, other_sections, settings_sections
from skipdecode.reporting.quality import nominal_sections, pair_sections, quality_sections, quality_tiles
from skipdecode.reporting.schedules import calibration_section, depth_sections, training_sections
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.reporting.speed import bench_section, decode_section, load_section, speed_tiles

__all__ = ["html_report"]

_Sections = Callable[[Sequence[Source]], list[Section]]


def _each(kind: str, section: Callable[[Source], Section]) -> _Sections:
    """A section for every source of a kind."""
    return lambda sources: [section(source) for source in of_kind(sources, kind)]


_SECTIONS: Sequence[_Sections] = (
    sample_sections,
    nominal_sections,
    _each("decode-speed", decode_section),
    _each("bench", bench_section),
    _each("serve-load", load_section),
    depth_sections,
    _each("calibration", calibration_section),
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
        What is reported: one file or more.
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
