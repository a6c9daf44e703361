"""The decode loop: admit, one forward, sample, emit. Token ids in, `StepOutput` out."""

from __future__ import annotations

import time
from typing import Any

import torch

from skipdecode.engine.base import Engine
from skipdecode.engine.batch import Chunk, token_rows
from skipdecode.engine.depth import DepthOrder
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kv import PagedKV
from skipdecode.engine.requests import StepOutput
from skipdecode.engine.sampling import Sampler, emit
from skipdecode.engine.scheduler import PROMPT_TOKENS, Scheduler
from skipdecode.engine.sequence import Sequence
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

__all__ = ["FastEngine"]


class FastEngine(Engine):
    """Decodes requests on the package's own kernels, on CPUs; rows of any age share a step.

    Parameters
    ----------
    model : PreTrainedModel or FastModel
        A causal LM with a fast path (`model_spec.READERS`); its projection weights are fused in place.
    schedule : Schedule
        Which layers run.
    max_rows : int
        Most rows of a step.
    join_below : float
        See `Scheduler`: 0 strict waves, 1 continuous.
    in_order : bool
        Admit in order of submission instead of by length.
    kv_bytes : int, optional
        Most bytes of keys and values; requests wait for room. Default: what `max_rows` of the largest requests need.
    prompt_tokens : int
        Most prompt tokens of one forward: bounds the buffers, and how long a row waits for its next token.
    prefix_cache : bool
        Keep prompts' keys and values, and run no token of a prompt that begins as one before did (see
        `skipdecode.engine.prefix`): the same tokens come out. Prompts share only what runs the same layers.

    Raises
    ------
    UnfitModelError
        If the model has no fast path, or the kernels cannot run here.
    ScheduleError
        If the schedule is for another number of layers.
    """

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        *,
        max_rows: int = 8,
        join_below: float = 0.0,
        in_order: bool = False,
        kv_bytes: int | None = None,
        prompt_tokens: int = PROMPT_TOKENS,
        prefix_cache: bool = False,
    ) -> None:
        self.model = model if isinstance(model, FastModel) else open_model(model)
        self.name = self.model.name
        schedule.check_fits(self.model.num_layers)
        super().__init__(schedule)
        self._order = DepthOrder(self.schedule)
        self._prompt_tokens = prompt_tokens
        self._scheduler = Scheduler(max_rows, join_below, in_order=in_order)
        self._prefix_cache = prefix_cache
        self.kv: PagedKV = self.model.new_kv(prefix_cache)
        self._kv_pages = None if kv_bytes is None else kv_bytes // self.kv.page_bytes
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []

    # ------------------------------------------------------------------ public

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def rows(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def kv_bytes(self) -> int:
        return self.kv.bytes_held

    @property
    def cached_bytes(self) -> int:
        return self.kv.cached_bytes

    def takes(self, schedule: Schedule) -> bool:
        """See `Engine`: schedules that drop layers in this engine's order."""
        return self._order.takes(schedule)

    def close(self) -> None:
        for sequence in self._prefilling + self._decoding:
            self.kv.close(sequence.slot)
        self._prefilling, self._decoding = [], []
        self._scheduler.clear()

    def cancel(self, number: int) -> None:
        """See `Engine`; the sequence's room is free at once."""
        for sequences in (self._prefilling, self._decoding):
            for sequence in sequences:
                if sequence.number == number:
                    sequences.remove(sequence)
                    self.kv.close(sequence.slot)
                    return
        self._scheduler.drop(number)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Admit what may join, then one forward: a part of the prompts that are due, and one token of every sequence.

        Prompts with layers of their own have a forward to themselves; decoding goes on after it if it gave no token.
        """
        start = time.perf_counter()
        self._admit()
        prefill = self._next_prefill()
        outputs: list[StepOutput] = []
        if prefill and prefill[0][0].prompt.own:
            outputs, prefill = self._forward(prefill), []
        if not outputs and (prefill or self._decoding):
            outputs = self._forward(prefill + [(sequence, (sequence.output[-1],)) for sequence in self._decoding])
        self.stats.seconds += time.perf_counter() - start
        return outputs

    # ------------------------------------------------------------------ admission

    def _enqueue(self, schedule: Schedule, new: list[Sequence]) -> None:
        """Refuses sequences that drop layers in another order, are too long for the model or for `kv_bytes`, or have
        tokens outside its vocabulary.
        """
        self._order.check(schedule)
        for sequence in new:
            self.model.ensure_positions(sequence.total_tokens)
            sequence.request.check_vocabulary(self.model.vocab_size)
            sequence.pages = self.kv.most_pages(sequence)
            if self._kv_pages is not None and sequence.pages > self._kv_pages:
                raise UsageError(
                    f"a request of {len(sequence.request.prompt)} + {sequence.request.max_new_tokens} tokens may hold "
                    f"{sequence.pages * self.kv.page_bytes} bytes of keys and values, but kv_bytes allows "
                    f"{self._kv_pages * self.kv.page_bytes}"
                )
        self._scheduler.submit(new)

    def _admit(self) -> None:
        used = sum(sequence.pages for sequence in self._prefilling + self._decoding)
        free = None if self._kv_pages is None else self._kv_pages - used
        for sequence in self._scheduler.admit(self.rows, free):
            used += sequence.pages
            # What is kept of prompts gives way to sequences where there may be no more pages.
            wanted = used + self.kv.cached_bytes // self.kv.page_bytes
            pages = wanted if self._kv_pages is None else min(wanted, self._kv_pages)
            self.kv.reserve(self._scheduler.max_rows, sequence.total_tokens, pages, self._kv_pages)
            sequence.slot = self.kv.open(sequence.request.cache_salt)
            sequence.sampler = Sampler(sequence.request.sampling, sequence.request.prompt)
            self._prefilling.append(sequence)

    # ------------------------------------------------------------------ one forward

    def _next_prefill(self) -> list[Chunk]:
        """What the next forward runs of prompts: up to `prompt_tokens` tokens, first come, first served."""
        chunks: list[Chunk] = []
        room = self._prompt_tokens
        own = self._prefilling[0].prompt if self._prefilling and self._prefilling[0].prompt.own else None
        for sequence in self._prefilling:
            if not room:
                break
            if sequence.prompt != own and (own is not None or sequence.prompt.own):
                continue
            prompt = sequence.request.prompt
            ran = self.kv.match(sequence.slot, sequence.prompt, prompt, sequence.ran)
            self.stats.prefix_hit_tokens += ran - sequence.ran
            sequence.cached += ran - sequence.ran
            sequence.ran = ran
            if not (self._prefix_cache and any(self._is_ahead(*chunk, sequence) for chunk in chunks)):
                chunks.append((sequence, prompt[ran : ran + room]))
                room -= len(chunks[-1][1])
        return chunks

    def _is_ahead(self, other: Sequence, tokens: tuple[int, ...], sequence: Sequence) -> bool:
        """Whether another one's chunk is the next page of this one's prompt, which it then waits for and shares."""
        prompt, end = sequence.request.prompt, sequence.ran + self.kv.page_tokens
        return (
            sequence.ran % self.kv.page_tokens == 0
            and other.ran <= sequence.ran
            and end <= other.ran + len(tokens)
            and end < len(prompt)
            and other.prompt == sequence.prompt
            and other.request.cache_salt == sequence.request.cache_salt
            and other.request.prompt[:end] == prompt[:end]
        )

    def _forward(self, chunks: list[Chunk]) -> list[StepOutput]:
        """Run prompts' chunks and tokens of sequences that decode; the next token of each sequence that has one."""
        start = time.perf_counter()
        for sequence, tokens in sorted(chunks, key=lambda chunk: not chunk[0].output):  # who may give room comes first
            self._make_room(sequence, len(tokens))
        batch, due = token_rows(chunks, self.num_layers, self.model.taps)
        for sequence, tokens in chunks:
            sequence.ran += len(tokens)
        logits = self.model.forward(batch, self.kv)
        self.stats.short_heads += isinstance(logits, Candidates)
        self.stats.head_fallbacks += self.model.fell_back
        for sequence, _ in chunks:
            if not sequence.output:
                # The last token, where it runs more layers than the others, is none that they could share.
                prompt = sequence.request.prompt[:-1] if sequence.prompt.own else sequence.request.prompt
                self.kv.keep(sequence.slot, sequence.prompt, prompt, sequence.ran)
        self._count(chunks, time.perf_counter() - start)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.in_prefill]
        self._decoding += [sequence for sequence in due if not sequence.output]
        outputs = emit(self, due, logits, start) if due else []
        for sequence in due:
            if sequence.finish_reason is not None:
                self._decoding.remove(sequence)
                self.kv.close(sequence.slot)
        return outputs

    def _make_room(self, sequence: Sequence, tokens: int) -> None:
        """Room for tokens to be fed; a sequence that decodes first gives back layers that it leaves."""
        if sequence.output:
            layers = self._order.layers(sequence.next_budget)
            if layers != sequence.layers:
                keep = set(layers)
                self.kv.drop(sequence.slot, [layer for layer in sequence.layers if layer not in keep])
                sequence.layers = layers
            if sequence.ran % self.kv.page_tokens and len(sequence.output) > 1:
                return  # in a page that it has
        self.kv.extend(sequence.slot, sequence.layers, sequence.ran + tokens)

    def _count(self, chunks: list[Chunk], seconds: float) -> None:
        """Note what a forward did; its time is shared out by tokens x layers."""
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
        pages = sum(self.kv.pages_for(sequence.ran) for sequence in self._prefilling + self._decoding) - self.kv.overlap
        stats.note_kv(self.kv.bytes_held, pages * self.num_layers * self.kv.page_bytes)
