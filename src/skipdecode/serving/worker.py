"""The one thread that owns the model: takes requests, batches their choices, sends back tokens.

The event loop talks to it through `submit`, `cancel` and `stop`, which return at once; events come back through
`loop.call_soon_threadsafe`, one call a step for all rows together.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from skipdecode.common.environment import isolated_torch
from skipdecode.engine.base import Engine, EngineStats
from skipdecode.engine.requests import NextToken, StepOutput
from skipdecode.errors import SkipDecodeError
from skipdecode.generation.detokenizer import Piece, TokenTexts
from skipdecode.generation.loop import TextLoop
from skipdecode.serving.errors import ApiError, invalid
from skipdecode.serving.metrics import Metrics
from skipdecode.serving.preprocessing import Sequences
from skipdecode.serving.served_model import ServedModel
from skipdecode.serving.stream_state import Choice, Event, StreamState

_LOG = logging.getLogger("skipdecode.serve")
_LONGEST_RETRY = 60


class ModelWorker:
    """Runs requests.

    `make_engine`: makes an engine: for the first choice, after the last one unless the engine keeps prompts, and after
    a failure.
    """

    def __init__(self, model: ServedModel, make_engine: Callable[[], Engine], metrics: Metrics) -> None:
        self._model = model
        self._make_engine = make_engine
        self._metrics = metrics
        self._token_texts = TokenTexts(copy.deepcopy(model.tokenizer))
        self._texts: TextLoop[Choice] | None = None  # changed by the worker's thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._wake = threading.Condition()
        # Under the lock of `_wake`:
        self._waiting: deque[Choice] = deque()
        self._cancelled: list[StreamState] = []
        self._stopping = False
        self._drained_at = math.inf  # when those that run have to end
        # The thread's own:
        self._events = defaultdict[StreamState, list[Event | ApiError]](list)  # of this step
        self._row_seconds = 1.0  # moving mean of a choice's time in the batch

    # ------------------------------------------------------------------ any thread

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; events go to `loop`."""
        self._loop = loop
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        return self.alive and not self._stopping and self._drained_at == math.inf

    @property
    def _rows(self) -> int:
        texts = self._texts
        return 0 if texts is None else len(texts.running)

    def submit(self, sequences: Sequences, arrived: float) -> StreamState:
        """Queue all choices of a request that came at `arrived`, or none; returns its stream.

        Raises ApiError: 429 if the queue has no room for all of its choices, 503 if the worker stops.
        """
        stream = StreamState(sequences, self._model, self._token_texts, arrived)
        with self._wake:
            if not self.accepting:
                raise _stopping()
            self.check_room(len(stream.choices))
            self._waiting.extend(stream.choices)
            self._metrics.queue_length.set(len(self._waiting))
            self._wake.notify()
        return stream

    def check_room(self, choices: int) -> None:
        """Raise ApiError (429) if there is no room for so many more."""
        waiting, limits = len(self._waiting), self._model.limits
        # A batch's worth may always wait for its rows: those are given at the next step.
        if choices > limits.max_rows + limits.max_waiting - waiting - self._rows:
            batches = 1 + waiting / limits.max_rows
            seconds = min(_LONGEST_RETRY, math.ceil(batches * self._row_seconds))
            message = f"the queue is full ({waiting} wait): try again in {seconds} s"
            raise ApiError(429, "queue_full", message, headers={"Retry-After": str(seconds)})

    def cancel(self, stream: StreamState) -> None:
        """Drop what is left of a request before the next step."""
        with self._wake:
            self._cancelled.append(stream)
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

    @isolated_torch()
    def _run(self) -> None:
        try:
            while self._await_work():
                self._expire()
                self._admit()
                self._step()
                self._note_memory()
                self._send()
        except Exception:
            _LOG.exception("the model's thread ended")
        finally:
            with self._wake:
                self._stopping = True
            for stream in self._streams():
                self._events[stream].append(_stopping())
            self._send()

    def _streams(self) -> set[StreamState]:
        running = () if self._texts is None else self._texts.running.values()
        with self._wake:
            return {choice.stream for choice in (*self._waiting, *running)}

    def _await_work(self) -> bool:
        """Sleep until there is something to do, drop cancelled requests; False once the worker is to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._cancelled or self._rows or self._stopping)
            if self._stopping:
                return False
            cancelled, self._cancelled = self._cancelled, []
        for stream in cancelled:
            self._drop(stream)
        return True

    def _expire(self) -> None:
        now, seconds = time.perf_counter(), f"{self._model.limits.max_seconds:g} s"
        for stream in self._streams():
            if now > self._drained_at:
                self._fail(stream, _stopping(), "error")
            elif stream.deadline < now and any(choice.admitted for choice in stream.choices):
                error = ApiError(504, "timeout", f"the request's {seconds} ran out: ask for fewer tokens")
                self._fail(stream, error, "timeout")
            elif stream.deadline < now:
                error = ApiError(503, "queue_timeout", f"the request waited {seconds} without a free row: try later")
                self._fail(stream, error, "timeout")

    def _admit(self) -> None:
        while True:
            with self._wake:
                self._metrics.queue_length.set(len(self._waiting))
                if not self._waiting or self._rows >= self._model.limits.max_rows:
                    return
                choice = self._waiting[0]  # only this thread takes any out
            if self._texts is None:
                self._texts = TextLoop(self._make_engine())
            try:
                self._texts.submit([choice], choice.stream.schedule, checked=True)
                choice.admitted = time.perf_counter()
                with self._wake:
                    self._waiting.popleft()
            except SkipDecodeError as error:
                self._fail(choice.stream, invalid(str(error)), "refused")

    def _step(self) -> None:
        texts = self._texts
        if texts is None or not texts.running:
            return
        start = time.perf_counter()
        try:
            outputs = list(texts.step())
        except Exception:
            # Of any kind: memory, a kernel, a bug. What runs is lost, and the server goes on with a fresh engine.
            _LOG.exception("a step failed")
            self._metrics.step_failures.inc()
            self._drop_engine()
            for choice in texts.running.values():
                self._count(choice)
            for stream in {choice.stream for choice in texts.running.values()}:
                self._fail(stream, ApiError(500, "engine_error", "the model failed; the request is lost"), "error")
            return
        self._metrics.steps.inc()
        self._metrics.step_seconds.observe(time.perf_counter() - start)
        stats, texts.engine.stats = texts.engine.stats, EngineStats()
        self._metrics.kv_bytes_saved.set(max(0, stats.kv_bytes_full_peak - stats.kv_bytes_peak))
        self._metrics.drafted_tokens.inc(stats.drafted_tokens)
        self._metrics.accepted_tokens.inc(stats.accepted_tokens)
        if outputs:
            self._metrics.step_depth.observe(sum(out.layers for _, out in outputs) / len(outputs))
        for choice, output in outputs:
            if choice.number not in texts.running:
                continue  # a stop string has ended it in this step, or its request has failed
            try:
                self._take(texts, choice, output)
            except Exception:
                # The tokenizer is a program of the checkpoint's: it may raise anything.
                _LOG.exception("a token could not be decoded")
                self._fail(choice.stream, ApiError(500, "engine_error", "a token could not be decoded"), "error")

    def _take(self, texts: TextLoop[Choice], choice: Choice, output: StepOutput) -> None:
        stream, sequences = choice.stream, choice.stream.sequences
        prompt: tuple[Piece, ...] = ()
        if not output.position:
            choice.scores = output.prompt
            prompt = _prompt_pieces(choice, output) if sequences.echo else ()
            if choice.index % sequences.copies == 0:
                stream.cached_tokens += output.cached
                self._metrics.prompt_tokens.labels(stream.schedule.name).inc(len(choice.request.prompt))
                self._metrics.prefix_hit_tokens.labels(stream.schedule.name).inc(output.cached)
        choice.layers.append(output.layers)
        pieces = texts.take(choice, output)
        if sequences.empty:
            pieces, choice.finish_reason = [], "length"
            choice.tokens.clear()
        if choice.finish_reason == "error":
            message = "the grammar allows no token here, or takes too much work: simplify it"
            self._fail(stream, invalid(message), "error")
            return
        reason = "stop" if choice.finish_reason == "eos" else choice.finish_reason
        if prompt or pieces or reason is not None:
            self._events[stream].append(Event(choice.index, pieces, reason, prompt))
        if reason is not None:
            self._count(choice)
            self._drop_idle_engine()

    def _count(self, choice: Choice) -> None:
        """Add up the counters of a choice that leaves the batch."""
        label, num_layers = choice.stream.schedule.name, choice.stream.schedule.num_layers
        self._metrics.generated_tokens.labels(label).inc(len(choice.tokens))
        self._metrics.layers_run.labels(label).inc(choice.layers_run)
        self._metrics.layers_full.labels(label).inc(len(choice.tokens) * num_layers)
        if choice.tokens and choice.admitted is not None:
            self._row_seconds += 0.1 * (time.perf_counter() - choice.admitted - self._row_seconds)

    def _drop_idle_engine(self) -> None:
        if self._texts is not None and not self._texts.running and not self._texts.engine.cached_bytes:
            self._drop_engine()

    def _drop_engine(self) -> None:
        """Close the engine; what runs on it is lost."""
        texts, self._texts = self._texts, None
        # It may be broken: what it can still give back, it gives back.
        with contextlib.suppress(Exception):
            if texts is not None:
                texts.engine.close()

    def _drop(self, stream: StreamState) -> None:
        with self._wake:
            self._waiting = deque(choice for choice in self._waiting if choice.stream is not stream)
        for choice in stream.choices:
            if self._texts is not None and self._texts.running.get(choice.number) is choice:
                self._texts.remove(choice)
                self._count(choice)
        self._drop_idle_engine()

    def _fail(self, stream: StreamState, error: ApiError, outcome: str) -> None:
        self._drop(stream)
        stream.outcome = outcome
        self._events[stream].append(error)

    def _send(self) -> None:
        """Hand the step's events over to the event loop."""
        if self._events and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, self._events)
        self._events = defaultdict(list)

    def _put(self, events: dict[StreamState, list[Event | ApiError]]) -> None:
        """Give events to their readers, in the event loop; readers that are too far behind are dropped."""
        for stream, new in events.items():
            if not stream.put(new):
                self.cancel(stream)

    def _note_memory(self) -> None:
        engine = None if self._texts is None else self._texts.engine
        self._metrics.running_rows.set(self._rows)
        self._metrics.kv_bytes_held.set(0 if engine is None else engine.kv_bytes)
        self._metrics.prefix_cache_bytes.set(0 if engine is None else engine.cached_bytes)
        if not self._rows:
            self._metrics.kv_bytes_saved.set(0)


def _prompt_pieces(choice: Choice, first: StepOutput) -> tuple[Piece, ...]:
    """The prompt's tokens, with their log-probabilities if the first output has them."""
    prompt = choice.request.prompt
    scores = first.prompt or map(NextToken, prompt[1:])
    outputs = (
        first._replace(position=position, token=token, logprob=logprob, top=top)
        for position, (token, logprob, top) in enumerate([NextToken(prompt[0]), *scores], -len(prompt))
    )
    return tuple(choice.reader.echo(outputs))


def _stopping() -> ApiError:
    return ApiError(503, "stopping", "the server is stopping")
