"""The one stopwatch: sides take turns, every other time backwards; medians of rounds; paired ratios with intervals."""

from __future__ import annotations

import pytest

from skipdecode.common.bootstrap import Stopwatch


def watch_of(pieces: dict[str, list[tuple[float, float]]]) -> Stopwatch[str, float]:
    """A stopwatch of sides "a" and "b" with these rounds."""
    watch = Stopwatch[str, float](("a", "b"))
    for piece, rounds in pieces.items():
        for a, b in rounds:
            watch.add({"a": a, "b": b}, piece)
    return watch


def same(lap: float) -> float:
    return lap


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
    assert watch.ratio("a", "b", same) == 2
    assert watch.seconds("a", same) == 4
    assert watch.laps("b") == [1.0, 10.0, 2.0]
    bounds = watch.interval("a", "b", same)  # of one piece: over its rounds
    assert bounds is not None
    assert (bounds.low, bounds.high) == (2, 2)


def test_pieces_count_by_their_seconds_and_one_disturbed_round_not_at_all():
    watch = watch_of({"long": [(30.0, 10.0), (30.0, 10.0), (900.0, 10.0)], "short": [(1.0, 1.0)] * 3})
    assert watch.ratio("a", "b", same) == pytest.approx(31 / 11)
    bounds = watch.interval("a", "b", same, resamples=200)
    assert bounds is not None
    assert (bounds.low, bounds.estimate, bounds.high) == pytest.approx((1, 31 / 11, 3))


def test_without_time_there_is_no_ratio():
    assert Stopwatch[str, float](("a", "b")).ratio("a", "b", same) is None
    assert watch_of({"x": [(1.0, 0.0)]}).ratio("a", "b", same) is None
