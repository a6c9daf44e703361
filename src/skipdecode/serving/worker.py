"""The one thread that owns the model: takes requests, batches their choices, sends back tokens.

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
from collections.abc import Sequence

from skipdecode.engine.kv import KVLayout
from skipdecode.engine.requests import StepOutput
from skipdecode.errors import SkipDecodeError
from skipdecode.generation.detokenizer import Piece
from skipdecode.serving.errors import ApiError
from skipdecode.serving.groups import Group
from skipdecode.serving.limits import ServerLimits
from skipdecode.serving.metrics import Metrics
from skipdecode.serving.request_state import Choice, RequestState, Update

_LOG = logging.getLogger("skipdecode.serve")
_LONGEST_RETRY = 60


class ModelWorker:
    """Runs requests.

    Parameters
    ----------
    groups : sequence of Group
        Together they take every schedule that a request may have. Used by the worker's thread only.
    layout : KVLayout
        How the groups store keys and values.
    """

    def __init__(
        self, groups: Sequence[Group], num_layers: int, layout: KVLayout, limits: ServerLimits, metrics: Metrics
    ) -> None:
        self._groups = groups
        self._num_layers = num_layers
        self._layout = layout
        self._limits = limits
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._wake = threading.Condition()
        # Under the lock of `_wake`:
        self._waiting: deque[Choice] = deque()
        self._cancelled: list[RequestState] = []
        self._stopping = False
        self._drained_at = math.inf  # when those that run have to end
        # The thread's own:
        self._events: dict[RequestState, list[Update | ApiError]] = {}  # of this step
        self._row_seconds = 1.0  # moving mean of a choice's time in the batch

    # ------------------------------------------------------------------ any thread

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; events go to `loop`."""
        self._loop = loop
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        """Whether requests are taken."""
        return self.alive and not self._stopping and self._drained_at == math.inf

    @property
    def _rows(self) -> int:
        """Choices in the batch."""
        return sum(group.rows for group in self._groups)

    @property
    def _running(self) -> list[Choice]:
        return [choice for group in self._groups for choice in group.choices]

    def submit(self, state: RequestState) -> None:
        """Queue a request.

        Raises
        ------
        ApiError
            429 if the queue has no room for all of its choices, 503 if the worker stops.
        """
        with self._wake:
            if not self.accepting:
                raise _stopping()
            self.check_room(len(state.choices))
            self._waiting.extend(state.choices)
            self._metrics.queue_length.set(len(self._waiting))
            self._wake.notify()

    def check_room(self, choices: int) -> None:
        """Raise ApiError (429) if there is no room for so many more."""
        waiting = len(self._waiting)
        # A batch's worth may always wait for its rows: those are given at the next step.
        if choices > self._limits.max_rows + self._limits.max_waiting - waiting - self._rows:
            batches = 1 + waiting / self._limits.max_rows
            seconds = min(_LONGEST_RETRY, math.ceil(batches * self._row_seconds))
            message = f"the queue is full ({waiting} wait): try again in {seconds} s"
            raise ApiError(429, "queue_full", message, headers={"Retry-After": str(seconds)})

    def cancel(self, state: RequestState) -> None:
        """Drop what is left of a request before the next step."""
        with self._wake:
            self._cancelled.append(state)
            self._wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no more requests; those that are there fail after this time."""
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
                self._send()
        except Exception:
            _LOG.exception("the model's thread ended")
        finally:
            with self._wake:
                self._stopping = True
            for state in self._all_requests():
                self._tell(state, _stopping())
            self._send()

    def _all_requests(self) -> set[RequestState]:
        with self._wake:
            return {choice.state for choice in (*self._waiting, *self._running)}

    def _await_work(self) -> bool:
        """Sleep until there is something to do, drop cancelled requests; False once the worker is to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._cancelled or self._rows or self._stopping)
            if self._stopping:
                return False
            cancelled, self._cancelled = self._cancelled, []
        for state in cancelled:
            self._drop(state)
        return True

    def _expire(self) -> None:
        now, seconds = time.perf_counter(), f"{self._limits.max_seconds:g} s"
        for state in self._all_requests():
            if now > self._drained_at:
                self._fail(state, _stopping(), "error")
            elif state.deadline < now and any(choice.admitted for choice in state.choices):
                error = ApiError(504, "timeout", f"the request's {seconds} ran out: ask for fewer tokens")
                self._fail(state, error, "timeout")
            elif state.deadline < now:
                error = ApiError(503, "queue_timeout", f"the request waited {seconds} without a free row: try later")
                self._fail(state, error, "timeout")

    def _admit(self) -> None:
        while True:
            with self._wake:
                self._metrics.queue_length.set(len(self._waiting))
                if not self._waiting or self._rows >= self._limits.max_rows:
                    return
                choice = self._waiting[0]  # only this thread takes any out
            schedule = choice.state.schedule
            # Full depth fits any order: it goes where most rows are.
            group = max((group for group in self._groups if group.takes(schedule)), key=lambda group: group.rows)
            try:
                group.submit(choice)
                choice.admitted = time.perf_counter()
                with self._wake:
                    self._waiting.popleft()
            except SkipDecodeError as error:
                self._fail(choice.state, ApiError(400, "invalid_value", str(error)), "refused")

    def _step(self) -> None:
        for group in self._groups:
            if not group.rows:
                continue
            start = time.perf_counter()
            try:
                outputs = group.step()
            except Exception:
                # Of any kind: memory, a kernel, a bug. Its rows fail, the rest goes on with a fresh engine.
                _LOG.exception("a step failed")
                self._metrics.step_failures.inc()
                group.drop_engine()
                for state in {choice.state for choice in group.choices}:
                    self._fail(state, ApiError(500, "engine_error", "the model failed; the request is lost"), "error")
                continue
            self._metrics.steps.inc()
            for name, count in group.take_drafts().items():
                getattr(self._metrics, name).inc(count)
            self._metrics.step_seconds.observe(time.perf_counter() - start)
            if outputs:
                self._metrics.step_depth.observe(sum(out.layers for _, out in outputs) / len(outputs))
            for choice, output in outputs:
                if not group.holds(choice):
                    continue  # its request has failed meanwhile
                try:
                    self._take(choice, output)
                except Exception:
                    # The tokenizer is a program of the checkpoint's: it may raise anything.
                    _LOG.exception("a token could not be decoded")
                    self._fail(choice.state, ApiError(500, "engine_error", "a token could not be decoded"), "error")
            self._send()  # before the next group's step
        self._note_memory()

    def _take(self, choice: Choice, output: StepOutput) -> None:
        """A new token of a choice."""
        state = choice.state
        if not output.position and choice.copy == 0:
            state.cached_tokens += output.cached
            self._metrics.prompt_tokens.labels(state.label).inc(len(choice.request.prompt))
            self._metrics.prefix_hit_tokens.labels(state.label).inc(output.cached)
        fed = len(choice.request.prompt) + output.position
        choice.tokens += 1
        choice.layers_run += output.layers
        choice.kv_bytes = self._layout.bytes(fed, output.layers)
        choice.kv_bytes_full = self._layout.bytes(fed, self._num_layers)
        state.budgets.add(output.layers)
        prompt = _prompt_pieces(choice, output) if choice.echo and not output.position else ()
        pieces = choice.detokenizer.push(output)
        reason = "stop" if choice.detokenizer.stopped or output.finish_reason == "eos" else output.finish_reason
        if prompt or pieces or reason is not None:
            self._tell(state, Update(choice.index, pieces, reason, prompt))
        if reason is not None:
            self._leave(choice)

    def _leave(self, choice: Choice) -> None:
        """Free a choice's place in the batch, if it has one, and add up its counters."""
        group = next((group for group in self._groups if group.holds(choice)), None)
        if group is None:
            return
        group.remove(choice)
        label = choice.state.label
        self._metrics.generated_tokens.labels(label).inc(choice.tokens)
        self._metrics.layers_run.labels(label).inc(choice.layers_run)
        self._metrics.layers_full.labels(label).inc(choice.tokens * self._num_layers)
        if choice.tokens and choice.admitted is not None:
            self._row_seconds += 0.1 * (time.perf_counter() - choice.admitted - self._row_seconds)

    def _drop(self, state: RequestState) -> None:
        with self._wake:
            self._waiting = deque(choice for choice in self._waiting if choice.state is not state)
        for choice in state.choices:
            self._leave(choice)

    def _fail(self, state: RequestState, error: ApiError, outcome: str) -> None:
        self._drop(state)
        state.outcome = outcome
        self._tell(state, error)

    # ------------------------------------------------------------------ events and figures

    def _tell(self, state: RequestState, event: Update | ApiError) -> None:
        self._events.setdefault(state, []).append(event)

    def _send(self) -> None:
        """Hand the step's events over to the event loop."""
        if self._events and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, self._events)
        self._events = {}

    def _put(self, events: dict[RequestState, list[Update | ApiError]]) -> None:
        """In the event loop: give events to their readers; those that are too far behind are dropped."""
        for state, new in events.items():
            if not state.put(new):
                self.cancel(state)

    def _note_memory(self) -> None:
        held = sum(group.kv_bytes for group in self._groups)
        running = self._running
        self._metrics.running_rows.set(len(running))
        self._metrics.kv_bytes_held.set(held)
        self._metrics.prefix_cache_bytes.set(sum(group.cached_bytes for group in self._groups))
        saved = sum(choice.kv_bytes_full - choice.kv_bytes for choice in running)
        self._metrics.kv_bytes_saved.set(max(0, saved))


def _prompt_pieces(choice: Choice, first: StepOutput) -> tuple[Piece, ...]:
    """The prompt's tokens, with their log-probabilities if the first output has them."""
    prompt = choice.request.prompt
    known = first.prompt or [(token, math.nan, ()) for token in prompt[1:]]
    tokens = [(prompt[0], math.nan, ()), *known]
    outputs = (
        first._replace(position=place - len(prompt), token=token, logprob=logprob, top=top)
        for place, (token, logprob, top) in enumerate(tokens)
    )
    return tuple(choice.detokenizer.echo(outputs))


def _stopping() -> ApiError:
    return ApiError(503, "stopping", "the server is stopping")
