"""The report: sections of every kind that the sources have something for, in the order in which a reader asks."""

from __future__ import annotations

from collections.abc import Sequence

from skipdecode.evaluation.compare import Pair
from skipdecode.evaluation.results import Run
from skipdecode.reporting.depth import calibration_sections, depth_section
from skipdecode.reporting.load import load_sections
from skipdecode.reporting.machines import machines_section
from skipdecode.reporting.other import other_sections
from skipdecode.reporting.outputs import length_sections, sample_sections, settings_section
from skipdecode.reporting.page import render
from skipdecode.reporting.quality import pairs_section, quality_sections, quality_tile
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.reporting.speed import speed_sections, speed_tiles
from skipdecode.reporting.training import training_section

__all__ = ["html_report", "run_sources"]


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
    runs: list[Run] = [source.data for source in of_kind(sources, "eval")]
    sections = [
        *quality_sections(sources),
        pairs_section(pairs),
        *sample_sections(runs),
        *speed_sections(sources),
        *load_sections(sources),
        depth_section(sources),
        *calibration_sections(sources),
        training_section(sources),
        *length_sections(runs),
        *other_sections(sources),
        machines_section(sources),
        settings_section(runs),
    ]
    count = f"{len(sources)} result{'' if len(sources) == 1 else 's'}"
    subtitle = f"{count}: {', '.join(source.name for source in sources)}"
    return render(title, subtitle, [*quality_tile(sources), *speed_tiles(sources)], sections)


def run_sources(runs: Sequence[Run]) -> list[Source]:
    """Runs that are read already, as sources."""
    return [Source(run.name, "eval", run) for run in runs]
