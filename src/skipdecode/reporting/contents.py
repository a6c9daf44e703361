"""What a report holds: every section that the sources have something for, in the order in which a reader asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skipdecode.evaluation.compare import Pair
from skipdecode.reporting.outputs import length_sections, sample_sections
from skipdecode.reporting.page import Section, render
from skipdecode.reporting.provenance import environment_sections, other_sections, settings_sections
from skipdecode.reporting.quality import best_first, pair_sections, quality_card, quality_section
from skipdecode.reporting.results import groups_of
from skipdecode.reporting.schedules import calibration_section, depth_sections, training_sections
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.reporting.speed import bench_section, speed_cards

__all__ = ["html_report"]

_Sections = Callable[[Sequence[Source]], list[Section]]


def _each(kind: str, section: Callable[[Source], Section]) -> _Sections:
    """A section for every source of a kind."""
    return lambda sources: [section(source) for source in of_kind(sources, kind)]


_SECTIONS: Sequence[_Sections] = (
    _each("bench", bench_section),
    depth_sections,
    _each("calibration", calibration_section),
    training_sections,
    other_sections,
    environment_sections,
    settings_sections,
)


def html_report(
    sources: Sequence[Source], pairs: Sequence[Pair] = (), *, title: str = "skipdecode report", progress: bool = False
) -> str:
    """One HTML document without outside parts; the same text for the same sources.

    Parameters
    ----------
    sources : sequence of Source
        What is reported: one file or more.
    pairs : sequence of Pair
        Runs compared, from `compare_runs`.
    progress : bool
        Show a bar.

    Raises
    ------
    MissingExtraError
        matplotlib or Jinja2 is not installed.
    """
    groups = best_first(groups_of(sources))
    sections = [*map(quality_section, groups), *pair_sections(pairs, sources)]
    sections += [section for group in groups for section in (*sample_sections(group), *length_sections(group))]
    sections += [section for make in _SECTIONS for section in make(sources)]
    cards = [*map(quality_card, groups), *speed_cards(sources)]
    return render(title, [source.name for source in sources], cards, sections, progress=progress)
