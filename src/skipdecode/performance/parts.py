"""What a cost model is made of: the parts of a decode step, those of a prompts' forward, and the lines between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Self

__all__ = ["PromptCost", "StepCost", "between", "tokens_read"]

_ENDLESS = 1e15  # tokens: where arithmetic takes no time, no prompt is longer than its weights' read


class StepCost(NamedTuple):
    """Seconds of the parts of a decode step of `rows` rows.

    `fixed_seconds` do not depend on depth: embeddings, head, sampling, the host's loop. `layer_seconds` are those of
    one layer on all rows without the cache read, `kv_seconds` of its attention over one cached token of one row.
    """

    rows: int
    fixed_seconds: float
    layer_seconds: float
    kv_seconds: float = 0.0


class PromptCost(NamedTuple):
    """Seconds of one layer in a forward over `tokens` tokens of prompts, where they run it and where they project it.

    A layer that is projected stores the tokens' keys and values and does nothing else.
    """

    tokens: float
    layer_seconds: float
    projection_seconds: float = 0.0

    @classmethod
    def of_token(cls, token_seconds: float, least_seconds: float, projection_share: float = 0.0) -> Self:
        """From a token's time in a layer, and the least that a layer takes: the read of its weights.

        `projection_share` is that of a projection in both.
        """
        tokens = max(1.0, least_seconds / token_seconds) if token_seconds else _ENDLESS
        layer = max(least_seconds, token_seconds) if token_seconds else least_seconds
        return cls(tokens, layer, projection_share * layer)


def tokens_read(kv_tokens: float, window: int, window_share: float) -> float:
    """Cached tokens of a row that a layer reads, averaged over full and sliding-window attention."""
    return kv_tokens - window_share * max(0, kv_tokens - window)


def between(known: Sequence[tuple[float, ...]], place: float) -> Sequence[float]:
    """Values at `place` on straight lines between `known`, each a place and its values; level before the first."""
    right = bisect_left(known, (place,))
    if right == 0 or known[right][0] == place:
        return known[right][1:]
    (low, *below), (high, *above) = known[right - 1 : right + 1]
    share = (place - low) / (high - low)
    return [least + share * (most - least) for least, most in zip(below, above, strict=True)]
