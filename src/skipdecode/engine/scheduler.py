"""Decides which sequences join the batch, and when, and builds the rows of a forward of their tokens. Pure Python.

A batch job admits sequences in groups of similar length. The sequences of a group start together, so their depths fall
together and they end at similar times. Finished sequences leave at once. The next group joins when few sequences are
left (`refill_below`). These run few layers by then, and the new sequences need those layers anyway. `refill_below=1` is
continuous batching: a free slot is filled at once. `refill_below=0` is static batching: a group starts only when all
sequences have ended.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple, Self

from skipdecode.engine.sequence import Sequence
from skipdecode.errors import UsageError

PROMPT_TOKENS = 512
"""Maximum prompt tokens of one forward in batch jobs."""
REFILL_BELOW = 0.25
"""In batch jobs, the next group joins when at most this share of the slots is in use. Measured in docs/LOG.md."""
_LENGTH = attrgetter("length")


class Scheduler:
    """A queue that admits sequences in groups of similar length.

    `max_rows`: maximum number of running sequences. `refill_below`: a new group joins when at most this share of
    `max_rows` is running. `in_order`: admit in order of submission (a queue of users), not by length (a batch job).
    """

    def __init__(self, max_rows: int, refill_below: float = 0.0, *, in_order: bool = False) -> None:
        if max_rows < 1:
            raise UsageError(f"max_rows={max_rows} is not accepted: give 1 or more")
        if not 0 <= refill_below <= 1:
            raise UsageError(f"refill_below={refill_below} is not accepted: give a number from 0 (static) to 1")
        self.max_rows = max_rows
        self.refill_below = refill_below
        self.in_order = in_order
        # Only one of the two is used; both give the next request in constant time.
        self._queue: deque[Sequence] = deque()
        self._sorted: list[Sequence] = []

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences."""
        if self.in_order:
            self._queue.extend(sequences)
            return
        new = list(sequences)
        if len(new) > len(self._sorted):
            self._sorted = sorted(self._sorted + new, key=_LENGTH)
            return
        for sequence in new:
            bisect.insort(self._sorted, sequence, key=_LENGTH)

    def drop(self, number: int) -> None:
        """Forget a sequence that was not admitted yet."""
        self._queue = deque(sequence for sequence in self._queue if sequence.number != number)
        self._sorted = [sequence for sequence in self._sorted if sequence.number != number]

    def clear(self) -> None:
        """Forget all sequences that were not admitted yet."""
        self._queue.clear()
        self._sorted.clear()

    @property
    def waiting(self) -> int:
        """Sequences not yet admitted."""
        return len(self._queue) + len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences, in no particular order."""
        return iter((*self._queue, *self._sorted))

    def admit(self, running: int) -> list[Sequence]:
        """The sequences that join now, given the number of running sequences.

        In batch jobs the longest come first. The last groups then have short sequences, so few slots idle at the end.
        """
        if running and running > self.refill_below * (self.max_rows - 1):
            return []
        chosen: list[Sequence] = []
        while self.waiting and running + len(chosen) < self.max_rows:
            chosen.append(self._queue.popleft() if self.in_order else self._sorted.pop())
        return chosen


# ---------------------------------------------------------------------- the rows of a forward


class LayerRows(NamedTuple):
    """The rows of a forward in one layer.

    Rows `stored` to before `runs` only store keys and values, rows `runs` to before `end` run the layer. The others
    skip the layer.
    """

    stored: int
    runs: int
    end: int


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

    @property
    def has_own_layers(self) -> bool:
        """Whether the tokens are of a prompt with layers of its own."""
        return self.sequence.in_prefill and self.sequence.prompt.own


class TokenRows(NamedTuple):
    """The rows of one forward. A row is a token: its id, its slot (the sequence's place in the KV store), its position.

    `wanted`: the number of last rows, whose logits are needed. The last `due` of these say next tokens; `scored` are
    chunks of prompts whose tokens are scored, each with the number of its first wanted row.

    `bridged`: the first row that takes the bridges of the
    layers that it skips. `tops`, if given, has for each wanted row the number of top tokens whose logits are enough.
    `before` is that of `StackInput`, and `prompt` are the layers that prompt tokens run, if these are a set of their
    own.
    """

    tokens: list[int]
    slots: list[int]
    positions: list[int]
    layers: list[LayerRows]
    wanted: int
    bridged: int = 0
    tops: list[int] | None = None
    before: list[list[int]] | None = None
    prompt: tuple[int, ...] | None = None
    due: int = 0
    scored: tuple[tuple[int, Chunk], ...] = ()


class _Span(NamedTuple):
    """Successive tokens of a sequence that run the layers `run` and store keys and values in the layers `held`.

    `place`: 0 for tokens that say no next token, 1 for last tokens of prompts with layers of their own, 2 for all
    others. `scored`: of a prompt, and the logits are needed.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    start: int
    run: tuple[int, ...]
    held: tuple[int, ...]
    place: int
    scored: bool = False


def forwards(chunks: list[Chunk]) -> list[list[Chunk]]:
    """The chunks of each forward of a step: within one, layer sets are nested, so that rows of a layer are neighbours.

    Schedules of one drop order share a forward, and full depth joins any. Prompts with layers of their own join the
    first forward (see `token_rows`).
    """
    if len({chunk.layers for chunk in chunks}) == 1:  # as in most steps
        return [chunks]
    others = [chunk for chunk in chunks if not chunk.has_own_layers]
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
    return [[chunk for chunk in chunks if chunk.has_own_layers] + parts[0], *parts[1:]]


def token_rows(chunks: list[Chunk], num_layers: int, taps: int = 0) -> tuple[TokenRows, list[Sequence]]:
    """The rows of a forward, and the sequences that get a token, in the order of the wanted rows.

    The rows of a layer are neighbours. First come prompt tokens before the last, those that hold the fewest layers
    first; then last tokens of prompts with layers of their own; then all other tokens, the deepest first. This needs
    nested layer sets, except that prompts may have one set of their own (`PromptLayers.own`) if no other prompts are
    in the forward: their last tokens hold all layers that the tokens before them hold.

    If such a prompt is split, the last `taps` tokens of a part run again with the next part, whose first tokens need
    their states; they store the same keys and values again, bit for bit.

    Prompt tokens that are scored run the top layer too, if the prompt does. Tokens behind them may run it in vain.
    """
    own = next((c.sequence.prompt for c in chunks if c.sequence.in_prefill and c.sequence.prompt.own), None)
    spans = [span for chunk in chunks for span in _spans(chunk, taps if own else 0)]
    spans.sort(key=lambda span: (span.place, -len(span.held) if span.place else len(span.held), span.scored))
    tokens = [token for span in spans for token in span.tokens]
    slots = [span.sequence.slot for span in spans for _ in span.tokens]
    positions = [span.start + i for span in spans for i in range(len(span.tokens))]
    wanted = [span for span in spans if span.place]
    tops = [span.sequence.sampler.top for span in wanted for _ in span.tokens]
    scored = _scored(spans)
    first = scored[0][0] if scored else len(tokens) - len(tops)
    layers = _layer_rows(spans, num_layers)
    batch = TokenRows(tokens, slots, positions, layers, len(tokens) - first, due=len(tops))
    if scored:
        batch = batch._replace(scored=tuple((row - first, chunk) for row, chunk in scored))
    if own is not None:
        before = _rows_before(slots, positions, taps) if taps else None
        batch = batch._replace(bridged=len(tokens) - len(tops), before=before, prompt=own.run)
    # One row that takes all logits has the whole head read, and the others have theirs for next to nothing.
    return batch._replace(tops=tops if all(tops) and not scored else None), [span.sequence for span in wanted]


def _scored(spans: list[_Span]) -> list[tuple[int, Chunk]]:
    """The chunks of prompts whose tokens are scored, each with the number of its first row."""
    if not any(span.scored for span in spans):  # as in nearly every step
        return []
    begins = accumulate((len(span.tokens) for span in spans), initial=0)
    return [
        (begin, Chunk(span.sequence, span.tokens, span.start, span.run))
        for begin, span in zip(begins, spans, strict=False)
        if span.scored
    ]


def _spans(chunk: Chunk, taps: int) -> Iterator[_Span]:
    """The spans of a chunk: generated tokens; or a prompt's last token, the tokens before it, the taps before those.

    In the top layer, prompt tokens before the last only store keys and values, unless they are scored: nothing else
    reads the layer's output.
    """
    sequence, tokens, start, layers = chunk
    prompt, text = sequence.prompt, sequence.request.prompt
    if start >= len(text):
        yield _Span(sequence, tokens, start, layers, layers, 2)
        return
    if chunk.end == len(text):
        yield _Span(sequence, tokens[-1:], chunk.end - 1, layers, layers, 1 if prompt.own else 2)
        tokens = tokens[:-1]
    run = prompt.run[:-1] if prompt.run[-1] == layers[-1] else prompt.run
    if tokens:
        scored = sequence.request.scores_prompt
        yield _Span(sequence, tokens, start, prompt.run if scored else run, layers, 0, scored)
    if tokens and taps and start:
        begin = max(0, start - taps)
        yield _Span(sequence, text[begin:start], begin, run, run, 0)


def _layer_rows(spans: list[_Span], num_layers: int) -> list[LayerRows]:
    """The rows of each layer, if the rows are in the order of the spans."""
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


def _rows_before(slots: list[int], positions: list[int], taps: int) -> list[list[int]]:
    """Map each row of a forward to the rows of the `taps` tokens before it; -1 where there is none."""
    places = {place: row for row, place in enumerate(zip(slots, positions, strict=True))}
    return [[places.get((slot, position - tap), -1) for tap in range(1, taps + 1)] for slot, position in places]
