"""Builds the input of a forward: the token rows of all sequences that take part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

from skipdecode.engine.sequence import Sequence

__all__ = ["Chunk", "TokenRows", "rows_by_layer", "token_rows"]


class Chunk(NamedTuple):
    """Tokens of a sequence that a forward runs, the position of the first, and the layers that they run.

    Logits are needed for all tokens of a decoding sequence, and for the last token of a prompt. For prompts with layers
    of their own, `layers` are those of the last token.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    start: int
    layers: tuple[int, ...]

    @classmethod
    def following(cls, sequence: Sequence, tokens: tuple[int, ...]) -> Self:
        """The sequence's next tokens."""
        return cls(sequence, tokens, sequence.ran, sequence.layers)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


class TokenRows(NamedTuple):
    """The rows of one forward. A row is a token: its id, its slot (the sequence's place in the KV store), its position.

    `counts` has for each layer the number of leading rows that run it, and `stored`, if different, the number that
    store keys and values in it. `wanted` lists in ascending order the rows whose logits are needed. `tops`, if given,
    has for each wanted row the number of top tokens whose logits are enough. `drafting`: approximate logits are enough.
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
    drafting: bool = False


class _Span(NamedTuple):
    """Successive tokens of a sequence that run and store the same layers.

    `bridges`: the tokens take the bridges of skipped layers. `wanted`: the number of last tokens whose logits are
    needed.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    start: int
    run: tuple[int, ...]
    stored: tuple[int, ...]
    bridges: bool
    wanted: int


def token_rows(chunks: list[Chunk], num_layers: int, taps: int = 0) -> tuple[TokenRows, list[Sequence]]:
    """The rows of a forward, deepest first, and the sequences that get a token, in the order of the wanted rows.

    The layer sets of the tokens must be nested. Sorted by falling depth, the rows of a layer are then the first rows.
    A forward of prompts with layers of their own (`PromptLayers.own`) has nothing else, and all have the same layers.
    If such a prompt is split, the last `taps` tokens of a part run again with the next part, whose first tokens need
    their states; they store the same keys and values again, bit for bit.
    """
    first = chunks[0].sequence
    own = first.prompt if first.in_prefill and first.prompt.own else None
    if own is None:
        spans = [_whole(chunk) for chunk in chunks]
    else:
        spans = [span for chunk in chunks for span in _parts(chunk, taps)]
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
        batch.wanted.extend(range(len(batch.tokens) - span.wanted, len(batch.tokens)))
    sequences = [span.sequence for span in spans if span.wanted]
    tops = [span.sequence.sampler.top for span in spans for _ in range(span.wanted)]
    # One row that takes all logits has the whole head read, and the others have theirs for next to nothing.
    return batch._replace(tops=tops if all(tops) else None), sequences


def _whole(chunk: Chunk) -> _Span:
    sequence, tokens, start, layers = chunk
    wanted = len(tokens) if sequence.output else int(chunk.end >= len(sequence.request.prompt))
    return _Span(sequence, tokens, start, layers, layers, True, wanted)


def _parts(chunk: Chunk, taps: int) -> Iterable[_Span]:
    """The spans of a chunk of a prompt with layers of its own: the last token, the others, and the taps before it."""
    sequence, tokens, start, held = chunk
    prompt, text = sequence.prompt, sequence.request.prompt
    if chunk.end >= len(text):
        yield _Span(sequence, tokens[-1:], chunk.end - 1, held, held, True, 1)
        tokens = tokens[:-1]
    begin = max(0, start - taps)
    yield _Span(sequence, tokens, start, prompt.run, held, False, 0)
    yield _Span(sequence, text[begin:start], begin, prompt.run, prompt.run, False, 0)


def _rows_before(spans: list[_Span], taps: int) -> list[list[int]]:
    """For each row of a forward the rows of the `taps` tokens before it; -1 where there is none."""
    places: dict[tuple[int, int], int] = {}
    for span in spans:
        for offset in range(len(span.tokens)):
            places[span.sequence.slot, span.start + offset] = len(places)
    return [[places.get((slot, position - tap), -1) for tap in range(1, taps + 1)] for slot, position in places]


def rows_by_layer(num_layers: int, spans: Iterable[tuple[tuple[int, ...], int]]) -> list[int]:
    """For each layer the number of rows that have it; `spans` are pairs of layers and a number of rows."""
    numbers: dict[tuple[int, ...], int] = {}
    for layers, rows in spans:
        numbers[layers] = numbers.get(layers, 0) + rows
    counts = [0] * num_layers
    for layers, rows in numbers.items():
        for layer in layers:
            counts[layer] += rows
    return counts
