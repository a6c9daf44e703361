"""The decode loop on the package's own C++ kernels, with keys and values in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skipdecode.engine.base import NextToken
from skipdecode.engine.batch import Chunk, token_rows
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kv import PagedKV
from skipdecode.engine.loop import DecodeLoop
from skipdecode.engine.requests import StepOutput
from skipdecode.engine.sampling import Predicted, Sampler, scores
from skipdecode.engine.scheduler import PROMPT_TOKENS
from skipdecode.engine.sequence import Sequence
from skipdecode.schedule import Schedule


class FastEngine(DecodeLoop):
    """Decodes requests on the package's own kernels, on CPUs; sequences of any age share a step.

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

    Raises
    ------
    UnfitModelError
        If the model has no fast path, or the kernels cannot run here.
    ScheduleError
        If the schedule is for another number of layers.
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
        schedule.check_fits(self.model.num_layers)
        super().__init__(
            schedule, max_rows=max_rows, refill_below=refill_below, in_order=in_order, prompt_tokens=prompt_tokens
        )
        self.planner = self.model.planner
        self._prefix_cache = prefix_cache
        self.kv: PagedKV = self.model.new_kv(prefix_cache)

    @property
    def kv_bytes(self) -> int:
        return self.kv.bytes_held

    @property
    def cached_bytes(self) -> int:
        return self.kv.cached_bytes

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """See `DecodeLoop`."""
        return super().step()

    # ------------------------------------------------------------------ keys and values

    def _enqueue(self, schedule: Schedule, new: list[Sequence]) -> None:
        """Refuses sequences that are too long for the model, or have tokens outside its vocabulary."""
        schedule.check_fits(self.num_layers)
        for sequence in new:
            self.model.ensure_positions(sequence.total_tokens)
            sequence.request.check_vocabulary(self.model.vocab_size)
            sequence.pages = self.kv.most_pages(sequence)
        super()._enqueue(schedule, new)

    def _join(self, sequence: Sequence) -> None:
        used = sum(each.pages for each in self._prefilling + self._decoding)
        pages = used + sequence.pages + self.kv.cached_bytes // self.kv.layout.page_bytes
        self.kv.reserve(self._scheduler.max_rows, sequence.total_tokens, pages)
        sequence.slot = self.kv.open(sequence.request.cache_salt)
        sequence.sampler = Sampler(sequence.request.sampling, sequence.request.prompt)

    def _leave(self, sequence: Sequence) -> None:
        self.kv.close(sequence.slot)

    def _drop(self, sequence: Sequence, layers: list[int]) -> None:
        self.kv.drop(sequence.slot, layers)

    def _starts(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
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

    def _run(self, chunks: list[Chunk], *, drafting: bool = False) -> tuple[list[Sequence], Predicted]:
        pages = self.kv.layout.pages
        for chunk in chunks:
            # From the second new token on, most tokens lie in a page that the sequence has.
            if len(chunk.sequence.output) < 2 or pages(chunk.end) > pages(chunk.start):
                self.kv.extend(chunk.sequence.slot, chunk.layers, chunk.end)
        batch, due = token_rows(chunks, self.num_layers, self.model.taps)
        if self.fills_prompts and batch.wanted < len(batch.tokens):
            self.kv.fill()
            return due, Predicted(torch.zeros(batch.wanted, self.model.vocab_size))
        logits = self.model.forward(batch._replace(drafting=drafting), self.kv)
        self.stats.short_heads += isinstance(logits, Candidates)
        self.stats.head_fallbacks += self.model.fell_back
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
        """Note the log-probabilities of the prompt tokens that follow those of a chunk."""
        request = chunk.sequence.request
        following = request.prompt[chunk.start + 1 : chunk.end + 1]
        chunk.sequence.scores += scores(logits, following, request.sampling.top_logprobs)

    def _choose(self, predicted: Predicted, row: int, sampler: Sampler) -> NextToken:
        return predicted.token(row, sampler)

    def _count(self, chunks: list[Chunk], seconds: float) -> None:
        super()._count(chunks, seconds)
        pages = (
            sum(self.kv.layout.pages(sequence.ran) for sequence in self._prefilling + self._decoding) - self.kv.overlap
        )
        self.stats.note_kv(self.kv.bytes_held, pages * self.num_layers * self.kv.layout.page_bytes)
