"""Bootstrap intervals: what they contain and exclude, and that a seed fixes them; and of sides that take turns."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu

from skipdecode.common.bootstrap import Stopwatch, compare, interval, ratio_of_sums
from skipdecode.errors import DataError
from skipdecode.evaluation.metrics import make_metrics


def table(values: np.ndarray) -> np.ndarray:
    return np.stack([values, np.ones_like(values)], axis=1)


VALUES = np.random.default_rng(0).normal(50, 10, size=200)


def test_a_clearly_worse_run_excludes_zero():
    # Records differ far more (sd 10) than the runs do (1): only pairing can tell.
    worse = VALUES - 1 + np.random.default_rng(1).normal(0, 0.5, size=200)
    result = compare(table(VALUES), table(worse), ratio_of_sums)
    assert result.difference.high < 0
    assert result.ratio is not None
    assert result.ratio.high < 1
    assert result.difference.estimate == pytest.approx(worse.mean() - VALUES.mean())
    unpaired = interval(table(VALUES), ratio_of_sums)
    assert unpaired.low <= worse.mean() <= unpaired.high


def test_width_is_that_of_the_normal_approximation():
    bounds = interval(table(VALUES), ratio_of_sums, resamples=4000)
    expected = 2 * 1.96 * VALUES.std() / np.sqrt(len(VALUES))
    assert bounds.high - bounds.low == pytest.approx(expected, rel=0.08)
    assert bounds.low <= VALUES.mean() <= bounds.high


def test_corpus_bleu_is_resampled_as_a_corpus():
    words = np.random.default_rng(3)
    vocabulary = ["the", "a", "dog", "cat", "man", "sat", "bit", "ran", "far", "here"]
    references = [[" ".join(words.choice(vocabulary, 8))] for _ in range(30)]
    outputs = [text if words.random() < 0.7 else " ".join(words.choice(vocabulary, 8)) for (text,) in references]
    (metric,) = make_metrics(["bleu"])
    bounds = interval(metric.statistics(outputs, references), metric.score, resamples=400)
    draws = [words.integers(0, 30, 30) for _ in range(400)]
    slow = [sacrebleu.corpus_bleu([outputs[i] for i in d], [[references[i][0] for i in d]]).score for d in draws]
    assert bounds.estimate == pytest.approx(sacrebleu.corpus_bleu(outputs, [[r[0] for r in references]]).score)
    assert (bounds.low, bounds.high) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])), abs=3)


def test_a_zero_baseline_has_no_ratio():
    zero = table(np.zeros(5))
    result = compare(zero, table(np.ones(5)), ratio_of_sums, resamples=50)
    assert result.ratio is None
    assert result.difference.estimate == 1


def test_bad_input_is_refused():
    with pytest.raises(DataError, match="do not pair up"):
        compare(table(VALUES), table(VALUES[:-1]), ratio_of_sums)
    with pytest.raises(DataError, match="no record to resample"):
        interval(table(VALUES[:0]), ratio_of_sums)


def watch_of(pieces: dict[str, list[tuple[float, float]]]) -> Stopwatch[str, float]:
    """A stopwatch of sides "a" and "b" with these rounds."""
    watch = Stopwatch[str, float](("a", "b"))
    for piece, rounds in pieces.items():
        for a, b in rounds:
            watch.add({"a": a, "b": b}, piece)
    return watch


def test_no_side_is_always_first_neither_on_a_piece_nor_in_a_round():
    order: list[str] = []
    watch = Stopwatch[str, float]("abc")
    for _ in range(2):
        for piece in (0, 1):
            found = watch.lap(lambda side: float(bool(order.append(side))), piece)
            assert list(found) == ["a", "b", "c"]
    assert order == [*"abc", *"cba", *"cba", *"abc"]


def test_a_round_that_was_slow_for_both_sides_does_not_change_their_ratio():
    watch = watch_of({"x": [(2.0, 1.0), (20.0, 10.0), (4.0, 2.0)]})
    assert watch.ratio("a", "b", float) == 2
    assert watch.laps("b") == [1.0, 10.0, 2.0]
    bounds = watch.interval("a", "b", float)  # of one piece: over its rounds
    assert bounds is not None
    assert (bounds.low, bounds.high) == (2, 2)


def test_pieces_count_by_their_seconds_and_one_disturbed_round_not_at_all():
    watch = watch_of({"long": [(30.0, 10.0), (30.0, 10.0), (900.0, 10.0)], "short": [(1.0, 1.0)] * 3})
    assert watch.ratio("a", "b", float) == pytest.approx(31 / 11)
    bounds = watch.interval("a", "b", float, resamples=200)
    assert bounds is not None
    assert (bounds.low, bounds.estimate, bounds.high) == pytest.approx((1, 31 / 11, 3))


def test_without_time_there_is_no_ratio():
    assert Stopwatch[str, float](("a", "b")).ratio("a", "b", float) is None
    assert watch_of({"x": [(1.0, 0.0)]}).ratio("a", "b", float) is None
