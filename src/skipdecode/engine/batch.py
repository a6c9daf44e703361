"""Builds the input of a forward: the token rows of all sequences that take part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from skipdecode.engine.sequence import Sequence

__all__ = ["Chunk", "TokenRows", "rows_by_layer", "token_rows"]

Chunk = tuple[Sequence, tuple[int, ...]]
"""A sequence, and the number of its next tokens that a forward runs."""


class TokenRows(NamedTuple):
    """The rows of one forward, a token each: its id, its sequence's row of the KV store (slot), and its position.

    `counts` says how many rows, from the first, run each layer, `stored`, where it is not the same, how many leave
    their keys and values there, and `wanted` of which rows, rising, logits are wanted. `tops`, where given, says of
    each of these how many of the most likely tokens' logits are enough.
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


class _Span(NamedTuple):
    """Successive tokens of a sequence that run and store the same layers.

    `bridges`: they take the bridges of layers that they do not run. `wanted`: so are the last one's logits.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    start: int
    run: tuple[int, ...]
    stored: tuple[int, ...]
    bridges: bool
    wanted: bool


def token_rows(chunks: list[Chunk], num_layers: int, taps: int = 0) -> tuple[TokenRows, list[Sequence]]:
    """The rows of a forward, the deepest first, and the sequences that get a token, in the order of the wanted rows.

    The layers that tokens run must be nested: with rows by falling depth a layer's rows are then the first ones.
    Prompts with layers of their own (`PromptLayers.own`) are alone in a forward, and alike. `taps` tokens before a part
    of such a prompt that is not its first come once more: they store what is there already, bit for bit, and the part's
    first tokens see their states.
    """
    first = chunks[0][0]
    own = first.prompt if first.in_prefill and first.prompt.own else None
    if own is None:
        spans = [_whole(sequence, tokens) for sequence, tokens in chunks]
    else:
        spans = [span for sequence, tokens in chunks for span in _parts(sequence, tokens, taps)]
    spans.sort(key=lambda span: (-len(span.run), -len(span.stored), not span.bridges))
    counts = rows_by_layer(num_layers, ((span.run, len(span.tokens)) for span in spans))
    stored = before = prompt = None
    if own is not None:
        stored = rows_by_layer(num_layers, ((span.stored, len(span.tokens)) for span in spans))
        before = _rows_before(spans, taps) if taps else None
        prompt = own.run
    bridging = sum(len(span.tokens) for span in spans if span.bridges)
    bridged = [(count, max(count, bridging)) for count in counts]
    batch = TokenRows([], [], [], counts, [], stored, None, bridged, before, prompt)
    for span in spans:
        batch.tokens.extend(span.tokens)
        batch.slots.extend([span.sequence.slot] * len(span.tokens))
        batch.positions.extend(range(span.start, span.start + len(span.tokens)))
        if span.wanted:
            batch.wanted.append(len(batch.tokens) - 1)
    sequences = [span.sequence for span in spans if span.wanted]
    tops = [sequence.sampler.top for sequence in sequences]
    # One row that takes all logits has the whole head read, and the others have theirs for next to nothing.
    return batch._replace(tops=tops if all(tops) else None), sequences


def _whole(sequence: Sequence, tokens: tuple[int, ...]) -> _Span:
    ends = sequence.ran + len(tokens) >= len(sequence.request.prompt)
    return _Span(sequence, tokens, sequence.ran, sequence.layers, sequence.layers, True, ends)


def _parts(sequence: Sequence, tokens: tuple[int, ...], taps: int) -> Iterable[_Span]:
    """A chunk of a prompt with layers of its own: the last token, those before it, and again those before the chunk."""
    start, prompt, text = sequence.ran, sequence.prompt, sequence.request.prompt
    ends = start + len(tokens) >= len(text)
    if ends:
        held = sequence.layers
        yield _Span(sequence, tokens[-1:], start + len(tokens) - 1, held, held, True, True)
        tokens = tokens[:-1]
    begin = max(0, start - taps)
    yield _Span(sequence, tokens, start, prompt.run, sequence.layers, False, False)
    yield _Span(sequence, text[begin:start], begin, prompt.run, prompt.run, False, False)


def _rows_before(spans: list[_Span], taps: int) -> list[list[int]]:
    """For each row of a forward the rows of the `taps` tokens before it, -1 where there is none."""
    places: dict[tuple[int, int], int] = {}
    for span in spans:
        for offset in range(len(span.tokens)):
            places[span.sequence.slot, span.start + offset] = len(places)
    return [[places.get((slot, position - tap), -1) for tap in range(1, taps + 1)] for slot, position in places]


def rows_by_layer(num_layers: int, spans: Iterable[tuple[tuple[int, ...], int]]) -> list[int]:
    """For each layer the number of rows that have it; `spans` are the layers of some rows, and how many those are."""
    numbers: dict[tuple[int, ...], int] = {}
    for layers, rows in spans:
        numbers[layers] = numbers.get(layers, 0) + rows
    counts = [0] * num_layers
    for layers, rows in numbers.items():
        for layer in layers:
            counts[layer] += rows
    return counts
