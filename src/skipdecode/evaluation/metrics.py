"""Metrics by name, with one interface: statistics of each record, and a score from their sum.

Every score of this package is a function of a *sum over records* (BLEU's n-gram counts, a mean's value and count). A
bootstrap therefore resamples rows of a table and does not score text again. Scores are 0 to 100.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from skipdecode.common.bootstrap import Table, ratio_of_sums
from skipdecode.common.registry import Registry
from skipdecode.errors import DataError, ModelLoadError
from skipdecode.evaluation.settings import MetricOptions

METRICS = Registry(
    "metric",
    {
        "bleu": "skipdecode.evaluation.overlap:Bleu",
        "chrf": "skipdecode.evaluation.overlap:Chrf",
        "rouge1": "skipdecode.evaluation.overlap:Rouge1",
        "rouge2": "skipdecode.evaluation.overlap:Rouge2",
        "rougeL": "skipdecode.evaluation.overlap:RougeL",
        "bertscore_f1": "skipdecode.evaluation.bertscore:BertScore",
    },
    retired={"meteor": "bertscore_f1 or chrf", "cider": "bertscore_f1 or chrf"},
)


class Metric(ABC):
    """One metric.

    Attributes
    ----------
    signature : str
        Library, version and settings; two scores are comparable only if their signatures are equal.
    """

    name: str
    signature: str

    @classmethod  # noqa: B027  # most need nothing
    def check(cls, options: MetricOptions) -> None:
        """Raise ModelLoadError, within a second and before anything is loaded, if the metric cannot run here."""

    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Table:
        """Statistics of each record.

        Parameters
        ----------
        outputs : sequence of str
            One text per record; may be empty.
        references : sequence of sequence of str
            At least one text per record.

        Returns
        -------
        ndarray, shape (records, k)
            Rows whose sum `score` takes.

        Raises
        ------
        DataError
            If the lengths differ or a record has no reference.
        """
        if len(outputs) != len(references):
            raise DataError(f"{len(outputs)} outputs for {len(references)} records: give one output a record")
        for index, texts in enumerate(references):
            if isinstance(texts, str) or not any(text.strip() for text in texts):
                raise DataError(f"record {index} has no reference: {self.name} needs a list with at least one text")
        return np.asarray(self._rows(outputs, references), dtype=np.float64)

    @abstractmethod
    def _rows(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Table | list[list[float]]:
        """Statistics of checked input."""

    @classmethod
    @abstractmethod
    def score(cls, total: Table) -> float:
        """The score of records whose statistics sum to `total`, shape (k,). Loads no model."""


class MeanMetric(Metric):
    """A mean over records: statistics are (value, 1)."""

    def _rows(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Table:
        values = np.asarray(self._values(outputs, references), dtype=np.float64)
        return np.stack([values, np.ones_like(values)], axis=1)

    @abstractmethod
    def _values(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Sequence[float]:
        """The value of each record."""

    @classmethod
    def score(cls, total: Table) -> float:
        """The mean; see `Metric.score`."""
        return ratio_of_sums(total)


def check_metrics(
    names: Sequence[str], options: MetricOptions, left_out: Callable[[str], None] | None = None
) -> list[str]:
    """The names, each once, of metrics that can run on this machine, checked before anything is loaded.

    `left_out` is called with one line for each metric whose model is not on this machine and cannot be fetched; without
    it such a metric raises ModelLoadError. Raises UsageError for a name that is not known.
    """
    for name in names:
        METRICS.check(name)
    found = []
    for name in dict.fromkeys(names):
        try:
            METRICS.get(name).check(options)
        except ModelLoadError as e:
            if left_out is None:
                raise
            left_out(f"{name} is left out: {e}")
            continue
        found.append(name)
    return found


def make_metrics(names: Sequence[str], options: MetricOptions | None = None) -> list[Metric]:
    """Metrics by name, each once, in order; all names are checked before any library is loaded."""
    for name in names:
        METRICS.check(name)
    return [METRICS.get(name)(options or MetricOptions()) for name in dict.fromkeys(names)]
