"""The one interface of everything that decodes a batch: token ids in, one `StepOutput` for every new token out.

`FastEngine` (fast.py) runs on the package's own kernels, `GatedEngine` (gated.py) on transformers' forward with gates,
`GenerateEngine` (generate.py) is transformers' own `generate`, untouched. Knows nothing about text.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from skipdecode.engine.requests import FinishReason, Request, StepOutput
from skipdecode.engine.sequence import Sequence
from skipdecode.schedule import Schedule

__all__ = ["ENGINES", "QUANTIZATIONS", "Decoded", "Engine", "EngineStats", "NextToken", "StopCheck"]

ENGINES = ("auto", "fast", "transformers")
"""What a user may ask for; see `skipdecode.engine.opening.open_fast`."""
QUANTIZATIONS = ("none", "int8", "int4", "w8a8")

StopCheck = Callable[[int, StepOutput], bool]
"""Told of each new token, with the place of its request; True ends the sequence with reason "stop"."""


@dataclass
class EngineStats:
    """Totals of an engine since it was made.

    Parameters
    ----------
    steps : int
        Forwards with rows that decode, those that prompts share among them.
    prompt_tokens, prefix_hit_tokens, new_tokens : int
        Tokens of prompts that ran, tokens of prompts that a prefix cache had, tokens put out.
    seconds : float
        Time in `step`, everything included.
    prompt_seconds : float
        Time in forwards of prompts. That of a forward with rows that decode is shared out by tokens x layers: what each
        would cost alone is not known.
    fed_tokens : int
        Generated tokens that were fed back: one for each row of each step.
    token_layers : int
        Sum over fed tokens of the layers that they ran.
    layer_reads : int
        Sum over steps of the layers that some fed token ran: what had to be read for them.
    short_heads, head_fallbacks : int
        Forwards whose tokens an 8-bit copy of the head decided (`skipdecode.engine.kernels.head`), and those that asked
        it and took the full head.
    kv_bytes_peak, kv_bytes_full_peak : int
        Most bytes of keys and values held at a time, and what the same rows would have held at full depth.
    """

    steps: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    fed_tokens: int = 0
    token_layers: int = 0
    layer_reads: int = 0
    short_heads: int = 0
    head_fallbacks: int = 0
    kv_bytes_peak: int = 0
    kv_bytes_full_peak: int = 0

    @property
    def after_prompts(self) -> float:
        """Seconds of all that is not prompts' forwards: what decoding takes."""
        return self.seconds - self.prompt_seconds

    @property
    def mean_layers(self) -> float | None:
        """Layers that a fed token ran, on average; None if none was fed."""
        return self.token_layers / self.fed_tokens if self.fed_tokens else None

    def note_kv(self, held: int, full: int) -> None:
        """Take in the bytes that are held now, and what full depth would hold."""
        self.kv_bytes_peak = max(self.kv_bytes_peak, held)
        self.kv_bytes_full_peak = max(self.kv_bytes_full_peak, full)


class Decoded(NamedTuple):
    """A finished row: its new tokens, the end token included, and why it ended."""

    tokens: list[int]
    finish_reason: FinishReason


class NextToken(NamedTuple):
    """A chosen token, its log-probability and the likeliest tokens with theirs, as in `StepOutput`."""

    token: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()


class Engine(ABC):
    """Decodes requests on one model.

    Attributes
    ----------
    name : str
        What runs the model, for tables: "fast", "fast-int8", "transformers", …
    num_layers : int
        Decoder layers of the model.
    schedule : Schedule
        Under which requests run that bring none of their own.
    stats : EngineStats
    began : float
        Reading of `clock` from which `StepOutput.seconds` counts.
    """

    name: str

    def __init__(self, schedule: Schedule) -> None:
        self.num_layers, self.schedule = schedule.num_layers, schedule
        self.stats = EngineStats()
        self.began = self.clock()
        self._submitted = 0

    def clock(self) -> float:
        """Seconds since a moment in the past, by which all times of this engine are taken."""
        return time.perf_counter()

    def submit(self, requests: Iterable[Request], schedule: Schedule | None = None) -> list[int]:
        """Queue requests; returns their numbers, which go on from earlier ones.

        Parameters
        ----------
        requests : iterable of Request
        schedule : Schedule, optional
            Of these requests, in place of the engine's.

        Raises
        ------
        ScheduleError
            The engine cannot run the schedule beside its own.
        UsageError
            A request cannot ever run here.
        """
        return [sequence.number for sequence in self._sequences(requests, schedule)]

    def _sequences(self, requests: Iterable[Request], schedule: Schedule | None) -> list[Sequence]:
        """See `submit`; the sequences."""
        wanted = self.schedule if schedule is None else schedule
        new = [Sequence(number, request, wanted) for number, request in enumerate(requests, self._submitted)]
        self._enqueue(wanted, new)
        self._submitted += len(new)
        return new

    @abstractmethod
    def _enqueue(self, schedule: Schedule, new: list[Sequence]) -> None:
        """Queue sequences under a schedule, all of them or none; raises as `submit`."""

    @abstractmethod
    def step(self) -> list[StepOutput]:
        """Do the next piece of work, a forward where the engine has it in hand; the tokens that it gave, at once."""

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Drop a request that waits or runs before the next step; unknown numbers are ignored."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that have no place in the batch yet."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Requests that have a place in the batch."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of keys and values that rows hold."""

    @property
    def cached_bytes(self) -> int:
        """Bytes that are kept of prompts for rows to come; no part of `kv_bytes`."""
        return 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.rows)

    def takes(self, schedule: Schedule) -> bool:
        """Whether `submit` accepts requests under this schedule."""
        return schedule.num_layers == self.num_layers

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Drop all requests and what they hold; the model is as it was."""

    def _emit(self, sequences: list[Sequence], tokens: list[NextToken], start: float) -> list[StepOutput]:
        """Append a token to each sequence, and tell of it; the step began at `start`."""
        now = self.clock()
        times = now - self.began, now - start
        self.stats.new_tokens += len(sequences)
        outputs = []
        for sequence, (token, logprob, top) in zip(sequences, tokens, strict=True):
            sequence.append(token)
            position, layers = len(sequence.output) - 1, len(sequence.layers)
            told = sequence.number, position, token, logprob, layers, sequence.finish_reason
            outputs.append(StepOutput(*told, *times, top, sequence.cached))
        return outputs

    def run(self, requests: Iterable[Request]) -> Iterator[StepOutput]:
        """Decode requests; yields every new token when its step ends. The engine is closed if this is left early."""
        self.submit(requests)
        try:
            while self.has_work:
                yield from self.step()
        except GeneratorExit:
            self.close()
            raise

    def decode(
        self, requests: Collection[Request], should_stop: StopCheck | None = None, schedule: Schedule | None = None
    ) -> list[Decoded]:
        """Decode requests to their ends, under the engine's schedule or their own; the rows in their order."""
        sequences = self._sequences(requests, schedule)
        places = {sequence.number: place for place, sequence in enumerate(sequences)}
        while self.has_work:
            for out in self.step():
                place = places[out.request]
                sequence = sequences[place]
                if should_stop is None or sequence.finish_reason == "stop":
                    continue
                if should_stop(place, out):
                    sequence.finish_reason = "stop"
                    del sequence.output[out.position + 1 :]  # which an engine of whole batches has given
                    self.cancel(out.request)
        return [Decoded(sequence.output, sequence.finish_reason or "length") for sequence in sequences]
