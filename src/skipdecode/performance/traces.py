"""Request traces for the simulator: arrival times, prompt and output lengths. Pure Python, seeded.

Traces are iterators, so a million requests take no memory. Arrival times and lengths use separate random numbers, so
that one seed gives the same requests at any rate.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, islice, repeat
from pathlib import Path
from typing import NamedTuple

from skipdecode.errors import UsageError

__all__ = ["Arrival", "Lengths", "bursts", "make_trace", "parse_lengths"]

_MOST_TOKENS = 1_000_000  # of a prompt or an output
_MOST_SIGMA = 4
Lengths = Callable[[random.Random], int]
"""Draws one length, 1 or more."""


class Arrival(NamedTuple):
    """A request of a trace: arrival time, and tokens of its prompt and its output.

    `limit` is its largest number of new tokens, all that the scheduler knows of the output's length.
    """

    seconds: float
    prompt_tokens: int
    new_tokens: int
    limit: int


def parse_lengths(text: str) -> Lengths:
    """Lengths from text: ``64``; ``uniform:16:128``, all equally often; ``lognormal:MEDIAN:SIGMA``, rounded: sigma is
    the standard deviation of the logarithm; ``file:PATH``, drawn from a JSON list of measured lengths.

    Raises
    ------
    UsageError
        If the text is none of these.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "uniform":
            least, most = map(int, rest.split(":"))
            _check(1 <= least <= most <= _MOST_TOKENS, text, f"1 to {_MOST_TOKENS}, the smaller first")
            return lambda rng: rng.randint(least, most)
        if kind == "lognormal":
            median, sigma = map(float, rest.split(":"))
            accepted = f"a median of 1 to {_MOST_TOKENS}, sigma from 0 to {_MOST_SIGMA}"
            _check(1 <= median <= _MOST_TOKENS and 0 <= sigma <= _MOST_SIGMA, text, accepted)
            return lambda rng: min(_MOST_TOKENS, max(1, round(math.exp(rng.gauss(math.log(median), sigma)))))
        if kind != "file":
            length = int(text)
            _check(1 <= length <= _MOST_TOKENS, f"length {length}", f"1 to {_MOST_TOKENS}")
            return lambda _: length
        measured = json.loads(Path(rest).read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"cannot read the lengths {rest}: {e.strerror or e}") from None
    except ValueError:
        raise UsageError(
            f"{text!r} is no length: give a whole number, uniform:LEAST:MOST, lognormal:MEDIAN:SIGMA, or file:PATH "
            "with a JSON list of lengths"
        ) from None
    whole = isinstance(measured, list) and all(type(n) is int and 1 <= n <= _MOST_TOKENS for n in measured)
    _check(whole and bool(measured), rest, f"a JSON list of whole numbers from 1 to {_MOST_TOKENS}, at least one")
    return lambda rng: rng.choice(measured)


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
    times: Iterator[float] | None,
    prompt_tokens: Lengths,
    new_tokens: Lengths,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[Arrival]:
    """A trace of `requests` requests at `times`, which rise (None: all at once), with lengths drawn from `seed`.

    Under a `limit` longer outputs are cut, and the scheduler, which knows only this limit, cannot sort by length.
    Default: the scheduler knows every output's length.
    """
    _check(requests >= 1, f"requests={requests}", "1 or more")
    _check(limit is None or limit >= 1, f"limit={limit}", "1 or more")
    rng = random.Random(f"{seed} lengths")

    def arrival(seconds: float) -> Arrival:
        prompt, new = prompt_tokens(rng), new_tokens(rng)
        return Arrival(seconds, prompt, new if limit is None else min(new, limit), new if limit is None else limit)

    return map(arrival, islice(repeat(0.0) if times is None else times, requests))


def _check(ok: bool, what: str, accepted: str) -> None:
    if not ok:
        raise UsageError(f"{what} is not accepted: give {accepted}")
