"""What a forward runs: from requests and the tokens that they are fed to the rows of a model's forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from skipdecode.engine.depth import DepthOrder, PromptLayers
from skipdecode.engine.sampling import Row

__all__ = ["EngineRow", "Feed", "TokenRows", "token_rows"]


class TokenRows(NamedTuple):
    """The rows of one forward: each token's id, its row of the KV store (slot) and its position in its text.

    `counts` says how many rows, from the first, run each layer, `stored`, where it is not the same, how many leave
    their keys and values there, and `wanted` of which rows, rising, logits are wanted. `tops`, where given, says of
    each of these how many of the likeliest words' logits are enough.
    """

    tokens: list[int]
    slots: list[int]
    positions: list[int]
    counts: list[int]
    wanted: list[int]
    stored: list[int] | None = None
    tops: list[int] | None = None
    bridged: list[tuple[int, int]] | None = None
    before: list[list[int]] | None = None
    prompt: tuple[int, ...] | None = None


@dataclass(eq=False, kw_only=True)
class EngineRow(Row):
    """A request that has a slot.

    Parameters
    ----------
    prompt : PromptLayers
        What its prompt's tokens do.
    layers : tuple of int
        Where it holds keys and values.
    fed : int
        Tokens of prompt and output that have run.
    """

    prompt: PromptLayers
    layers: tuple[int, ...]
    slot: int
    pages: int
    fed: int = 0


class Feed(NamedTuple):
    """A row, and its tokens that a forward runs."""

    row: EngineRow
    tokens: tuple[int, ...]

    @property
    def ends(self) -> bool:
        """Whether the row gets a new token from it."""
        return self.row.fed + len(self.tokens) >= len(self.row.request.prompt)


class _Span(NamedTuple):
    """Successive tokens of a row in a forward; of the last one logits may be wanted."""

    row: EngineRow
    tokens: tuple[int, ...]
    start: int
    wanted: bool


def token_rows(feeds: list[Feed], order: DepthOrder, taps: int = 0) -> tuple[TokenRows, list[EngineRow]]:
    """The rows of a forward, by falling depth, and the requests that get a token, in the order of the wanted rows.

    Prompts with layers of their own (`PromptLayers.own`) are alone in a forward, and alike. Their last tokens, which
    run more than the others, come first. Behind the others come, once more, the `taps` tokens before a part of a prompt
    that is not its first: they store what is there already, bit for bit, and the part's first tokens see their states.
    """
    own = feeds[0].row.prompt if feeds[0].row.prompt.own and not feeds[0].row.output else None
    before: list[list[int]] | None = None
    if own is None:
        feeds = sorted(feeds, key=lambda feed: -feed.row.budget)
        spans = [_Span(feed.row, feed.tokens, feed.row.fed, feed.ends) for feed in feeds]
        counts = order.counts([span.row.budget for span in spans for _ in span.tokens])
        stored = None
        rows = sum(len(span.tokens) for span in spans)
        bridged = [(count, rows) for count in counts]
    else:
        last = [_Span(f.row, f.tokens[-1:], f.row.fed + len(f.tokens) - 1, True) for f in feeds if f.ends]
        rest = [_Span(f.row, f.tokens[:-1] if f.ends else f.tokens, f.row.fed, False) for f in feeds]
        again = [
            _Span(f.row, f.row.request.prompt[max(0, f.row.fed - taps) : f.row.fed], max(0, f.row.fed - taps), False)
            for f in feeds
        ]
        spans, every = last + rest + again, sum(len(feed.tokens) for feed in feeds)
        rows = sum(len(span.tokens) for span in spans)
        counts, stored = ([0] * order.num_layers for _ in range(2))
        bridged = [(0, len(last))] * order.num_layers
        for layers, number, held in ((own.run, rows, rows), (own.projected, len(last), every)):
            for layer in layers:
                counts[layer], stored[layer], bridged[layer] = number, held, (0, 0)
        before = _rows_before(spans, every, taps) if taps else None
    prompt = None if own is None else own.run
    batch = TokenRows([], [], [], counts, [], stored, None, bridged, before, prompt)
    for span in spans:
        batch.tokens.extend(span.tokens)
        batch.slots.extend([span.row.slot] * len(span.tokens))
        batch.positions.extend(range(span.start, span.start + len(span.tokens)))
        if span.wanted:
            batch.wanted.append(len(batch.tokens) - 1)
    rows_due = [span.row for span in spans if span.wanted]
    tops = [row.sampler.top for row in rows_due]
    # One row that takes all logits has the whole head read, and the others have theirs for next to nothing.
    return batch._replace(tops=tops if all(tops) else None), rows_due


def _rows_before(spans: list[_Span], every: int, taps: int) -> list[list[int]]:
    """For the first `every` rows of a forward the rows of the `taps` tokens before each, -1 where there is none."""
    places: dict[tuple[int, int], int] = {}
    for span in spans:
        for offset in range(len(span.tokens)):
            places[span.row.slot, span.start + offset] = len(places)
    found = [[places.get((slot, position - tap), -1) for tap in range(1, taps + 1)] for slot, position in places]
    return found[:every]
