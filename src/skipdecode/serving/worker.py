"""The one thread that owns the model: takes tickets, gives their choices rows, steps them, sends back events.

The event loop talks to it through `submit`, `cancel` and `stop`, which return at once; events come back through
`loop.call_soon_threadsafe`, one call a step for all rows together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque

from skipdecode.engine.depth import DepthOrder
from skipdecode.engine.requests import StepOutput
from skipdecode.errors import SkipDecodeError
from skipdecode.serving.errors import ApiError
from skipdecode.serving.groups import Group, KvSize, group_for
from skipdecode.serving.limits import Limits
from skipdecode.serving.metrics import Metrics
from skipdecode.serving.outbox import Outbox
from skipdecode.serving.request_state import Choice, Failed, Finished, Ticket, Update

__all__ = ["Worker"]

_LOG = logging.getLogger("skipdecode.serve")
_LONGEST_RETRY = 60


class Worker:
    """Runs tickets.

    Parameters
    ----------
    lanes : list of Group
        Together they take every schedule that a ticket may have. Used by the worker's thread only.
    num_layers : int
        Of the model.
    kv_size : KvSize
        How the lanes store keys and values.
    limits : Limits
    metrics : Metrics
    """

    def __init__(
        self, lanes: list[Group[Choice]], num_layers: int, kv_size: KvSize, limits: Limits, metrics: Metrics
    ) -> None:
        self._lanes = lanes
        self._num_layers = num_layers
        self._kv_size = kv_size
        self._limits = limits
        self._metrics = metrics
        self._outbox = Outbox(self.cancel)
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._wake = threading.Condition()
        # Under the lock of `_wake`:
        self._waiting: deque[Choice] = deque()
        self._cancelled: list[Ticket] = []
        self._stopping = False
        self._drained_at = math.inf  # when those that run have to end
        # The thread's own:
        self._running: dict[Choice, Group[Choice]] = {}
        self._row_seconds = 1.0  # moving mean of a choice's time in the batch

    # ------------------------------------------------------------------ any thread

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; events go to `loop`."""
        self._outbox.open(loop)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        """Whether tickets are taken."""
        return self.alive and not self._stopping and self._drained_at == math.inf

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket.

        Raises
        ------
        ApiError
            429 if the queue has no room for all of its choices, 503 if the worker stops.
        """
        with self._wake:
            if not self.accepting:
                raise _stopping()
            self.check_room(len(ticket.choices))
            self._waiting.extend(ticket.choices)
            self._metrics.queue_length.set(len(self._waiting))
            self._wake.notify()

    def check_room(self, choices: int) -> None:
        """Raise ApiError (429) if there is no room for so many more."""
        waiting = len(self._waiting)
        # A batch's worth may always wait for its rows: those are given at the next step.
        if choices > self._limits.max_rows + self._limits.max_waiting - waiting - len(self._running):
            waves = 1 + waiting / self._limits.max_rows
            seconds = min(_LONGEST_RETRY, math.ceil(waves * self._row_seconds))
            message = f"the queue is full ({waiting} wait): try again in {seconds} s"
            raise ApiError(429, "queue_full", message, headers={"Retry-After": str(seconds)})

    def cancel(self, ticket: Ticket) -> None:
        """Drop what is left of a ticket before the next step."""
        with self._wake:
            self._cancelled.append(ticket)
            self._wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no more tickets; those that are there fail after this time."""
        with self._wake:
            self._drained_at = time.perf_counter() + seconds

    def stop(self, seconds: float) -> None:
        """Fail what is left and end the thread, waiting this long for its current step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self.alive:
            self._thread.join(seconds)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._await_work():
                self._expire()
                self._admit()
                self._step()
                self._outbox.send()
        except Exception:
            _LOG.exception("the model's thread ended")
        finally:
            with self._wake:
                self._stopping = True
            for ticket in self._all_tickets():
                self._outbox.add(ticket, Failed(_stopping()))
            self._outbox.send()

    def _all_tickets(self) -> set[Ticket]:
        with self._wake:
            return {choice.ticket for choice in (*self._waiting, *self._running)}

    def _await_work(self) -> bool:
        """Sleep until there is something to do, drop cancelled tickets; False once the worker is to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._cancelled or self._running or self._stopping)
            if self._stopping:
                return False
            cancelled, self._cancelled = self._cancelled, []
        for ticket in cancelled:
            self._drop(ticket)
        return True

    def _expire(self) -> None:
        now = time.perf_counter()
        if now > self._drained_at:
            for ticket in self._all_tickets():
                self._fail(ticket, _stopping(), "error")
        with self._wake:
            late = {choice.ticket: False for choice in self._waiting if choice.ticket.deadline < now}
        late |= {choice.ticket: True for choice in self._running if choice.ticket.deadline < now}
        for ticket, began in late.items():
            seconds = f"{self._limits.max_seconds:g} s"
            if began or ticket.first_token is not None:
                error = ApiError(504, "timeout", f"the request's {seconds} ran out: ask for fewer tokens")
            else:
                error = ApiError(503, "queue_timeout", f"the request waited {seconds} without a free row: try later")
            self._fail(ticket, error, "timeout")

    def _admit(self) -> None:
        while True:
            with self._wake:
                if not self._waiting or len(self._running) >= self._limits.max_rows:
                    self._metrics.queue_length.set(len(self._waiting))
                    return
                choice = self._waiting.popleft()
                lane = group_for(self._lanes, choice.ticket.plan.schedule)
                self._running[choice] = lane
            try:
                lane.submit(choice, choice.request, choice.ticket.plan.schedule)
            except SkipDecodeError as error:
                self._fail(choice.ticket, ApiError(400, "invalid_value", str(error)), "refused")

    def _step(self) -> None:
        for lane in self._lanes:
            if not lane.rows:
                continue
            start = time.perf_counter()
            try:
                outputs = lane.step()
            except Exception:
                # Of any kind: memory, a kernel, a bug. Its rows fail, the rest goes on with a fresh engine.
                _LOG.exception("a step failed")
                self._metrics.step_failures.inc()
                for ticket in {choice.ticket for choice in lane.reset()}:
                    self._fail(ticket, ApiError(500, "engine_error", "the model failed; the request is lost"), "error")
                continue
            self._note_step(outputs, time.perf_counter() - start)
            for choice, output in outputs:
                # Not those whose ticket has failed meanwhile.
                if choice in self._running:
                    self._try_take(choice, output)
        self._note_memory()

    def _try_take(self, choice: Choice, output: StepOutput) -> None:
        try:
            self._take(choice, output)
        except Exception:
            # The tokenizer is a program of the checkpoint's: it may raise anything.
            _LOG.exception("a token could not be decoded")
            self._fail(choice.ticket, ApiError(500, "engine_error", "a token could not be decoded"), "error")

    def _take(self, choice: Choice, output: StepOutput) -> None:
        """A new token of a choice."""
        now, ticket = time.perf_counter(), choice.ticket
        if ticket.first_token is None:
            ticket.first_token = now
            self._metrics.first_token_seconds.observe(now - ticket.arrived)
            self._metrics.prompt_tokens.labels(ticket.plan.label).inc(ticket.prompt_tokens)
        elif choice.tokens:
            self._metrics.inter_token_seconds.observe(now - choice.last_time)
        fed = len(choice.request.prompt) + output.position
        choice.tokens += 1
        choice.layers_run += output.layers
        choice.kv_bytes = self._kv_size.of(fed, output.layers)
        choice.kv_bytes_full = self._kv_size.of(fed, self._num_layers)
        choice.last_time = now
        ticket.budgets.add(output.layers)
        pieces = choice.text.push(output)
        if choice.text.stopped:
            choice.finish_reason = "stop"
            self._running[choice].cancel(choice)
        else:
            choice.finish_reason = "stop" if output.finish_reason == "eos" else output.finish_reason
        if pieces or choice.finish_reason is not None:
            self._outbox.add(ticket, Update(choice.index, pieces, choice.finish_reason))
        if choice.finish_reason is not None:
            self._leave(choice)
            if ticket.done:
                self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        sets = None
        if ticket.trace:
            order = DepthOrder(ticket.plan.schedule)
            sets = {str(budget): list(order.layers(budget)) for budget in sorted(ticket.budgets)}
        summary = ticket.summary(self._num_layers, sets)
        ticket.outcome = "ok"
        self._outbox.add(ticket, Finished(summary))

    def _leave(self, choice: Choice) -> None:
        """A choice's row is free; its counters are added up."""
        self._running.pop(choice, None)
        label = choice.ticket.plan.label
        self._metrics.generated_tokens.labels(label).inc(choice.tokens)
        self._metrics.layers_run.labels(label).inc(choice.layers_run)
        self._metrics.layers_full.labels(label).inc(choice.tokens * self._num_layers)
        if choice.tokens and choice.ticket.first_token is not None:
            self._row_seconds += 0.1 * (choice.last_time - choice.ticket.first_token - self._row_seconds)

    def _drop(self, ticket: Ticket) -> None:
        with self._wake:
            self._waiting = deque(choice for choice in self._waiting if choice.ticket is not ticket)
        for choice in ticket.choices:
            lane = self._running.get(choice)
            if lane is not None:
                lane.cancel(choice)
                self._leave(choice)

    def _fail(self, ticket: Ticket, error: ApiError, outcome: str) -> None:
        self._drop(ticket)
        ticket.outcome = outcome
        self._outbox.add(ticket, Failed(error))

    # ------------------------------------------------------------------ figures

    def _note_step(self, outputs: list[tuple[Choice, StepOutput]], seconds: float) -> None:
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(seconds)
        if outputs:
            self._metrics.step_depth.observe(sum(out.layers for _, out in outputs) / len(outputs))

    def _note_memory(self) -> None:
        held = sum(lane.kv_bytes for lane in self._lanes)
        full = sum(choice.kv_bytes_full for choice in self._running)
        self._metrics.running_rows.set(sum(lane.rows for lane in self._lanes))
        self._metrics.kv_bytes_held.set(held)
        self._metrics.kv_bytes_saved.set(max(0, full - sum(choice.kv_bytes for choice in self._running)))


def _stopping() -> ApiError:
    return ApiError(503, "stopping", "the server is stopping")
