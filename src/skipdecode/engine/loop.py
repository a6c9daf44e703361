"""The decode loop: admit, one forward, emit. Subclasses define the forward and the store of keys and values."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from skipdecode.engine.base import Engine, NextToken
from skipdecode.engine.batch import Chunk
from skipdecode.engine.depth import DepthOrder
from skipdecode.engine.requests import StepOutput
from skipdecode.engine.scheduler import PROMPT_TOKENS, Scheduler
from skipdecode.engine.sequence import Sequence
from skipdecode.schedule import Schedule

__all__ = ["DecodeLoop"]


class DecodeLoop(Engine):
    """Continuous batching: sequences of any age share a forward, and prompts join it in chunks.

    Parameters
    ----------
    schedule : Schedule
        The layers that run.
    max_rows : int
        Maximum number of sequences in a forward.
    join_below : float
        See `Scheduler`: 0 admits in whole groups, 1 is continuous batching.
    in_order : bool
        Admit in order of submission instead of by length.
    prompt_tokens : int
        Maximum prompt tokens of one forward. It bounds the buffers, and the time that a sequence waits for its next
        token.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        max_rows: int = 8,
        join_below: float = 0.0,
        in_order: bool = False,
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> None:
        super().__init__(schedule)
        self._order = DepthOrder(schedule)
        self._prompt_tokens = prompt_tokens
        self._scheduler = Scheduler(max_rows, join_below, in_order=in_order)
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def rows(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def takes(self, schedule: Schedule) -> bool:
        """See `Engine`: schedules that drop layers in this engine's order."""
        return self._order.takes(schedule)

    def close(self) -> None:
        for sequence in self._prefilling + self._decoding:
            self._leave(sequence)
        self._prefilling, self._decoding = [], []
        self._scheduler.clear()

    def cancel(self, number: int) -> None:
        """See `Engine`; the pages of the sequence are free at once."""
        for sequences in (self._prefilling, self._decoding):
            for sequence in sequences:
                if sequence.number == number:
                    sequences.remove(sequence)
                    self._leave(sequence)
                    return
        self._scheduler.drop(number)

    def step(self) -> list[StepOutput]:
        """Admit sequences, then run one forward: a part of the waiting prompts, and one token of every other sequence.

        Prompts with layers of their own have a separate forward. If it gives no token, a decode step follows at once.
        """
        start = self.clock()
        for sequence in self._scheduler.admit(self.rows, self._free_pages()):
            self._join(sequence)
            self._prefilling.append(sequence)
        prefill = self._next_prefill()
        outputs: list[StepOutput] = []
        if prefill and prefill[0][0].prompt.own:
            outputs, prefill = self._forward(prefill), []
        if not outputs and (prefill or self._decoding):
            outputs = self._forward(prefill + [(sequence, (sequence.output[-1],)) for sequence in self._decoding])
        self.stats.seconds += self.clock() - start
        return outputs

    # ------------------------------------------------------------------ what subclasses say

    @abstractmethod
    def _run(self, chunks: list[Chunk]) -> tuple[list[Sequence], Any]:
        """One forward over the chunks; returns the sequences that get a token, and the input of `_choose`."""

    @abstractmethod
    def _choose(self, due: list[Sequence], predicted: Any) -> list[NextToken]:
        """The next token of each sequence."""

    def _free_pages(self) -> int | None:
        """Free pages of keys and values for new sequences; None: unlimited."""
        return None

    def _join(self, sequence: Sequence) -> None:  # without keys and values there is nothing to do
        """Reserve memory for an admitted sequence."""

    def _leave(self, sequence: Sequence) -> None:
        """Free the memory of an admitted sequence."""

    def _drop(self, sequence: Sequence, layers: list[int]) -> None:
        """Free the pages of layers that a sequence will not run again."""

    def _starts(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        """Whether a sequence's next prompt tokens run now, with `chunks`; a prefix cache may move `sequence.ran`."""
        return True

    # ------------------------------------------------------------------ one forward

    def _enqueue(self, schedule: Schedule, new: list[Sequence]) -> None:
        """Refuses schedules that drop layers in another order."""
        self._order.check(schedule)
        self._scheduler.submit(new)

    def _next_prefill(self) -> list[Chunk]:
        """The prompt chunks of the next forward: up to `prompt_tokens` tokens, first come, first served."""
        chunks: list[Chunk] = []
        room = self._prompt_tokens
        own = self._prefilling[0].prompt if self._prefilling and self._prefilling[0].prompt.own else None
        for sequence in self._prefilling:
            if not room:
                break
            if sequence.prompt != own and (own is not None or sequence.prompt.own):
                continue
            if self._starts(sequence, chunks):
                chunks.append((sequence, sequence.request.prompt[sequence.ran : sequence.ran + room]))
                room -= len(chunks[-1][1])
        return chunks

    def _forward(self, chunks: list[Chunk]) -> list[StepOutput]:
        """Run prompt chunks and tokens of decoding sequences; returns the outputs of sequences that get a token."""
        start = self.clock()
        for sequence, _ in chunks:
            if sequence.output:
                self._fall(sequence)
        due, predicted = self._run(chunks)
        for sequence, tokens in chunks:
            sequence.ran += len(tokens)
        self._count(chunks, self.clock() - start)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.in_prefill]
        self._decoding += [sequence for sequence in due if not sequence.output]
        outputs = self._emit(due, self._choose(due, predicted), start) if due else []
        for sequence in due:
            if sequence.finish_reason is not None:
                self._decoding.remove(sequence)
                self._leave(sequence)
        return outputs

    def _fall(self, sequence: Sequence) -> None:
        """Drop the layers that the next token of a decoding sequence does not run."""
        layers = self._order.layers(sequence.next_budget)
        if layers != sequence.layers:
            keep = set(layers)
            self._drop(sequence, [layer for layer in sequence.layers if layer not in keep])
            sequence.layers = layers

    def _count(self, chunks: list[Chunk], seconds: float) -> None:
        """Update the statistics; the time of a forward is split between prefill and decode by tokens x layers."""
        stats, depths = self.stats, [len(sequence.layers) for sequence, _ in chunks if sequence.output]
        prompts = [(len(tokens), len(sequence.prompt.run)) for sequence, tokens in chunks if not sequence.output]
        layers, prompt_layers = sum(depths), sum(tokens * depth for tokens, depth in prompts)
        stats.prompt_tokens += sum(tokens for tokens, _ in prompts)
        stats.prompt_seconds += seconds * prompt_layers / (layers + prompt_layers)
        if depths:
            stats.steps += 1
            stats.fed_tokens += len(depths)
            stats.token_layers += layers
            stats.layer_reads += max(depths)
