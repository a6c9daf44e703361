"""The engine on the package's own C++ kernels: admit, draft, one forward, emit. Keys and values are in pages."""

from __future__ import annotations

import time
from operator import eq
from typing import Any

import torch
from torch import Tensor

from skipdecode.common.environment import isolated_torch
from skipdecode.engine.base import Engine, NextToken
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kv import PagedKV
from skipdecode.engine.requests import StepOutput
from skipdecode.engine.sampling import Predicted, Sampler, scores
from skipdecode.engine.scheduler import PROMPT_TOKENS, Chunk, Scheduler, forwards, token_rows
from skipdecode.engine.sequence import Sequence
from skipdecode.schedule import Schedule

Drafts = dict[Sequence, tuple[int, ...]]
"""Drafts of a step by sequence."""


class FastEngine(Engine):
    """Decodes requests on the package's own kernels, on CPUs, with continuous batching.

    Sequences of any age and schedule share a step, and prompts join it in chunks.

    Raises UnfitModelError: the model has no fast path, or the kernels cannot run here; ScheduleError: the schedule is
    for another number of layers.

    Parameters
    ----------
    model : PreTrainedModel or FastModel
        A causal LM with a fast path (`model_spec.READERS`); its projection weights are fused in place.
    schedule : Schedule
        The layers that run.
    max_rows : int
        Maximum number of sequences in a step.
    refill_below : float
        See `Scheduler`: 0 admits in whole groups, 1 is continuous batching.
    in_order : bool
        Admit in order of submission instead of by length.
    prompt_tokens : int
        Maximum prompt tokens of one forward. It bounds the buffers, and the time that a sequence waits for its next
        token.
    prefix_cache : bool
        Keep keys and values of prompts, and reuse them for prompts with the same beginning and the same prompt layers
        (`skipdecode.engine.prefix`). The output does not change.
    """

    scores_prompts = True

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        *,
        max_rows: int = 8,
        refill_below: float = 0.0,
        in_order: bool = False,
        prompt_tokens: int = PROMPT_TOKENS,
        prefix_cache: bool = False,
    ) -> None:
        self.model = model if isinstance(model, FastModel) else open_model(model)
        self.name = self.model.name
        self.model.check(schedule)
        super().__init__(schedule)
        self.planner = self.model.planner
        self.kv: PagedKV = self.model.new_kv(prefix_cache)
        self._prefix_cache = prefix_cache and not self.model.rings
        self._prompt_tokens = prompt_tokens
        self._scheduler = Scheduler(max_rows, refill_below, in_order=in_order)
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []

    @property
    def kv_bytes(self) -> int:
        return self.kv.bytes_held

    @property
    def cached_bytes(self) -> int:
        return self.kv.cached_bytes

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def rows(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def close(self) -> None:
        for sequence in self._prefilling + self._decoding:
            self.kv.close(sequence.slot)
        self._prefilling, self._decoding = [], []
        self._scheduler.clear()

    def cancel(self, number: int) -> None:
        """Cancel a sequence as in `Engine`; its pages are free at once."""
        for sequences in (self._prefilling, self._decoding):
            for sequence in sequences:
                if sequence.number == number:
                    sequences.remove(sequence)
                    self.kv.close(sequence.slot)
                    return
        self._scheduler.drop(number)

    @isolated_torch()
    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Admit sequences, then run a part of the waiting prompts, and one token of every other sequence.

        That is one forward, unless schedules of several drop orders run (see `forwards`). Drafts are checked in it.
        """
        start = time.perf_counter()
        for sequence in self._scheduler.admit(self.rows):
            self._join(sequence)
            if sequence.request.exact:
                sequence.drafter = self.planner.drafter(sequence.request.prompt, sequence.request.cache_salt)
            self._prefilling.append(sequence)
        chunks, drafted = self._next_prefill(), self._draft()
        for sequence in self._decoding:
            self._fall(sequence)
            if forced := sequence.forced_tokens:
                drafted[sequence] = forced
            tokens = sequence.output[-1], *drafted.get(sequence, ())
            chunks.append(Chunk.following(sequence, tokens))
        outputs = [out for part in forwards(chunks) for out in self._forward(part, drafted)]
        self.stats.step_seconds += time.perf_counter() - start
        return outputs

    # ------------------------------------------------------------------ keys and values

    def _enqueue(self, schedule: Schedule, new: list[Sequence]) -> None:
        """Refuses sequences that are too long for the model, or have tokens outside its vocabulary."""
        self.model.check(schedule)
        for sequence in new:
            self.model.ensure_positions(sequence.total_tokens)
            sequence.request.check_vocabulary(self.model.vocab_size)
            sequence.pages = self.kv.most_pages(sequence)
        self._scheduler.submit(new)

    def _join(self, sequence: Sequence) -> None:
        """Reserve memory for an admitted sequence, and make its sampler."""
        used = sum(each.pages for each in self._prefilling + self._decoding)
        pages = used + sequence.pages + self.kv.cached_bytes // self.kv.layout.page_bytes
        self.kv.reserve(self._scheduler.max_rows, sequence.total_tokens, pages)
        sequence.slot = self.kv.open(sequence.request.cache_salt)
        sequence.sampler = Sampler.of(sequence.request)

    def _starts(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        """Whether a sequence's next prompt tokens run now, with `chunks`; the prefix cache may move `sequence.ran`."""
        if not self._prefix_cache or sequence.request.scores_prompt:
            return True
        ran = self.kv.match(sequence.slot, sequence.prompt, sequence.request.prompt, sequence.ran)
        self.stats.prefix_hit_tokens += ran - sequence.ran
        sequence.cached += ran - sequence.ran
        sequence.ran = ran
        return not any(self._is_ahead(chunk, sequence) for chunk in chunks)

    def _is_ahead(self, chunk: Chunk, sequence: Sequence) -> bool:
        """Whether the chunk of another sequence has the next page of this prompt, so that waiting lets it be shared."""
        other = chunk.sequence
        prompt, end = sequence.request.prompt, sequence.ran + self.kv.layout.page_tokens
        return (
            sequence.ran % self.kv.layout.page_tokens == 0
            and chunk.start <= sequence.ran
            and end <= chunk.end
            and end < len(prompt)
            and other.prompt == sequence.prompt
            and other.request.cache_salt == sequence.request.cache_salt
            and other.request.prompt[:end] == prompt[:end]
        )

    # ------------------------------------------------------------------ one forward

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

    def _run(self, chunks: list[Chunk]) -> tuple[list[Sequence], Predicted]:
        """Run one forward over the chunks: the sequences that get tokens with it, and their tokens.

        Rows that say a next token are those of the sequences in this order: of each one row for every token that it
        ran, of a prompt one.
        """
        pages = self.kv.layout.pages
        for chunk in chunks:
            # From the second new token on, most tokens lie in a page that the sequence has.
            if len(chunk.sequence.output) < 2 or pages(chunk.end) > pages(chunk.start):
                self.kv.extend(chunk.sequence.slot, chunk.layers, chunk.end)
        batch, due = token_rows(chunks, self.num_layers, self.model.taps)
        if self.fills_prompts and batch.wanted < len(batch.tokens):
            self.kv.fill()
            return due, Predicted(torch.zeros(batch.wanted, self.model.vocab_size))
        logits = self.model.forward(batch, self.kv)
        self.stats.short_heads += isinstance(logits, Candidates)
        self.stats.head_fallbacks += self.model.head.fell_back
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.output:
                # The last prompt token of such a prompt runs more layers than the others, so it is not shared.
                prompt = sequence.request.prompt[:-1] if sequence.prompt.own else sequence.request.prompt
                self.kv.keep(sequence.slot, sequence.prompt, prompt, chunk.end)
        if batch.scored and isinstance(logits, Tensor):
            for row, chunk in batch.scored:
                self._score(chunk, logits[row : row + len(chunk.tokens)])
            logits = logits[batch.wanted - batch.due :]
        return due, Predicted(logits)

    @staticmethod
    def _score(chunk: Chunk, logits: Tensor) -> None:
        """Note the log-probabilities of the prompt tokens that follow a chunk's tokens."""
        request = chunk.sequence.request
        following = request.prompt[chunk.start + 1 : chunk.end + 1]
        chunk.sequence.scores += scores(logits, following, request.sampling.top_logprobs)

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
                self.kv.close(sequence.slot)
                if sequence.drafter is not None:
                    request = sequence.request
                    self.planner.remember(request.prompt, sequence.output, request.cache_salt)
        return outputs

    def _chosen(self, due: list[Sequence], predicted: Predicted, drafted: Drafts) -> list[tuple[Sequence, NextToken]]:
        """The next tokens of each sequence: its accepted drafts, and one more."""
        chosen: list[tuple[Sequence, NextToken]] = []
        row = 0
        for sequence in due:
            drafts, before = drafted.get(sequence, ()), len(chosen)
            for place in range(len(drafts) + 1):
                token = predicted.token(row + place, sequence.sampler)
                chosen.append((sequence, token))
                if token.token in sequence.request.stop_ids or token.token not in drafts[place : place + 1]:
                    break
            row += len(drafts) + 1
            came = [token.token for _, token in chosen[before:]]
            # Keys and values of rejected drafts stay in the pages and are overwritten.
            sequence.ran -= len(drafts) + 1 - len(came)
            self._learn(sequence, drafts, came)
        return chosen

    # ------------------------------------------------------------------ drafts

    def _draft(self) -> Drafts:
        """Draft as many tokens of the sequences as the planner says; all tokens of a sequence run the same layers."""
        rows, drafting = len(self._decoding), [(s, s.drafter) for s in self._decoding if s.drafter is not None]
        if not drafting:
            return {}
        depth = round(sum(len(sequence.next_layers) for sequence in self._decoding) / rows)
        most = self.model.most_drafts
        counts = self.planner.plan(rows, depth, (sequence.look(drafter, most) for sequence, drafter in drafting))
        return {sequence: drafter.found[: counts[drafter]] for sequence, drafter in drafting if drafter in counts}

    def _learn(self, sequence: Sequence, drafts: tuple[int, ...], came: list[int]) -> None:
        """Learn from the drafts and new tokens of a sequence."""
        if sequence.drafter is not None:
            sequence.drafter.learn(came)
        if drafts:
            self.stats.drafted_tokens += len(drafts)
            self.stats.accepted_tokens += sum(map(eq, drafts, came))
            self.stats.fed_tokens += len(came) - 1
            self.stats.token_layers += (len(came) - 1) * len(sequence.layers)

    def _fall(self, sequence: Sequence) -> None:
        """Drop the layers that the next token of a decoding sequence does not run."""
        layers = sequence.next_layers
        if layers != sequence.layers:
            keep = set(layers)
            self.kv.drop(sequence.slot, [layer for layer in sequence.layers if layer not in keep])
            sequence.layers = layers

    def _count(self, chunks: list[Chunk], seconds: float) -> None:
        """Note what a forward did; its time is split between prefill and decode in proportion to tokens x layers."""
        stats, depths = self.stats, [len(c.layers) for c in chunks if c.sequence.output for _ in c.tokens]
        prompts = [(len(c.tokens), len(c.sequence.prompt.run)) for c in chunks if not c.sequence.output]
        layers, prompt_layers = sum(depths), sum(tokens * depth for tokens, depth in prompts)
        if depths and not prompts:
            self.planner.forwards[round(layers / len(depths))].note(len(depths), seconds)
        stats.prompt_tokens += sum(tokens for tokens, _ in prompts)
        stats.prompt_layers += prompt_layers
        stats.prompt_seconds += seconds * prompt_layers / (layers + prompt_layers)
        if depths:
            stats.steps += 1
            stats.fed_tokens += len(chunks) - len(prompts)
            stats.token_layers += sum(len(c.layers) for c in chunks if c.sequence.output)
        pages = (
            sum(self.kv.layout.pages(sequence.ran) for sequence in self._prefilling + self._decoding) - self.kv.overlap
        )
        full = pages * (self.num_layers - len(self.kv.rings)) + self.rows * len(self.kv.rings)
        self.stats.note_kv(self.kv.bytes_held, full * self.kv.layout.page_bytes)
