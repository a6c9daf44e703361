"""The decode loop: admit, one forward, put out its tokens. Token ids in, `StepOutput` out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from skipdecode.engine.base import Engine
from skipdecode.engine.depth import DepthOrder
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.feeds import EngineRow, Feed, token_rows
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kv import PagedKV
from skipdecode.engine.requests import Request, StepOutput
from skipdecode.engine.sampling import put_out
from skipdecode.engine.scheduler import PROMPT_TOKENS, RequestSize, Scheduler
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
        self._requests: dict[int, tuple[Request, Schedule]] = {}
        self._submitted = 0
        self._starting: list[EngineRow] = []
        self._running: list[EngineRow] = []

    # ------------------------------------------------------------------ public

    def submit(self, requests: Iterable[Request], schedule: Schedule | None = None) -> list[int]:
        """See `Engine`; a schedule of the requests' own must drop layers in the engine's order.

        Refused are texts too long for the model, tokens outside its vocabulary, and more keys and values than
        `kv_bytes`.
        """
        batch = list(requests)
        wanted = self.schedule if schedule is None else schedule
        self._order.check(wanted)
        sizes = [self._size(self._submitted + i, request, wanted) for i, request in enumerate(batch)]
        self._requests |= {size.request: (request, wanted) for size, request in zip(sizes, batch, strict=True)}
        self._submitted += len(batch)
        self._scheduler.submit(sizes)
        return [size.request for size in sizes]

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def rows(self) -> int:
        return len(self._running) + len(self._starting)

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
        for row in self._starting + self._running:
            self.kv.close(row.slot)
        self._starting, self._running, self._requests = [], [], {}
        self._scheduler.clear()

    def cancel(self, number: int) -> None:
        """See `Engine`; the request's room is free at once."""
        if self._requests.pop(number, None) is not None:
            self._scheduler.drop(number)
        for rows in (self._starting, self._running):
            for row in [r for r in rows if r.number == number]:
                rows.remove(row)
                self.kv.close(row.slot)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Admit what may join, then one forward: a part of the prompts that are due, and one token of every row.

        Prompts with layers of their own have a forward of their own, and rows step after it only if it put out nothing.
        """
        start = time.perf_counter()
        self._admit()
        prompts, outputs = self._due(), list[StepOutput]()
        if prompts and prompts[0].row.prompt.own:
            outputs = self._run(prompts)
            prompts = []
        if prompts or (self._running and not outputs):
            outputs = self._run(prompts + [Feed(row, (row.output[-1],)) for row in self._running])
        self.stats.seconds += time.perf_counter() - start
        return outputs

    # ------------------------------------------------------------------ admission

    def _size(self, number: int, request: Request, schedule: Schedule) -> RequestSize:
        prompt, total = len(request.prompt), len(request.prompt) + request.max_new_tokens
        self.model.ensure_positions(total)
        request.check_vocabulary(self.model.vocab_size)
        kv = self.kv
        held = len(self._order.prompt(schedule).held)
        pages = max(held * kv.pages_for(prompt), schedule.budget(0) * kv.pages_for(total))
        if self._kv_pages is not None and pages > self._kv_pages:
            raise UsageError(
                f"a request of {prompt} + {request.max_new_tokens} tokens may hold {pages * kv.page_bytes} bytes of "
                f"keys and values, but kv_bytes allows {self._kv_pages * kv.page_bytes}"
            )
        return RequestSize(request.max_new_tokens, prompt, number, pages)

    def _admit(self) -> None:
        rows = self._starting + self._running
        used = sum(row.pages for row in rows)
        free = None if self._kv_pages is None else self._kv_pages - used
        for size in self._scheduler.admit(len(rows), free):
            request, schedule = self._requests.pop(size.request)
            prompt = self._order.prompt(schedule)
            used += size.pages
            # What is kept of prompts gives way to rows where there may be no more pages.
            wanted = used + self.kv.cached_bytes // self.kv.page_bytes
            pages = wanted if self._kv_pages is None else min(wanted, self._kv_pages)
            tokens = size.prompt_tokens + size.new_tokens
            self.kv.reserve(self._scheduler.max_rows, tokens, pages, self._kv_pages)
            row = EngineRow(
                number=size.request,
                request=request,
                budget=len(prompt.held),
                schedule=schedule,
                prompt=prompt,
                layers=prompt.held,
                slot=self.kv.open(request.cache_salt),
                pages=size.pages,
            )
            self._starting.append(row)

    # ------------------------------------------------------------------ one forward

    def _due(self) -> list[Feed]:
        """What the next forward runs of prompts: up to `prompt_tokens` tokens, first come, first served."""
        parts: list[Feed] = []
        room = self._prompt_tokens
        own = self._starting[0].prompt if self._starting and self._starting[0].prompt.own else None
        for row in self._starting:
            if not room:
                break
            if row.prompt != own and (own is not None or row.prompt.own):
                continue
            fed = self.kv.match(row.slot, row.prompt, row.request.prompt, row.fed)
            self.stats.prefix_hit_tokens += fed - row.fed
            row.cached += fed - row.fed
            row.fed = fed
            if not (self._prefix_cache and any(self._is_ahead(*part, row) for part in parts)):
                parts.append(Feed(row, row.request.prompt[fed : fed + room]))
                room -= len(parts[-1].tokens)
        return parts

    def _is_ahead(self, other: EngineRow, part: tuple[int, ...], row: EngineRow) -> bool:
        """Whether another row's part is the next page of this one's prompt, which it then waits for and shares."""
        prompt, end = row.request.prompt, row.fed + self.kv.page_tokens
        return (
            row.fed % self.kv.page_tokens == 0
            and other.fed <= row.fed
            and end <= other.fed + len(part)
            and end < len(prompt)
            and (other.prompt, other.request.cache_salt) == (row.prompt, row.request.cache_salt)
            and other.request.prompt[:end] == prompt[:end]
        )

    def _run(self, feeds: list[Feed]) -> list[StepOutput]:
        """One forward over tokens of prompts and of rows that decode; the next token of each row that has one."""
        start = time.perf_counter()
        for row, tokens in sorted(feeds, key=lambda feed: not feed.row.output):  # who may give room comes first
            self._make_room(row, len(tokens))
        batch, due = token_rows(feeds, self._order, self.model.taps)
        for row, tokens in feeds:
            row.fed += len(tokens)
        logits = self.model.forward(batch, self.kv)
        self.stats.short_heads += isinstance(logits, Candidates)
        self.stats.head_fallbacks += self.model.fell_back
        for row, _ in feeds:
            if not row.output:
                # The last token, where it runs more layers than the others, is none that they could share.
                prompt = row.request.prompt[:-1] if row.prompt.own else row.request.prompt
                self.kv.keep(row.slot, row.prompt, prompt, row.fed)
        self._count(feeds, time.perf_counter() - start)
        self._starting = [row for row in self._starting if row.fed < len(row.request.prompt)]
        self._running += [row for row in due if not row.output]
        return self._emit(due, logits, start) if due else []

    def _count(self, feeds: list[Feed], seconds: float) -> None:
        """Note what a forward did; its time is shared out by tokens x layers."""
        stats, rows = self.stats, [row for row, _ in feeds if row.output]
        prompts = [(len(tokens), len(row.prompt.run)) for row, tokens in feeds if not row.output]
        layers, prompt_layers = sum(row.budget for row in rows), sum(size * budget for size, budget in prompts)
        stats.prompt_tokens += sum(size for size, _ in prompts)
        stats.prompt_seconds += seconds * prompt_layers / (layers + prompt_layers)
        if rows:
            stats.steps += 1
            stats.fed_tokens += len(rows)
            stats.token_layers += layers
            stats.layer_reads += max(row.budget for row in rows)
        held = self.kv.bytes_held
        pages = sum(self.kv.pages_for(row.fed) for row in self._starting + self._running) - self.kv.overlap
        stats.note_kv(held, pages * self.num_layers * self.kv.page_bytes)

    def _make_room(self, row: EngineRow, tokens: int) -> None:
        """Room for tokens to be fed; a row that decodes first gives back layers that it leaves."""
        if row.output:
            layers = self._order.layers(row.budget)
            if layers != row.layers:
                keep = set(layers)
                self.kv.drop(row.slot, [layer for layer in row.layers if layer not in keep])
                row.layers = layers
            if row.fed % self.kv.page_tokens and len(row.output) > 1:
                return  # in a page that it has
        self.kv.extend(row.slot, row.layers, row.fed + tokens)

    def _emit(self, rows: list[EngineRow], logits: torch.Tensor | Candidates, start: float) -> list[StepOutput]:
        outputs = put_out(self, rows, logits, start)
        for row, out in zip(rows, outputs, strict=True):
            if out.finish_reason is not None:
                self._running.remove(row)
                self.kv.close(row.slot)
                continue
            row.budget = row.next_budget()
        return outputs
