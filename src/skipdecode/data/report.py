"""What a user is told of a run, on standard error: bad rows, progress, and the figures at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

from skipdecode.data.prompts import EncodedPrompt
from skipdecode.data.summary import RunSummary, SpeedComparison
from skipdecode.schedule import Schedule

__all__ = ["BadRows", "note", "progress_bar", "schedule_line", "summary_lines"]

_BAD_ROWS_SHOWN = 20


def note(line: str) -> None:
    """One line on standard error, above a progress bar that may be there."""
    tqdm.write(f"skipdecode: {line}", file=sys.stderr)


class BadRows:
    """Names bad rows by line, the first few of them; all are in the output."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, prompt: EncodedPrompt) -> None:
        """A row that cannot be generated."""
        self._count += 1
        if self._count <= _BAD_ROWS_SHOWN:
            note(f"line {prompt.record.line}: {prompt.error}; the row is skipped")
        elif self._count == _BAD_ROWS_SHOWN + 1:
            note("more rows are skipped; the output holds the error of each")


@contextlib.contextmanager
def progress_bar(total: int, done: int) -> Iterator[Callable[[int, RunSummary], None]]:
    """A bar over rows with time left and tokens/s; gives the callback of `generate_rows`."""
    # A terminal gets a moving bar, a log file a line now and then.
    pause = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(total=total, initial=done, unit="row", mininterval=pause, file=sys.stderr) as bar:

        def progress(rows: int, summary: RunSummary) -> None:
            bar.set_postfix_str(f"{summary.tokens_per_s:.0f} tokens/s", refresh=False)
            bar.update(rows)

        yield progress


def schedule_line(schedule: Schedule, origin: str) -> str:
    """The schedule in words."""
    if schedule.is_full:
        return f"full depth, {schedule.num_layers} layers ({origin})"
    first, last = schedule.budgets[0], schedule.budgets[-1]
    depth = f"{first}" if first == last else f"{first} to {last}"
    return f"schedule {schedule.name}: {depth} of {schedule.num_layers} layers ({origin})"


def summary_lines(summary: RunSummary) -> list[str]:
    """The figures of a run, a few lines."""
    resumed = f", {summary.rows_resumed} of them by an earlier run" if summary.rows_resumed else ""
    stats, layers = summary.stats, summary.stats.mean_layers
    lines = [
        f"{summary.rows} rows{resumed}; {stats.new_tokens} new tokens in {summary.seconds:.1f} s, "
        f"{summary.tokens_per_s:.1f} tokens/s in the model"
    ]
    if layers is not None:
        lines.append(
            f"{layers:.1f} of {summary.num_layers} layers for a token on average "
            f"({summary.num_layers / layers:.2f}x nominal); keys and values: at most "
            f"{_bytes(stats.kv_bytes_peak)}, {summary.kv_saved or 0:.0%} saved"
        )
    if summary.comparison is not None:
        lines.append(_comparison_line(summary.comparison))
    if summary.bad_rows:
        lines.append(f"{summary.bad_rows} of {summary.rows} rows could not be used; the output holds the error of each")
    return lines


def _comparison_line(comparison: SpeedComparison) -> str:
    found = comparison.to_dict()
    if found is None:
        return "no comparison: no row took a second token"
    return (
        f"decoding, {found['batches']} batches: {found['full_decode_tokens_per_s']:.1f} tokens/s at full depth, "
        f"{found['decode_tokens_per_s']:.1f} under the schedule: {found['measured_decode_speedup']:.2f}x measured, "
        f"{found['nominal_speedup']:.2f}x nominal"
    )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
