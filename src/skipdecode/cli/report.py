"""Make one HTML page from result files: quality against speed-up, speed, depth, losses, outputs side by side.

  skipdecode report results/ runs/2x --out report.html

RESULTS are files or directories: runs of eval, results of bench, calibrations, schedules, logs of tune. The page is
self-contained and opens without a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skipdecode.cli.paths import OVERWRITE
from skipdecode.common.files import write_whole
from skipdecode.common.options import Options, Reads, Writes, option
from skipdecode.common.progress import note
from skipdecode.errors import DataError

if TYPE_CHECKING:
    from skipdecode.reporting.sources import Source

__all__ = ["Config", "run"]


def _files(place: str) -> list[Path]:
    from skipdecode.evaluation.results import OUTPUTS_FILE
    from skipdecode.reporting.sources import find_files

    found = find_files([place])
    return [*found, *(file.with_name(OUTPUTS_FILE) for file in found)]


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Options of `skipdecode report`."""

    results: tuple[str, ...] = option(
        "result files, or directories with result files", positional=True, path=Reads(_files)
    )
    out: str = option("file for the page", default="report.html", path=Writes())
    overwrite: bool = option(OVERWRITE, default=False)
    title: str = option("title of the page", default="skipdecode report")
    bad: str = option(
        "files that are broken or no results; refuse: stop at the first; skip: print the name of each and continue",
        default="refuse",
        choices=("refuse", "skip"),
    )


def run(config: Config) -> int:
    """Read the results and write the page; returns 0."""
    sources = _sources(config)
    from skipdecode.reporting.contents import html_report

    write_whole(config.out, html_report(sources, title=config.title, progress=True))
    print(f"{config.out}: {len(sources)} result{'' if len(sources) == 1 else 's'}")
    return 0


def _sources(config: Config) -> list[Source]:
    from skipdecode.reporting.sources import SHOWN, find_files, read_source

    sources: list[Source] = []
    others: list[Source] = []
    for path in find_files(config.results):
        try:
            source = read_source(path)
            (sources if source.kind in SHOWN else others).append(source)
        except DataError as e:
            if config.bad == "refuse":
                raise DataError(f"{e} (--bad skip skips such files)") from None
            note(f"skipped: {e}")
    if others:
        named = ", ".join(f"{source.name} ({source.kind})" for source in others)
        note(f"not shown, because a report has no section for their kind: {named}")
    if not sources:
        raise DataError(f"nothing to report: no file has one of the kinds {', '.join(SHOWN)}")
    return sources
