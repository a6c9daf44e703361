"""METEOR and CIDEr as the E2E challenge scored them: pycocoevalcap's programs, on its own tokenizer. Needs Java."""

from __future__ import annotations

import functools
import importlib.metadata
import shutil
from collections.abc import Sequence
from typing import Any, ClassVar

from skipdecode.errors import MissingExtraError, UsageError
from skipdecode.evaluation.metrics import MeanMetric
from skipdecode.evaluation.settings import MetricOptions

__all__ = ["Cider", "Meteor"]


class _Coco(MeanMetric):
    """A caption metric; texts are lower-cased and stripped of punctuation by the Penn treebank tokenizer."""

    program: ClassVar[str]
    scale: ClassVar[float] = 1.0

    def __init__(self, options: MetricOptions) -> None:
        try:
            from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
        except ImportError:
            raise MissingExtraError(f"the metric {self.name}", "eval-coco") from None
        if shutil.which("java") is None:
            raise UsageError(f"the metric {self.name} runs a Java program: install a Java runtime, or leave it out")
        self._tokenizer = PTBTokenizer()
        self.signature = f"pycocoevalcap:{importlib.metadata.version('pycocoevalcap')}|tok:ptb|mean-of-records"

    def _values(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        if not outputs:
            return []
        wanted = self._tokens([list(texts) for texts in references])
        got = self._tokens([[text] for text in outputs])
        _, values = self._program.compute_score(wanted, got)
        return [self.scale * float(value) for value in values]

    def _tokens(self, texts: list[list[str]]) -> dict[int, list[str]]:
        captions = {i: [{"caption": " ".join(t.split())} for t in group] for i, group in enumerate(texts)}
        tokens: dict[int, list[str]] = self._tokenizer.tokenize(captions)
        return tokens

    @functools.cached_property
    def _program(self) -> Any:
        """Started once: METEOR reads its tables for many seconds."""
        module, _, name = self.program.partition(":")
        return getattr(importlib.import_module(module), name)()


class Meteor(_Coco):
    """Mean METEOR 1.5 x 100 (Denkowski and Lavie, 2014): stems, synonyms and paraphrases match too.

    The challenge's script pools the counts of all records instead of averaging records: its figure differs a little.
    """

    name = "meteor"
    program = "pycocoevalcap.meteor.meteor:Meteor"
    scale = 100.0


class Cider(_Coco):
    """Mean CIDEr-D, 0 to 10 (Vedantam et al., 2015); words that are rare in the references at hand weigh more."""

    name = "cider"
    program = "pycocoevalcap.cider.cider:Cider"
