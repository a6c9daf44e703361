"""BLEU and chrF (sacrebleu) and ROUGE (rouge_score): overlap of words or characters with the references."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any, ClassVar

from skipdecode.common.bootstrap import Table
from skipdecode.errors import MissingExtraError
from skipdecode.evaluation.metrics import MeanMetric, Metric
from skipdecode.evaluation.settings import MetricOptions


class _Sacre(Metric):
    """A corpus metric of sacrebleu, whose statistics add up over records."""

    sacre_class: ClassVar[str]

    def __init__(self, options: MetricOptions) -> None:
        self._metric = _library(self.sacre_class)
        self.signature = ""

    def _rows(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[list[float]]:
        if not outputs:
            return []
        most = max(len(texts) for texts in references)
        # sacrebleu takes one stream a reference; None stands where a record has fewer.
        streams = [[texts[i] if i < len(texts) else None for texts in references] for i in range(most)]
        # These two are what sacrebleu's own significance tests are made of; it has no public name for them.
        rows: list[list[float]] = self._metric._extract_corpus_statistics(list(outputs), streams)
        self.signature = str(self._metric.get_signature())
        return rows

    @classmethod
    def score(cls, total: Table) -> float:
        """Corpus score, 0 to 100; see `Metric.score`."""
        return float(_library(cls.sacre_class)._compute_score_from_stats([int(n) for n in total]).score)


@functools.cache
def _library(name: str) -> Any:
    try:
        from sacrebleu import metrics
    except ImportError:
        raise MissingExtraError("BLEU and chrF", "eval") from None
    return getattr(metrics, name)()


class Bleu(_Sacre):
    """Corpus BLEU over all references (Papineni et al., 2002), sacrebleu's defaults."""

    name = "bleu"
    sacre_class = "BLEU"


class Chrf(_Sacre):
    """Corpus chrF, the best reference of each record (Popović, 2015), sacrebleu's defaults."""

    name = "chrf"
    sacre_class = "CHRF"


class _Rouge(MeanMetric):
    """Mean F of one ROUGE type; of several references the one with the best F counts (Lin, 2004)."""

    def __init__(self, options: MetricOptions) -> None:
        try:
            from rouge_score import rouge_scorer
        except ImportError:
            raise MissingExtraError(f"the metric {self.name}", "eval") from None
        self._scorer = rouge_scorer.RougeScorer([self.name], use_stemmer=True)
        self.signature = f"rouge_score:{importlib.metadata.version('rouge_score')}|stemmer:yes|refs:best-f"

    def _values(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        pairs = zip(references, outputs, strict=True)
        return [100 * self._scorer.score_multi(list(texts), out)[self.name].fmeasure for texts, out in pairs]


class Rouge1(_Rouge):
    """Words."""

    name = "rouge1"


class Rouge2(_Rouge):
    """Pairs of words."""

    name = "rouge2"


class RougeL(_Rouge):
    """Longest common subsequence of the whole text (lines are not scored one by one)."""

    name = "rougeL"
