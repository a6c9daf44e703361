"""The decode loop: admit, run prompts, step, sample, retire. Token ids in, a generator of `StepOutput` out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from skipdecode.engine.base import Engine
from skipdecode.engine.depth import BudgetPolicy, DepthOrder, RowView, SchedulePolicy, granted
from skipdecode.engine.fast_model import FastModel, TokenRows, open_model
from skipdecode.engine.kernels import KernelChoice
from skipdecode.engine.kv import KV
from skipdecode.engine.requests import Request, StepOutput
from skipdecode.engine.sampling import Row, put_out
from skipdecode.engine.scheduler import RequestSize, Scheduler
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

__all__ = ["FastEngine"]


@dataclass(eq=False, kw_only=True)
class _Row(Row):
    """A request that has a slot."""

    policy: BudgetPolicy
    slot: int
    pages: int
    fed: int = 0  # tokens of prompt and output that have run


class FastEngine(Engine):
    """Decodes requests on the package's own kernels, or on a GPU's graphs; rows of any age share a step.

    Parameters
    ----------
    model : PreTrainedModel or FastModel
        A causal LM with a fast path (`model_spec.READERS`); its projection weights are fused in place.
    schedule : Schedule or BudgetPolicy
        Which layers run; a policy is asked for every row and token.
    max_rows : int
        Most rows at a time.
    join_below : float
        See `Scheduler`: 0 strict waves, 1 continuous.
    in_order : bool
        Admit in order of submission instead of by length.
    kv_bytes : int, optional
        Most bytes of keys and values; requests wait for room. Default: what `max_rows` of the largest requests need.
        Not on GPUs.
    kernel : {"auto", "native", "dense"}
        See `open_model`.
    prompt_tokens : int
        Most prompt tokens of one forward: bounds the buffers, and how long a running row waits.

    Raises
    ------
    UnfitModelError
        If the model has no fast path.
    ScheduleError
        If the schedule is for another number of layers.
    UsageError
        If the kernels cannot serve here, or `kv_bytes` cannot be kept to.
    """

    def __init__(
        self,
        model: Any,
        schedule: Schedule | BudgetPolicy,
        *,
        max_rows: int = 8,
        join_below: float = 0.0,
        in_order: bool = False,
        kv_bytes: int | None = None,
        kernel: KernelChoice = "auto",
        prompt_tokens: int = 512,
    ) -> None:
        self.model = model if isinstance(model, FastModel) else open_model(model, kernel)
        if self.model.hint:
            warnings.warn(f"decoding through torch, at a fraction of the speed: {self.model.hint}", stacklevel=2)
        self.name = self.model.name
        self._policy = _policy(schedule)
        self._policy.schedule.check_fits(self.model.num_layers)
        super().__init__(self._policy.schedule)
        self._order = DepthOrder(self.schedule)
        self._prompt_tokens = prompt_tokens
        self._scheduler = Scheduler(max_rows, join_below, in_order=in_order)
        if kv_bytes is not None and self.model.kernel == "dense":
            raise UsageError("kv_bytes bounds pages, and this device keeps whole rows: leave it out, lower max_rows")
        self.kv: KV = self.model.new_kv()
        self._kv_pages = None if kv_bytes is None else kv_bytes // self.kv.page_bytes
        self._requests: dict[int, tuple[Request, BudgetPolicy]] = {}
        self._submitted = 0
        self._starting: list[_Row] = []
        self._running: list[_Row] = []

    # ------------------------------------------------------------------ public

    def submit(self, requests: Iterable[Request], schedule: Schedule | BudgetPolicy | None = None) -> list[int]:
        """See `Engine`; a schedule or policy of the requests' own must drop layers in the engine's order.

        Refused are texts too long for the model, tokens outside its vocabulary, and more keys and values than
        `kv_bytes`.
        """
        batch = list(requests)
        policy = self._policy if schedule is None else _policy(schedule)
        self._order.check(policy.schedule)
        sizes = [self._size(self._submitted + i, request, policy) for i, request in enumerate(batch)]
        self._requests |= {size.request: (request, policy) for size, request in zip(sizes, batch, strict=True)}
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
        """Admit what may join, run its prompts (all if nothing else runs, else a part), then decode one token a row."""
        start = time.perf_counter()
        self._admit()
        outputs: list[StepOutput] = []
        while self._starting:
            outputs += self._run_prompts()
            if self._running:
                break
        if self._running and not (outputs and self._starting):
            outputs += self._decode()
        self.stats.seconds += time.perf_counter() - start
        return outputs

    # ------------------------------------------------------------------ admission

    def _size(self, number: int, request: Request, policy: BudgetPolicy) -> RequestSize:
        prompt, total = len(request.prompt), len(request.prompt) + request.max_new_tokens
        self.model.ensure_positions(total)
        wrong = next((t for t in request.prompt if not 0 <= t < self.model.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} is outside the model's vocabulary of {self.model.vocab_size}")
        kv = self.kv
        pages = max(policy.prompt_budget() * kv.pages_for(prompt), policy.first_budget() * kv.pages_for(total))
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
            request, policy = self._requests.pop(size.request)
            used += size.pages
            self.kv.reserve(self._scheduler.max_rows, size.prompt_tokens + size.new_tokens, used)
            row = _Row(
                number=size.request,
                request=request,
                budget=policy.prompt_budget(),
                policy=policy,
                slot=self.kv.open(),
                pages=size.pages,
            )
            self._starting.append(row)

    # ------------------------------------------------------------------ prompts

    def _run_prompts(self) -> list[StepOutput]:
        """One forward over up to `prompt_tokens` tokens of the prompts that are due."""
        start = time.perf_counter()
        parts: list[tuple[_Row, tuple[int, ...]]] = []
        room = self._prompt_tokens
        for row in self._starting:
            if part := row.request.prompt[row.fed : row.fed + room]:
                parts.append((row, part))
                room -= len(part)
        parts.sort(key=lambda part: -part[0].budget)
        batch = TokenRows([], [], [], [], [])
        budgets: list[int] = []
        done: list[_Row] = []
        for row, part in parts:
            self.kv.extend(row.slot, self._order.layers(row.budget), row.fed + len(part))
            batch.tokens.extend(part)
            batch.slots.extend([row.slot] * len(part))
            batch.positions.extend(range(row.fed, row.fed + len(part)))
            budgets += [row.budget] * len(part)
            row.fed += len(part)
            if row.fed == len(row.request.prompt):
                done.append(row)
                batch.wanted.append(len(batch.tokens) - 1)
        batch.counts.extend(self._order.counts(budgets))
        if self.model.projects and budgets[0] == budgets[-1]:
            batch = batch.last_tokens_first()
        logits = self.model.forward(batch._replace(wanted=batch.wanted or [0]), self.kv)
        self.model.wait()
        self._note_kv()
        self.stats.prompt_tokens += len(batch.tokens)
        self.stats.prompt_seconds += time.perf_counter() - start
        self._starting = [row for row in self._starting if row.fed < len(row.request.prompt)]
        self._running += done
        return self._emit(done, logits, start) if done else []

    # ------------------------------------------------------------------ steps

    def _decode(self) -> list[StepOutput]:
        start = time.perf_counter()
        for row in self._running:
            self._grant(row)
        rows = self._running
        rows.sort(key=lambda row: -row.budget)
        counts = self._order.counts([row.budget for row in rows])
        batch = TokenRows(
            [row.output[-1] for row in rows],
            [row.slot for row in rows],
            [row.fed for row in rows],
            counts,
            list(range(len(rows))),
        )
        logits = self.model.forward(batch, self.kv)
        for row in rows:
            row.fed += 1
        self._note_kv()
        self.stats.steps += 1
        self.stats.fed_tokens += len(rows)
        self.stats.token_layers += sum(counts)
        self.stats.layer_reads += sum(map(bool, counts))
        self.stats.decode_seconds += time.perf_counter() - start
        return self._emit(list(rows), logits, start)

    def _grant(self, row: _Row) -> None:
        """Ask for the row's next budget; give back pages of layers that it leaves, find room for those that go on."""
        position = len(row.output) - 1
        budget = granted(row.policy, RowView(row.number, position, row.budget, row.logprob))
        if budget != row.budget:
            keep = set(self._order.layers(budget))
            self.kv.drop(row.slot, [layer for layer in self._order.layers(row.budget) if layer not in keep])
            row.budget = budget
        if row.fed % self.kv.page_tokens == 0 or position == 0:
            self.kv.extend(row.slot, self._order.layers(budget), row.fed + 1)

    def _emit(self, rows: list[_Row], logits: torch.Tensor, start: float) -> list[StepOutput]:
        outputs = put_out(self, rows, logits, start)
        for row, out in zip(rows, outputs, strict=True):
            if out.finish_reason is not None:
                self._running.remove(row)
                self.kv.close(row.slot)
        return outputs

    def _note_kv(self) -> None:
        held = self.kv.bytes_held
        pages = sum(self.kv.pages_for(row.fed) for row in self._starting + self._running)
        # Where whole rows are kept at full depth, that is what is held.
        self.stats.note_kv(held, max(held, pages * self.num_layers * self.kv.page_bytes))


def _policy(schedule: Schedule | BudgetPolicy) -> BudgetPolicy:
    return SchedulePolicy(schedule) if isinstance(schedule, Schedule) else schedule
