"""Metrics against the libraries' own calls, with several references and with empty outputs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
from hypothesis import assume, given
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from checkpoints import save_tiny_encoder
from skipdecode.data.records import Record
from skipdecode.errors import MissingExtraError, ModelLoadError, UsageError
from skipdecode.evaluation.metrics import METRICS, EncoderOptions, check_metrics, make_metrics, repeated

# The example of sacrebleu's own documentation.
OUTPUTS = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
REFERENCES = [
    ["The dog bit the man.", "The dog had bit the man."],
    ["It was not unexpected.", "No one was surprised."],
    ["The man bit him first.", "The man had bitten the dog."],
]
# Unequal numbers of references, and an output without text.
RAGGED = [
    ["The dog bit the man.", "A dog bit him."],
    ["It was not unexpected."],
    ["The man bit him first.", "b", "c d"],
]
HOLED = ["The dog bit a man.", "", "The man bit him."]


def score(name: str, outputs: list[str], references: list[list[str]], options: EncoderOptions | None = None) -> float:
    (metric,) = make_metrics([name], options)
    return metric.score(metric.statistics(outputs, references).sum(axis=0))


@pytest.mark.parametrize(("outputs", "references"), [(OUTPUTS, REFERENCES), (HOLED, RAGGED), (OUTPUTS, RAGGED)])
def test_bleu_and_chrf_equal_sacrebleu(outputs: list[str], references: list[list[str]]):
    streams = [[r[i] if i < len(r) else None for r in references] for i in range(max(map(len, references)))]
    assert score("bleu", outputs, references) == pytest.approx(sacrebleu.corpus_bleu(outputs, streams).score)
    assert score("chrf", outputs, references) == pytest.approx(sacrebleu.corpus_chrf(outputs, streams).score)


@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
def test_rouge_takes_the_reference_with_the_best_f(name: str):
    scorer = rouge_scorer.RougeScorer([name], use_stemmer=True)
    best = [max(scorer.score(r, o)[name].fmeasure for r in refs) for o, refs in zip(HOLED, RAGGED, strict=True)]
    assert score(name, HOLED, RAGGED) == pytest.approx(100 * np.mean(best))


@pytest.mark.parametrize("name", ["bleu", "chrf", "rougeL"])
def test_statistics_add_up_over_records(name: str):
    """A record drawn twice counts as if its text were there twice: what the bootstrap relies on."""
    (metric,) = make_metrics([name])
    table = metric.statistics(OUTPUTS, RAGGED)
    drawn = [2, 0, 2]
    again = metric.statistics([OUTPUTS[i] for i in drawn], [RAGGED[i] for i in drawn])
    assert metric.score(table[drawn].sum(axis=0)) == pytest.approx(metric.score(again.sum(axis=0)))


TEXTS = {
    "Cyrillic": "кот сидит на ковре у окна",
    "Japanese": "猫は窓のそばに座っています",
    "Thai": "แมวนั่งอยู่บนเสื่อ",
    "Tibetan": "བཀྲ་ཤིས་བདེ་ལེགས།",
    "Hindi": "नमस्ते दुनिया यह एक परीक्षण है",
    "Vietnamese": "mèo ở đó ngồi trên thảm",
}


@pytest.mark.parametrize("script", TEXTS)
@pytest.mark.parametrize("name", ["bleu", "chrf", "rouge1", "rouge2", "rougeL"])
def test_a_copy_scores_100_in_every_script(name: str, script: str):
    text = TEXTS[script]
    assert score(name, [text], [[text]]) == pytest.approx(100)
    assert 0 < score(name, [text[: -len(text) // 4]], [[text]]) < 100
    folded = unicodedata.normalize("NFD", text.upper())
    assert name in ("bleu", "chrf") or score(name, [folded], [[text]]) == pytest.approx(100)


@given(st.text(st.characters(codec="ascii"), max_size=40), st.text(st.characters(codec="ascii"), min_size=1))
def test_rouge_of_ascii_is_rouge_scores(output: str, reference: str):
    assume(reference.strip())
    expected = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True).score(reference, output)["rougeL"].fmeasure
    assert score("rougeL", [output], [[reference]]) == pytest.approx(100 * expected)


def test_names_and_numbers_are_found_in_every_script():
    text = "Орёл стоит 1200 рублей; 価格は3400円です"
    record = Record(0, 1, "a", "", values={"text": text}, references=(text,))
    assert repeated(record, ["text"]) == ["Орёл", "1200", "3400"]


def test_a_missing_library_is_told_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bert_score", None)
    with pytest.raises(MissingExtraError):
        check_metrics(["bertscore_f1"], EncoderOptions(), print)
    assert check_metrics(["bertscore_f1", "bleu"], EncoderOptions(), print) == ["bleu"]


def test_names_are_checked_before_any_library_loads():
    with pytest.raises(UsageError, match="unknown metric 'rogue1'"):
        make_metrics(["bertscore_f1", "rogue1"])
    assert [m.name for m in make_metrics(["bleu", "chrf", "bleu"])] == ["bleu", "chrf"]


def test_signatures_name_library_and_version():
    for metric, library in zip(make_metrics(["bleu", "rougeL"]), ("sacrebleu", "rouge_score"), strict=True):
        metric.statistics(OUTPUTS, REFERENCES)
        assert importlib.metadata.version(library) in metric.signature


# ---------------------------------------------------------------------- BERTScore


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random BERT on disk."""
    pytest.importorskip("bert_score")
    path = tmp_path_factory.mktemp("encoder")
    save_tiny_encoder(path, [*OUTPUTS, *(text for texts in REFERENCES for text in texts)])
    return str(path)


def test_bertscore_is_bert_scores_best_reference(encoder: str):
    import bert_score

    options = EncoderOptions(bertscore_model=encoder, bertscore_layers=2)
    best = [
        max(bert_score.score([out], [ref], model_type=encoder, num_layers=2)[2].item() for ref in refs)
        for out, refs in zip(OUTPUTS, RAGGED, strict=True)
    ]
    assert score("bertscore_f1", OUTPUTS, RAGGED, options) == pytest.approx(100 * np.mean(best), abs=1e-3)
    one_empty = score("bertscore_f1", [*OUTPUTS[:2], ""], RAGGED, options)
    assert one_empty == pytest.approx(100 * sum(best[:2]) / 3, abs=1e-3)


def test_bertscore_says_what_it_lacks(encoder: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="name the layer with bertscore_layers"):
        make_metrics(["bertscore_f1"], EncoderOptions(bertscore_model=encoder))
    with pytest.raises(ModelLoadError, match="does not load at layer 9"):
        make_metrics(["bertscore_f1"], EncoderOptions(bertscore_model=encoder, bertscore_layers=9))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("gt_all") else find_spec(name))
    with pytest.raises(MissingExtraError, match=r"skipdecode\[bertscore\]"):
        make_metrics(["bertscore_f1"], EncoderOptions(bertscore_model="minilm"))


def test_statistics_are_scored_without_an_encoder(monkeypatch: pytest.MonkeyPatch):
    """What `eval --compare` does with runs from another machine."""
    monkeypatch.setitem(sys.modules, "bert_score", None)
    assert METRICS.get("bertscore_f1").score(np.array([9.0, 2.0])) == 4.5


def test_encoder_directory_may_be_relative(encoder: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(encoder).parent)
    options = EncoderOptions(bertscore_model=Path(encoder).name, bertscore_layers=1)
    assert score("bertscore_f1", OUTPUTS[:1], [OUTPUTS[:1]], options) == pytest.approx(100, abs=1e-3)
