"""The engine on the package's own C++ kernels. Keys and values are in pages.

A step reads from top to bottom: `step` admits sequences, and takes chunks of prompts and tokens with drafts of the
other sequences; `rows.forwards` and `rows.token_rows` make rows of them; `_forward` runs the rows, `_chosen` samples.
"""

from __future__ import annotations

import time
from operator import eq

import torch
from torch import Tensor

from skipdecode.common.environment import isolated_torch
from skipdecode.common.types import PreTrainedModel
from skipdecode.engine.base import Engine
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.requests import NextToken, StepOutput
from skipdecode.engine.rows import Chunk, Span, forwards, token_rows
from skipdecode.engine.sampling import Predictions, Sampler, scores
from skipdecode.engine.scheduler import PROMPT_TOKENS, Scheduler
from skipdecode.engine.sequence import Sequence
from skipdecode.schedule import Schedule


class FastEngine(Engine):
    """Decoder of requests on the package's own kernels, on CPUs, with continuous batching.

    Sequences of any age and schedule share a step, and prompts join it in chunks.

    `model`: a causal LM with a fast path (`model_reader.READERS`); its projection weights are fused in place.
    `max_rows`: most sequences in a step. `refill_below`, `in_order`: see `Scheduler`. `prompt_tokens`: most prompt
    tokens of a forward; it bounds the buffers, and the time that a sequence waits for its next token. `prefix_cache`:
    keep keys and values of prompts for prompts with the same beginning and prompt layers; the output does not change.

    Raises UnfitModelError: the model has no fast path, or the kernels cannot run here; ScheduleError: the schedule is
    for another number of layers.
    """

    scores_prompts = True

    def __init__(
        self,
        model: PreTrainedModel | FastModel,
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
        self.kv = self.model.new_kv()
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

    def _enqueue(self, schedule: Schedule, new: list[Sequence], *, checked: bool) -> None:
        """Queue sequences as in `Engine`; those that are too long for the model are refused too."""
        if not checked:
            self.model.check(schedule, [sequence.request for sequence in new])
        for sequence in new:
            self.model.ensure_positions(sequence.total_tokens)
        self._scheduler.submit(new)

    # ------------------------------------------------------------------ one decode step

    @isolated_torch()
    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Admit sequences, then run a part of the waiting prompts, and one token of every other sequence.

        That is one forward, unless schedules of several drop orders run (see `forwards`). Drafts are checked in it.
        """
        start = time.perf_counter()
        for sequence in self._scheduler.admit(self.rows):
            self._admit(sequence)
        chunks, drafts = self._prompt_chunks(), self._draft()
        for sequence in self._decoding:
            self._drop_layers(sequence)
            if forced := sequence.forced_tokens:
                drafts[sequence] = forced
            chunks.append(Chunk.following(sequence, (sequence.output[-1], *drafts.get(sequence, ()))))
        outputs = [out for part in forwards(chunks) for out in self._forward(part)]
        self.stats.step_seconds += time.perf_counter() - start
        return outputs

    def _admit(self, sequence: Sequence) -> None:
        """Reserve memory for a sequence, and make its sampler and drafter."""
        request = sequence.request
        used = sum(map(self.kv.most_pages, [*self._prefilling, *self._decoding, sequence]))
        pages = used + self.kv.cached_bytes // self.kv.layout.page_bytes
        self.kv.reserve(self._scheduler.max_rows, sequence.total_tokens, pages)
        sequence.slot = self.kv.open()
        sequence.sampler = Sampler.of(request)
        if request.exact:
            sequence.drafter = self.planner.drafter(request.prompt, request.cache_salt)
        self._prefilling.append(sequence)

    def _prompt_chunks(self) -> list[Chunk]:
        """Take the prompt chunks of the next forward: up to `prompt_tokens` tokens, first come, first served.

        If the first prompt has layers of its own, only prompts with the same layers join it (see `token_rows`).
        """
        chunks: list[Chunk] = []
        room = self._prompt_tokens
        for sequence in self._prefilling:
            if not room:
                break
            first, prompt = self._prefilling[0].prompt, sequence.prompt
            if prompt != first and (first.explicit or prompt.explicit):
                continue
            if self._prefix_cache and not sequence.request.scores_prompt:
                self._reuse_prefix(sequence)
                if any(self._is_ahead(chunk, sequence) for chunk in chunks):
                    continue
            tokens = sequence.request.prompt[sequence.ran : sequence.ran + room]
            chunks.append(Chunk.following(sequence, tokens))
            room -= len(tokens)
        return chunks

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Take a sequence's next prompt tokens from the prefix cache, as far as it has them."""
        ran = self.kv.reuse_prefix(sequence)
        self.stats.prefix_hit_tokens += ran - sequence.ran
        sequence.cached += ran - sequence.ran
        sequence.ran = ran

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

    def _draft(self) -> dict[Sequence, tuple[int, ...]]:
        """Draft as many tokens of the sequences as the planner says; all tokens of a sequence run the same layers."""
        rows, drafting = len(self._decoding), [(s, s.drafter) for s in self._decoding if s.drafter is not None]
        if not drafting:
            return {}
        depth = round(sum(len(sequence.next_layers) for sequence in self._decoding) / rows)
        most = self.model.most_drafts
        counts = self.planner.plan(rows, depth, (sequence.find_drafts(drafter, most) for sequence, drafter in drafting))
        return {sequence: drafter.drafts[: counts[drafter]] for sequence, drafter in drafting if drafter in counts}

    def _drop_layers(self, sequence: Sequence) -> None:
        """Drop the layers that the next token of a decoding sequence does not run."""
        layers = sequence.next_layers
        if layers != sequence.layers:
            keep = set(layers)
            self.kv.drop(sequence.slot, [layer for layer in sequence.layers if layer not in keep])
            sequence.layers = layers

    def _forward(self, chunks: list[Chunk]) -> list[StepOutput]:
        """Run prompt chunks, and tokens of decoding sequences with their drafts; returns the outputs."""
        start = time.perf_counter()
        sampled, predictions = self._run(chunks)
        for chunk in chunks:
            chunk.sequence.ran = chunk.end
        self._count(chunks, time.perf_counter() - start)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.in_prefill]
        self._decoding += [span.sequence for span in sampled if not span.sequence.output]
        outputs = self._emit(self._chosen(sampled, predictions), start) if sampled else []
        for sequence in (span.sequence for span in sampled):
            if sequence.finish_reason is not None:
                self._decoding.remove(sequence)
                self.kv.close(sequence.slot)
                if sequence.drafter is not None:
                    request = sequence.request
                    self.planner.remember(request.prompt, sequence.output, request.cache_salt)
        return outputs

    def _run(self, chunks: list[Chunk]) -> tuple[list[Span], Predictions]:
        """Run the rows of chunks; returns the spans that choose next tokens, and the predictions after their rows.

        The predictions are in the order of the spans: one for every token that a sequence ran, one for a prompt.
        """
        pages = self.kv.layout.pages
        for chunk in chunks:
            # From the second new token on, most tokens lie in a page that the sequence has.
            if len(chunk.sequence.output) < 2 or pages(chunk.end) > pages(chunk.start):
                self.kv.extend(chunk.sequence.slot, chunk.layers, chunk.end)
        rows, sampled = token_rows(chunks, self.num_layers, self.model.context_tokens)
        if self.skips_prefill and rows.num_logits < len(rows.tokens):
            self.kv.fill()
            return sampled, Predictions(torch.zeros(rows.num_logits, self.model.vocab_size))
        logits = self.model.forward(rows, self.kv)
        self.stats.short_heads += isinstance(logits, Candidates)
        self.stats.head_fallbacks += self.model.head.fell_back
        for chunk in chunks:
            if self._prefix_cache and not chunk.sequence.output:
                self.kv.cache_prefix(chunk.sequence, chunk.end)
        if rows.scored and isinstance(logits, Tensor):
            for row, (sequence, tokens, start, *_) in rows.scored:
                following = sequence.request.prompt[start + 1 : start + 1 + len(tokens)]
                top = sequence.request.sampling.top_logprobs
                sequence.scores += scores(logits[row : row + len(tokens)], following, top)
            logits = logits[rows.num_logits - rows.num_sampled :]
        return sampled, Predictions(logits)

    def _chosen(self, sampled: list[Span], predictions: Predictions) -> list[tuple[Sequence, NextToken]]:
        """Choose the next tokens of each sequence: its accepted drafts, and one more."""
        chosen: list[tuple[Sequence, NextToken]] = []
        row = 0
        for span in sampled:
            sequence, drafted, new_tokens = span.sequence, span.tokens[1:], list[int]()
            for index in range(len(drafted) + 1):
                token = predictions.token(row + index, sequence.sampler)
                chosen.append((sequence, token))
                new_tokens.append(token.token)
                if token.token in sequence.request.stop_ids or token.token not in drafted[index : index + 1]:
                    break
            row += len(drafted) + 1
            # Keys and values of rejected drafts stay in the pages and are overwritten.
            sequence.ran -= len(drafted) + 1 - len(new_tokens)
            self._learn(sequence, drafted, new_tokens)
        return chosen

    def _learn(self, sequence: Sequence, drafted: tuple[int, ...], new_tokens: list[int]) -> None:
        """Count the drafts of a sequence that were accepted, and have its drafter learn from the new tokens."""
        if sequence.drafter is not None:
            sequence.drafter.learn(new_tokens)
        if drafted:
            self.stats.drafted_tokens += len(drafted)
            self.stats.accepted_tokens += sum(map(eq, drafted, new_tokens))
            self.stats.fed_tokens += len(new_tokens) - 1
            self.stats.token_layers += (len(new_tokens) - 1) * len(sequence.layers)

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
            sum(self.kv.layout.pages(sequence.ran) for sequence in self._prefilling + self._decoding)
            - self.kv.prefixes.overlap
        )
        full = pages * (self.num_layers - len(self.kv.rings)) + self.rows * len(self.kv.rings)
        self.stats.note_kv(self.kv.bytes_held, full * self.kv.layout.page_bytes)
