"""The decode loop: admit, draft, one forward, emit. Subclasses say what a forward is and where keys and values lie."""

from __future__ import annotations

import time
from abc import abstractmethod
from operator import eq
from typing import Any

from skipdecode.engine.base import Engine, NextToken
from skipdecode.engine.batch import Chunk, forwards
from skipdecode.engine.drafts import Planner
from skipdecode.engine.requests import StepOutput
from skipdecode.engine.scheduler import PROMPT_TOKENS, Scheduler
from skipdecode.engine.sequence import Sequence
from skipdecode.schedule import Schedule

Drafts = dict[Sequence, tuple[int, ...]]
"""Drafts of a step by sequence."""


class DecodeLoop(Engine):
    """Continuous batching: sequences of any age share a forward, and prompts join it in chunks.

    Parameters
    ----------
    schedule : Schedule
        The layers that run.
    max_rows : int
        Maximum number of sequences in a forward.
    refill_below : float
        See `Scheduler`: 0 admits in whole groups, 1 is continuous batching.
    in_order : bool
        Admit in order of submission instead of by length.
    prompt_tokens : int
        Most prompt tokens of one forward: bounds the buffers, and how long a sequence waits for its next token.

    Attributes
    ----------
    planner : Planner
        Says how many tokens exact sequences draft.
    """

    drafts = True

    def __init__(
        self,
        schedule: Schedule,
        *,
        max_rows: int = 8,
        refill_below: float = 0.0,
        in_order: bool = False,
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> None:
        super().__init__(schedule)
        self._prompt_tokens = prompt_tokens
        self._scheduler = Scheduler(max_rows, refill_below, in_order=in_order)
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self.planner = Planner()

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def rows(self) -> int:
        return len(self._decoding) + len(self._prefilling)

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
        """Admit sequences, then run a part of the waiting prompts, and one token of every other sequence.

        That is one forward, unless schedules of several drop orders run (see `forwards`). Drafts of exact sequences run
        before it, and are checked in it.
        """
        start = time.perf_counter()
        for sequence in self._scheduler.admit(self.rows):
            self._join(sequence)
            if sequence.drafting is not None:
                sequence.drafter = self.planner.drafter(sequence.drafting, sequence.request.prompt)
            self._prefilling.append(sequence)
        chunks, drafted = self._next_prefill(), self._draft()
        for sequence in self._decoding:
            self._fall(sequence)
            tokens = sequence.output[-1], *drafted.get(sequence, ())
            chunks.append(Chunk.following(sequence, tokens))
        outputs = [out for part in forwards(chunks) for out in self._forward(part, drafted)]
        self.stats.step_seconds += time.perf_counter() - start
        return outputs

    # ------------------------------------------------------------------ what subclasses say

    @abstractmethod
    def _run(self, chunks: list[Chunk], *, drafting: bool = False) -> tuple[list[Sequence], Any]:
        """One forward over the chunks: the sequences that get tokens with it, and what `_choose` takes.

        Rows that say a next token are those of the sequences in this order: of each one row for every token that it
        ran, of a prompt one.
        """

    @abstractmethod
    def _choose(self, predicted: Any, row: int, sampler: Any) -> NextToken:
        """The token that a sequence's sampler takes after a row."""

    @abstractmethod
    def _join(self, sequence: Sequence) -> None:
        """Reserve memory for an admitted sequence, and make its sampler."""

    @abstractmethod
    def _leave(self, sequence: Sequence) -> None:
        """Free the memory of an admitted sequence."""

    @abstractmethod
    def _drop(self, sequence: Sequence, layers: list[int]) -> None:
        """Free the pages of layers that a sequence will not run again."""

    @abstractmethod
    def _starts(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        """Whether a sequence's next prompt tokens run now, with `chunks`; a prefix cache may move `sequence.ran`."""

    # ------------------------------------------------------------------ one forward

    def _enqueue(self, schedule: Schedule, new: list[Sequence]) -> None:
        """Refuses schedules for another number of layers."""
        schedule.check_fits(self.num_layers)
        self._scheduler.submit(new)

    def _next_prefill(self) -> list[Chunk]:
        """The prompt chunks of the next forward: up to `prompt_tokens` tokens, first come, first served.

        If the first prompt has layers of its own, only prompts with the same layers join it (see `token_rows`).
        """
        chunks: list[Chunk] = []
        room = self._prompt_tokens
        own = self._prefilling[0].prompt if self._prefilling and self._prefilling[0].prompt.own else None
        for sequence in self._prefilling:
            if not room:
                break
            if sequence.prompt != own and (own is not None or sequence.prompt.own):
                continue
            if self._starts(sequence, chunks):
                tokens = sequence.request.prompt[sequence.ran : sequence.ran + room]
                chunks.append(Chunk.following(sequence, tokens))
                room -= len(tokens)
        return chunks

    def _forward(self, chunks: list[Chunk], drafted: Drafts) -> list[StepOutput]:
        """Run prompt chunks, and tokens of decoding sequences with their drafts; returns the outputs."""
        start = time.perf_counter()
        due, predicted = self._run(chunks)
        for chunk in chunks:
            chunk.sequence.ran = chunk.end
        self._count(chunks, time.perf_counter() - start)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.in_prefill]
        self._decoding += [sequence for sequence in due if not sequence.output]
        outputs = self._emit(self._chosen(due, predicted, drafted), start) if due else []
        for sequence in due:
            if sequence.finish_reason is not None:
                self._decoding.remove(sequence)
                self._leave(sequence)
        return outputs

    def _chosen(self, due: list[Sequence], predicted: Any, drafted: Drafts) -> list[tuple[Sequence, NextToken]]:
        """The next tokens of each sequence: its accepted drafts, and one more."""
        chosen: list[tuple[Sequence, NextToken]] = []
        row = 0
        for sequence in due:
            drafts, before = drafted.get(sequence, ()), len(chosen)
            for place in range(len(drafts) + 1):
                token = self._choose(predicted, row + place, sequence.sampler)
                chosen.append((sequence, token))
                if token.token in sequence.request.stop_ids or token.token not in drafts[place : place + 1]:
                    break
            row += len(drafts) + 1
            came = [token.token for _, token in chosen[before:]]
            # Keys and values of rejected drafts stay in the pages and are overwritten.
            sequence.ran -= len(drafts) + 1 - len(came)
            self._learn(sequence, drafts, came)
        return chosen

    # ------------------------------------------------------------------ exact sequences

    def _draft(self) -> Drafts:
        """Draft as many tokens of exact sequences as the planner says, from their texts or under their schedules."""
        exact = [sequence for sequence in self._decoding if sequence.drafting is not None]
        if not exact:
            return {}
        for sequence in exact:
            sequence.drafter.look(sequence.request.max_new_tokens - len(sequence.output) - 1)
        counts = self.planner.plan(len(self._decoding), [sequence.drafter for sequence in exact])
        wanted = {sequence: count for sequence, count in zip(exact, counts, strict=True) if count}
        drafted = {
            sequence: () if sequence.drafter.runs else sequence.drafter.found[:count]
            for sequence, count in wanted.items()
        }
        samplers = {sequence: sequence.sampler.fork() for sequence in wanted if sequence.drafter.runs}
        while chunks := [
            self._draft_chunk(sequence, drafted[sequence])
            for sequence in samplers
            if len(drafted[sequence]) < wanted[sequence]
        ]:
            for part in forwards(chunks):
                start = time.perf_counter()
                due, predicted = self._run(part, drafting=True)
                for row, sequence in enumerate(due):
                    draft = self._choose(predicted, row, samplers[sequence])
                    drafted[sequence] += (draft.token,)
                    if draft.logprob < self.planner.least_logprob:
                        del samplers[sequence]
                self.planner.drafts.note(len(part), time.perf_counter() - start)
                self.stats.token_layers += sum(len(chunk.layers) for chunk in part)
        return drafted

    def _draft_chunk(self, sequence: Sequence, drafts: tuple[int, ...]) -> Chunk:
        """The last token or draft, which runs the layers of its position under the schedule."""
        layers = sequence.drafter.schedule.layers(len(sequence.output) - 1 + len(drafts))
        token = drafts[-1] if drafts else sequence.output[-1]
        return Chunk(sequence, (token,), sequence.ran + len(drafts), layers)

    def _learn(self, sequence: Sequence, drafts: tuple[int, ...], came: list[int]) -> None:
        """Learn from the drafts and new tokens of a sequence."""
        if sequence.drafting is None:
            return
        sequence.drafter.learn(drafts, came)
        if drafts:
            self.stats.drafted_tokens += len(drafts)
            self.stats.accepted_tokens += sum(map(eq, drafts, came))
            self.stats.verified_tokens += len(came)
            self.stats.fed_tokens += len(came) - 1

    def _fall(self, sequence: Sequence) -> None:
        """Drop the layers that the next token of a decoding sequence does not run."""
        layers = sequence.schedule.layers(len(sequence.output) - 1)
        if layers != sequence.layers:
            keep = set(layers)
            self._drop(sequence, [layer for layer in sequence.layers if layer not in keep])
            sequence.layers = layers

    def _count(self, chunks: list[Chunk], seconds: float) -> None:
        """Note what a forward did; its time is split between prefill and decode in proportion to tokens x layers."""
        stats, depths = self.stats, [len(c.layers) for c in chunks if c.sequence.output for _ in c.tokens]
        prompts = [(len(c.tokens), len(c.sequence.prompt.run)) for c in chunks if not c.sequence.output]
        layers, prompt_layers = sum(depths), sum(tokens * depth for tokens, depth in prompts)
        if depths and not prompts and min(depths) == self.num_layers:
            self.planner.checks.note(len(depths), seconds)
        stats.prompt_tokens += sum(tokens for tokens, _ in prompts)
        stats.prompt_seconds += seconds * prompt_layers / (layers + prompt_layers)
        if depths:
            stats.steps += 1
            stats.fed_tokens += len(chunks) - len(prompts)
            stats.token_layers += layers
            stats.layer_reads += max(depths)
