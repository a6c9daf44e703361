"""The engine on transformers' own forward with gates, for families without a fast path, and as a reference.

A batch has left-padded sequences of one schedule that start together, on one `SkipCache`. Finished sequences leave the
batch and the cache. If a text grows beyond the length at which a model makes all keys anew (Phi-3's long factors), the
whole batch is computed anew, each sequence with its own factors. This engine is several times slower than `FastEngine`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skipdecode.common.environment import isolated_torch
from skipdecode.common.types import PreTrainedModel
from skipdecode.engine.base import Engine
from skipdecode.engine.requests import StepOutput
from skipdecode.engine.sampling import Predictions, Sampler, scores
from skipdecode.engine.scheduler import Scheduler
from skipdecode.engine.sequence import Sequence
from skipdecode.models.attach import Attachment
from skipdecode.models.cache import SkipCache
from skipdecode.models.families import check_schedule, find_family, unwrap
from skipdecode.models.forward import switch_length
from skipdecode.models.plan import PROMPT
from skipdecode.models.release import model_cache_name
from skipdecode.schedule import Schedule

_SCORED_AT_ONCE = 128  # tokens of a prompt whose logits are converted together


@dataclass(eq=False)
class _Batch:
    """A batch of sequences that started together."""

    schedule: Schedule
    cache: SkipCache
    rows: list[Sequence]
    ids: Tensor
    mask: Tensor
    position: int = 0


class GatedEngine(Engine):
    """Decoder of requests through a gated transformers model.

    `model`: a causal LM of a family in `skipdecode.models.families`, with nothing attached; it is gated while a batch
    runs. `schedule`: requests with another one run in separate batches, in the order of submission. `max_rows`: most
    sequences in a batch. `in_order`: see `Scheduler`.

    Raises UnsupportedModelError if the family is not in the table; ScheduleError if the schedule is for another number
    of layers.
    """

    name = "transformers"
    scores_prompts = True

    def __init__(
        self, model: PreTrainedModel, schedule: Schedule, *, max_rows: int = 8, in_order: bool = False
    ) -> None:
        self._model = unwrap(model)
        find_family(self._model)
        check_schedule(self._model.config, schedule)
        super().__init__(schedule)
        accepted = inspect.signature(type(self._model).forward).parameters
        self._cache_name = model_cache_name(self._model)
        self._takes_positions = "position_ids" in accepted
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._switch_length = switch_length(self._model)
        self._scheduler = Scheduler(max_rows, in_order=in_order)  # of the next batch
        self._waiting: list[Sequence] = []  # in the order of submission
        self._batch: _Batch | None = None

    def _enqueue(self, schedule: Schedule, new: list[Sequence], *, checked: bool) -> None:
        if not checked:
            check_schedule(self._model.config, schedule)
            for sequence in new:
                sequence.request.check_vocabulary(self._model.get_input_embeddings().weight.shape[0])
        self._waiting += new

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def rows(self) -> int:
        return 0 if self._batch is None else len(self._batch.rows)

    @property
    def kv_bytes(self) -> int:
        return 0 if self._batch is None else self._batch.cache.kv_bytes()

    def cancel(self, number: int) -> None:
        if self._batch is not None and any(row.number == number for row in self._batch.rows):
            self._retain([row.number != number for row in self._batch.rows])
            return
        self._waiting = [sequence for sequence in self._waiting if sequence.number != number]

    def close(self) -> None:
        self._waiting, self._batch = [], None

    @isolated_torch()
    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one forward of the batch: its prompts, or a token per sequence. A batch starts when the last one ends."""
        start = time.perf_counter()
        if self._batch is None:
            if not self.waiting:
                return []
            self._batch = self._next_batch()
        try:
            outputs = self._advance(self._batch, start)
        except BaseException:
            self.close()
            raise
        self.stats.step_seconds += time.perf_counter() - start
        return outputs

    def _next_batch(self) -> _Batch:
        """Waiting sequences with the schedule of the sequence that has waited longest."""
        schedule = self._waiting[0].schedule
        self._scheduler.clear()
        self._scheduler.submit(sequence for sequence in self._waiting if sequence.schedule == schedule)
        rows = self._scheduler.admit(0)
        self._waiting = [sequence for sequence in self._waiting if sequence not in rows]
        for row in rows:
            row.sampler = Sampler.of(row.request)
        ids, mask = left_pad([row.request.prompt for row in rows], self._model.device)
        return _Batch(schedule, SkipCache(self._model.config, ids.shape[1]), rows, ids, mask)

    def _advance(self, batch: _Batch, start: float) -> list[StepOutput]:
        if batch.position:
            for row in batch.rows:
                row.layers = batch.schedule.layers(batch.position - 1)
            self._renew(batch)
        skips = self.skips_prefill and not batch.position
        logits = (self._logits_of_first_tokens(batch) if skips else self._logits(batch))[:, -1].float()
        self._count(batch, time.perf_counter() - start)
        for row in () if batch.position else batch.rows:
            if row.request.scores_prompt:
                self._score(row)
        predictions = Predictions(logits)
        chosen = [(row, predictions.token(index, row.sampler)) for index, row in enumerate(batch.rows)]
        outputs = self._emit(chosen, start)
        batch.position += 1
        batch.ids = torch.tensor([[out.token] for out in outputs], device=self._model.device)
        batch.mask = torch.cat((batch.mask, batch.mask.new_ones(len(outputs), 1)), dim=1)
        self._retain([out.finish_reason is None for out in outputs])
        return outputs

    def _renew(self, batch: _Batch) -> None:
        """Have a forward compute all tokens anew if some text has just outgrown the keys of its earlier tokens."""
        if self._switch_length is None:
            return
        texts = [row.request.prompt + tuple(row.output) for row in batch.rows]
        if any(len(text) == self._switch_length + 1 for text in texts):
            batch.ids, batch.mask = left_pad(texts, self._model.device)
            batch.cache = SkipCache(self._model.config, batch.ids.shape[1] - batch.position)

    def _score(self, row: Sequence) -> None:
        """Note the log-probabilities of a prompt's tokens, in a forward of its own: logits of a batch are large."""
        prompt, top = row.request.prompt, row.request.sampling.top_logprobs
        ids, mask = left_pad([prompt], self._model.device)
        single = _Batch(row.schedule, SkipCache(self._model.config, len(prompt)), [row], ids, mask)
        logits = self._logits(single, all_columns=True)[0]
        for start in range(0, len(prompt) - 1, _SCORED_AT_ONCE):
            following = prompt[start + 1 : start + 1 + _SCORED_AT_ONCE]
            row.scores += scores(logits[start : start + len(following)].float(), following, top)

    def _logits_of_first_tokens(self, batch: _Batch) -> Tensor:
        """Logits of the prompts' first tokens, whose keys and values stand for the keys and values of all tokens."""
        ids, mask = batch.ids, batch.mask
        batch.ids, batch.mask = ids[:, :1], mask[:, :1]
        logits = self._logits(batch)
        batch.ids, batch.mask = ids, mask
        if others := ids.shape[1] - 1:
            for index, held in enumerate(batch.cache.layers):
                batch.cache.run_state(index, others)
                if batch.cache.tokens_held(index):
                    first = (part[:, :, :1].expand(-1, -1, others, -1) for part in (held.keys, held.values))
                    batch.cache.update(*first, index)
            batch.cache.advance([PROMPT] * others)
        return logits

    def _logits(self, batch: _Batch, *, all_columns: bool = False) -> Tensor:
        """Compute logits (rows, columns, vocabulary), of the last columns only unless all are wanted."""
        options: dict[str, object] = {} if all_columns else dict(self._options)
        if self._takes_positions:
            options["position_ids"] = (batch.mask.cumsum(1) - 1).clamp(min=0)[:, -batch.ids.shape[1] :]
        options |= {"attention_mask": batch.mask, self._cache_name: batch.cache, "use_cache": True}
        with Attachment(self._model, batch.schedule):  # for this forward: other engines of the model have theirs
            output = self._model(input_ids=batch.ids, **options)
        if batch.ids.is_cuda:
            torch.cuda.synchronize(batch.ids.device)
        logits: Tensor = output.logits
        return logits

    def _count(self, batch: _Batch, forward: float) -> None:
        stats, rows, layers = self.stats, len(batch.rows), len(batch.rows[0].layers)
        if batch.position == 0:
            tokens = sum(len(row.request.prompt) for row in batch.rows)
            stats.prompt_tokens += tokens
            stats.prompt_layers += tokens * len(batch.schedule.prompt_layers())
            stats.prompt_seconds += forward
        else:
            stats.steps += 1
            stats.fed_tokens += rows
            stats.token_layers += rows * layers
        stats.note_kv(batch.cache.kv_bytes(), batch.cache.kv_bytes_full())

    def _retain(self, unfinished: list[bool]) -> None:
        """Remove finished sequences from the batch and its cache."""
        batch = self._batch
        if batch is None or all(unfinished):
            return
        batch.rows = [row for row, keep in zip(batch.rows, unfinished, strict=True) if keep]
        if not batch.rows:
            self._batch = None
            return
        chosen = torch.tensor([i for i, keep in enumerate(unfinished) if keep], device=batch.ids.device)
        batch.ids, batch.mask = batch.ids[chosen], batch.mask[chosen]
        batch.cache.reorder_cache(chosen)


def left_pad(prompts: Iterable[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, each (rows, longest prompt), with zeros on the left."""
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    masks = [torch.ones_like(row) for row in rows]
    tokens, mask = (pad_sequence(values, batch_first=True, padding_side="left") for values in (rows, masks))
    return tokens, mask
