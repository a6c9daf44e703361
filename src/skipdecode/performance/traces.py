"""Request traces for the simulator: who arrives when, with how long a prompt and output. Pure Python, seeded.

Traces are iterators: a million requests take no memory. Arrival times and lengths draw from random numbers of their
own, so that one seed gives the same requests at any rate.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice, repeat
from pathlib import Path
from typing import NamedTuple

from skipdecode.errors import UsageError

__all__ = [
    "Arrival",
    "Lengths",
    "all_at_once",
    "bursts",
    "constant",
    "empirical",
    "lognormal",
    "make_trace",
    "parse_lengths",
    "uniform",
]

MOST_TOKENS = 1_000_000
"""Longest prompt or output of a trace."""
_MOST_SIGMA = 4
Lengths = Callable[[random.Random], int]
"""Draws one length, 1 or more."""


class Arrival(NamedTuple):
    """A request of a trace: when it arrives, and tokens of its prompt and its output.

    `limit` is the most new tokens it may have: all that the scheduler knows of the output's length.
    """

    seconds: float
    prompt_tokens: int
    new_tokens: int
    limit: int


# ---------------------------------------------------------------------- lengths


def constant(length: int) -> Lengths:
    """Always `length`."""
    _check(1 <= length <= MOST_TOKENS, f"length {length}", f"1 to {MOST_TOKENS}")
    return lambda _: length


def uniform(least: int, most: int) -> Lengths:
    """Whole numbers from `least` to `most`, all equally often."""
    _check(1 <= least <= most <= MOST_TOKENS, f"uniform:{least}:{most}", f"1 to {MOST_TOKENS}, the smaller first")
    return lambda rng: rng.randint(least, most)


def lognormal(median: float, sigma: float) -> Lengths:
    """exp of a normal variable, rounded, from 1 to MOST_TOKENS; `sigma` is its standard deviation."""
    _check(
        1 <= median <= MOST_TOKENS and 0 <= sigma <= _MOST_SIGMA,
        f"lognormal:{median}:{sigma}",
        f"a median of 1 to {MOST_TOKENS}, sigma from 0 to {_MOST_SIGMA}",
    )
    centre = math.log(median)
    return lambda rng: min(MOST_TOKENS, max(1, round(math.exp(rng.gauss(centre, sigma)))))


def empirical(lengths: Sequence[int]) -> Lengths:
    """Drawn from measured lengths, with replacement."""
    measured = tuple(lengths)
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= MOST_TOKENS for n in measured)
    _check(bool(measured) and whole, "this list of lengths", f"whole numbers from 1 to {MOST_TOKENS}, at least one")
    return lambda rng: rng.choice(measured)


def parse_lengths(text: str) -> Lengths:
    """Lengths from text: ``64``, ``uniform:16:128``, ``lognormal:MEDIAN:SIGMA``, ``file:PATH`` (a JSON list).

    Raises
    ------
    UsageError
        If the text is none of these.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "uniform":
            least, most = rest.split(":")
            return uniform(int(least), int(most))
        if kind == "lognormal":
            median, sigma = rest.split(":")
            return lognormal(float(median), float(sigma))
        if kind == "file":
            values = json.loads(Path(rest).read_text(encoding="utf-8"))
            _check(isinstance(values, list), rest, "a file with a JSON list of lengths")
            return empirical(values)
        return constant(int(text))
    except OSError as e:
        raise UsageError(f"cannot read the lengths {rest}: {e.strerror or e}") from None
    except ValueError:
        raise UsageError(
            f"{text!r} is no length: give a whole number, uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA, or file:PATH "
            "with a JSON list of lengths"
        ) from None


# ---------------------------------------------------------------------- arrivals


def all_at_once() -> Iterator[float]:
    """Arrival times of a batch job: all 0."""
    return repeat(0.0)


def bursts(rate: float, size: int, seed: int = 0) -> Iterator[float]:
    """Arrival times of groups of `size` requests that come together; `rate` counts requests, not groups. Endless.

    Groups of one are independent users (Poisson arrivals).
    """
    _check(0 < rate < math.inf, f"rate={rate!r}", "requests a second, above 0")
    _check(size >= 1, f"burst of {size}", "1 request or more")
    rng = random.Random(f"{seed} arrivals")
    gaps = iter(lambda: rng.expovariate(rate / size), None)
    return chain.from_iterable(repeat(now, size) for now in accumulate(gaps))


def make_trace(
    requests: int,
    times: Iterator[float],
    prompt_tokens: Lengths,
    new_tokens: Lengths,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[Arrival]:
    """A trace of `requests` requests at `times`, which rise, with lengths drawn from `seed`.

    Under a `limit` longer outputs are cut, and the scheduler, which knows only this limit, cannot sort by length.
    Default: the scheduler knows every output's length.
    """
    _check(requests >= 1, f"requests={requests}", "1 or more")
    _check(limit is None or limit >= 1, f"limit={limit}", "1 or more")
    rng = random.Random(f"{seed} lengths")

    def arrival(seconds: float) -> Arrival:
        prompt, new = prompt_tokens(rng), new_tokens(rng)
        return Arrival(seconds, prompt, new if limit is None else min(new, limit), new if limit is None else limit)

    return map(arrival, islice(times, requests))


def _check(ok: bool, what: str, accepted: str) -> None:
    if not ok:
        raise UsageError(f"{what} is not accepted: give {accepted}")
