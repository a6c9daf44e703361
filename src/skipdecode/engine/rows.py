"""The rows of a forward: which tokens of which sequences share it, and in which order.

`step` of the fast engine makes a `Chunk` of each sequence, `forwards` says which chunks share a forward, and
`token_rows` makes the rows of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple, Self

from skipdecode.engine.kernels.spec import LayerRows
from skipdecode.engine.sequence import Sequence


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
        """Make a chunk of the sequence's next tokens."""
        return cls(sequence, tokens, sequence.ran, sequence.layers)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def has_explicit_layers(self) -> bool:
        """Whether the tokens are of a prompt with layers of its own."""
        return self.sequence.in_prefill and self.sequence.prompt.explicit


def forwards(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Group the chunks of a step by forward: within one, layer sets are nested, so rows of a layer are neighbours.

    Schedules of one drop order share a forward, and full depth joins any. Prompts with layers of their own join the
    first forward (see `token_rows`).
    """
    if len({chunk.layers for chunk in chunks}) == 1:  # as in most steps
        return [chunks]
    others = [chunk for chunk in chunks if not chunk.has_explicit_layers]
    chains: list[list[tuple[int, ...]]] = []
    for layers in sorted({chunk.layers for chunk in others}, key=len, reverse=True):
        wider = [chain for chain in chains if set(layers) <= set(chain[-1])]
        if wider:
            min(wider, key=lambda chain: len(chain[-1])).append(layers)
        else:
            chains.append([layers])
    if len(chains) < 2:
        return [chunks] if chunks else []
    parts = [[chunk for chunk in others if chunk.layers in chain] for chain in chains]
    return [[chunk for chunk in chunks if chunk.has_explicit_layers] + parts[0], *parts[1:]]


class Span(NamedTuple):
    """Successive tokens of a sequence that run the layers `run` and store keys and values in the layers `held`.

    `group`: 0 for tokens that choose no next token, 1 for last tokens of prompts with layers of their own, 2 for all
    others. `scored`: of a prompt, and the logits are needed.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    start: int
    run: tuple[int, ...]
    held: tuple[int, ...]
    group: int
    scored: bool = False


class TokenRows(NamedTuple):
    """The rows of one forward. A row is a token: its id, its slot (the sequence's place in the KV store), its position.

    `num_logits` rows at the end need logits; the last `num_sampled` of them choose next tokens. `scored` are spans of
    prompts whose tokens are scored, each with the number of its first row with logits. `bridged`: the first row that
    takes the bridges of the layers that it skips. `tops`, if given, has for each row with logits the number of top
    tokens whose logits are enough. `context_rows` is that of `StackInput`, and `prompt` are the layers that prompt
    tokens run, if these are a set of their own.
    """

    tokens: list[int]
    slots: list[int]
    positions: list[int]
    layers: list[LayerRows]
    num_logits: int
    num_sampled: int = 0
    scored: tuple[tuple[int, Span], ...] = ()
    bridged: int = 0
    tops: list[int] | None = None
    context_rows: list[list[int]] | None = None
    prompt: tuple[int, ...] | None = None


def token_rows(chunks: list[Chunk], num_layers: int, context_tokens: int = 0) -> tuple[TokenRows, list[Span]]:
    """Make the rows of a forward; returns them, and the spans that choose next tokens, in the order of the last rows.

    The rows of a layer are neighbours. First come prompt tokens before the last, those that hold the fewest layers
    first; then last tokens of prompts with layers of their own; then all other tokens, the deepest first. This needs
    nested layer sets, except that prompts may have one set of their own (`PromptLayers.explicit`) if no other prompts
    are in the forward: their last tokens hold all layers that the tokens before them hold.

    If such a prompt is split, the last `context_tokens` tokens of a part run again with the next part, whose first
    tokens need their states; they store the same keys and values again, bit for bit.

    Prompt tokens that are scored run the top layer too, if the prompt does. Tokens behind them may run it in vain.
    """
    prompt = next((chunk.sequence.prompt for chunk in chunks if chunk.has_explicit_layers), None)
    context_tokens = context_tokens if prompt else 0
    spans = [span for chunk in chunks for span in _spans(chunk, context_tokens)]
    spans.sort(key=lambda span: (span.group, -len(span.held) if span.group else len(span.held), span.scored))
    slots = [span.sequence.slot for span in spans for _ in span.tokens]
    positions = [span.start + i for span in spans for i in range(len(span.tokens))]
    sampled = [span for span in spans if span.group]
    tops = [span.sequence.sampler.top for span in sampled for _ in span.tokens]
    starts = accumulate((len(span.tokens) for span in spans), initial=0)
    scored = [(row, span) for row, span in zip(starts, spans, strict=False) if span.scored]
    first_sampled = len(slots) - len(tops)
    first_logits = scored[0][0] if scored else first_sampled
    rows = TokenRows(
        [token for span in spans for token in span.tokens],
        slots,
        positions,
        _layer_rows(spans, num_layers),
        num_logits=len(slots) - first_logits,
        num_sampled=len(tops),
        scored=tuple((row - first_logits, span) for row, span in scored),
        bridged=first_sampled if prompt else 0,
        # One row that takes all logits has the whole head read, and the others have theirs for next to nothing.
        tops=tops if all(tops) and not scored else None,
        context_rows=_context_rows(slots, positions, context_tokens) if context_tokens else None,
        prompt=prompt.run if prompt else None,
    )
    return rows, sampled


def _spans(chunk: Chunk, context_tokens: int) -> Iterator[Span]:
    """Split a chunk into generated tokens; or a prompt's last token, the tokens before it, the context before those.

    In the top layer, prompt tokens before the last only store keys and values, unless they are scored: nothing else
    reads the layer's output.
    """
    sequence, tokens, start, layers = chunk
    prompt, text = sequence.prompt, sequence.request.prompt
    if start >= len(text):
        yield Span(sequence, tokens, start, layers, layers, 2)
        return
    if chunk.end == len(text):
        yield Span(sequence, tokens[-1:], chunk.end - 1, layers, layers, 1 if prompt.explicit else 2)
        tokens = tokens[:-1]
    if not tokens:
        return
    run = prompt.run[:-1] if prompt.run[-1] == layers[-1] else prompt.run
    scored = sequence.request.scores_prompt
    yield Span(sequence, tokens, start, prompt.run if scored else run, layers, 0, scored)
    if context_tokens and start:
        begin = max(0, start - context_tokens)
        yield Span(sequence, text[begin:start], begin, run, run, 0)


def _layer_rows(spans: list[Span], num_layers: int) -> list[LayerRows]:
    """Find the rows of each layer, if the rows are in the order of the spans."""
    stored, runs, ends = [0] * num_layers, [-1] * num_layers, [0] * num_layers
    row = 0
    for (run, held), alike in groupby(spans, key=attrgetter("run", "held")):
        begin, row = row, row + sum(len(span.tokens) for span in alike)
        for layer in held:
            stored[layer] = stored[layer] if ends[layer] else begin
            ends[layer] = row
        for layer in run:
            runs[layer] = begin if runs[layer] < 0 else runs[layer]
    return [LayerRows(s, e if r < 0 else r, e) for s, r, e in zip(stored, runs, ends, strict=True)]


def _context_rows(slots: list[int], positions: list[int], context_tokens: int) -> list[list[int]]:
    """Map each row of a forward to the rows of the `context_tokens` tokens before it; -1 where there is none."""
    rows = {token: row for row, token in enumerate(zip(slots, positions, strict=True))}
    return [[rows.get((slot, position - n), -1) for n in range(1, context_tokens + 1)] for slot, position in rows]
