"""The interface of all engines: token ids in, one `StepOutput` for every new token out.

`FastEngine` (fast.py) runs on the package's own kernels, and `GatedEngine` (gated.py) on transformers' forward with
gates. Engines do not know text.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from skipdecode.common.environment import isolated_torch
from skipdecode.engine.requests import FinishReason, NextToken, Request, StepOutput
from skipdecode.engine.sequence import Sequence
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

ENGINES = ("auto", "fast", "transformers")
"""The engines that a user may name; see `skipdecode.engine.opening.open_fast`."""
QUANTIZATIONS = ("none", "int8", "w8a8")


@dataclass
class EngineStats:
    """Totals of an engine since it was made."""

    steps: int = 0  # forwards in which sequences decode; prompts may share such a forward
    prompt_tokens: int = 0  # that ran
    prompt_layers: int = 0  # sum over prompt tokens that ran of their layers
    prefix_hit_tokens: int = 0  # prompt tokens from the prefix cache
    new_tokens: int = 0
    step_seconds: float = 0.0  # total time in `step`
    # In forwards of prompts. If decoding sequences share one, its time is split in proportion to tokens x layers.
    prompt_seconds: float = 0.0
    fed_tokens: int = 0  # new tokens that were fed back: one per decoding sequence and step, and the accepted drafts
    token_layers: int = 0  # sum over fed tokens of the layers that they ran, without rejected drafts
    short_heads: int = 0  # forwards that the 8-bit copy of the head decided (`skipdecode.engine.kernels.head`)
    head_fallbacks: int = 0  # forwards that used the full head after it
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafts
    kv_bytes_peak: int = 0
    kv_bytes_full_peak: int = 0  # of the same sequences at full depth

    @property
    def decode_seconds(self) -> float:
        """Seconds of decoding: all time outside the forwards of prompts."""
        return self.step_seconds - self.prompt_seconds

    @property
    def mean_layers(self) -> float | None:
        """Mean number of layers of a fed token; None if no token was fed."""
        return self.token_layers / self.fed_tokens if self.fed_tokens else None

    def note_kv(self, held: int, full: int) -> None:
        """Update the peaks with the bytes held now, and the bytes that full depth would hold."""
        self.kv_bytes_peak = max(self.kv_bytes_peak, held)
        self.kv_bytes_full_peak = max(self.kv_bytes_full_peak, full)


class Decoded(NamedTuple):
    """A finished sequence: its new tokens with the end token, and the finish reason."""

    tokens: list[int]
    finish_reason: FinishReason


class Engine(ABC):
    """Decoder of requests on one model.

    Attributes `name`: that of the engine in tables, such as "fast-int8". `schedule`: of requests without one of their
    own. `began`: reading of `time.perf_counter` at which `StepOutput.seconds` is 0. `scores_prompts`: whether requests
    with `scores_prompt` are accepted. `skips_prefill`: may be set before the first request, to time decode steps:
    prompts are not computed, and some numbers stand for their keys and values.
    """

    name: str
    scores_prompts = skips_prefill = False

    def __init__(self, schedule: Schedule) -> None:
        self.num_layers, self.schedule = schedule.num_layers, schedule
        self.stats = EngineStats()
        self.began = time.perf_counter()
        self._submitted = 0

    @isolated_torch()
    def submit(
        self, requests: Iterable[Request], schedule: Schedule | None = None, *, checked: bool = False
    ) -> list[int]:
        """Queue requests; returns their numbers, which continue those of earlier requests.

        `schedule` is in place of the engine's. `checked`: the caller knows that the model can run the schedule, and
        that all ids are of its vocabulary.

        Raises ScheduleError: the schedule is for another number of layers; UsageError: a request can never run on this
        engine.
        """
        return [sequence.number for sequence in self._sequences(requests, schedule, checked=checked)]

    def _sequences(
        self, requests: Iterable[Request], schedule: Schedule | None, *, checked: bool = False
    ) -> list[Sequence]:
        """`submit`, but returns the sequences."""
        wanted, requests = self.schedule if schedule is None else schedule, list(requests)
        if not self.scores_prompts and any(request.scores_prompt for request in requests):
            raise UsageError(f"the engine {self.name!r} gives no log-probabilities of prompts: leave scores_prompt out")
        new = [Sequence(number, request, wanted) for number, request in enumerate(requests, self._submitted)]
        self._enqueue(wanted, new, checked=checked)
        self._submitted += len(new)
        return new

    @abstractmethod
    def _enqueue(self, schedule: Schedule, new: list[Sequence], *, checked: bool) -> None:
        """Queue sequences under a schedule, all of them or none; raises as `submit`."""

    @abstractmethod
    def step(self) -> list[StepOutput]:
        """Run the next forward (or batch); returns its new tokens."""

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Drop a waiting or running request before the next step; unknown numbers are ignored."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests that wait for a place in the batch."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of requests in the batch."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of keys and values that running sequences hold."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of prompts that the prefix cache keeps for later sequences; not part of `kv_bytes`."""
        return 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.rows)

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Drop all requests and free their memory; the model is as before."""

    def _emit(self, chosen: list[tuple[Sequence, NextToken]], start: float) -> list[StepOutput]:
        """Append the chosen tokens to their sequences, and make the outputs; the step began at `start`."""
        now = time.perf_counter()
        times = now - self.began, now - start
        self.stats.new_tokens += len(chosen)
        outputs = []
        for sequence, (token, logprob, top) in chosen:
            sequence.append(token)
            position, layers = len(sequence.output) - 1, len(sequence.layers)
            about = sequence.number, position, token, logprob, layers, sequence.finish_reason
            scores = () if position else tuple(sequence.scores)
            outputs.append(StepOutput(*about, *times, top, sequence.cached, scores))
        return outputs

    def run(self, requests: Iterable[Request]) -> Iterator[StepOutput]:
        """Decode requests; yields every new token when its step ends. Leaving the iterator early closes the engine."""
        self.submit(requests)
        try:
            while self.has_work:
                yield from self.step()
        except GeneratorExit:
            self.close()
            raise

    @isolated_torch()
    def decode(self, requests: Collection[Request], schedule: Schedule | None = None) -> list[Decoded]:
        """Decode requests to their ends, under the engine's schedule or their own; the rows in their order."""
        sequences = self._sequences(requests, schedule)
        while self.has_work:
            self.step()
        return [Decoded(sequence.output, sequence.finish_reason or "length") for sequence in sequences]
