"""A request on its way through an engine, from submission to its last token. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

from skipdecode.engine.drafts import Drafter
from skipdecode.engine.requests import FinishReason, NextToken, Request
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.engine.sampling import Sampler


class PromptLayers(NamedTuple):
    """The layers that prompt tokens run, and the layers in which they are projected; the last token runs both.

    `explicit`: the schedule names the prompt's layers, which are no budget of the drop order.
    """

    run: tuple[int, ...]
    projected: tuple[int, ...] = ()
    explicit: bool = False

    @classmethod
    def of(cls, schedule: Schedule) -> Self:
        """The prompt layers of a schedule."""
        if isinstance(schedule.prompt, str):
            return cls(schedule.prompt_layers())
        return cls(schedule.prompt_layers(), schedule.projected, explicit=True)

    @property
    def held(self) -> tuple[int, ...]:
        """Layers that store keys and values, ascending."""
        return tuple(sorted(self.run + self.projected))


@lru_cache(maxsize=256)
def _layer_sets(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The layers of each position of a schedule; the last set holds for all later positions."""
    return tuple(map(schedule.layers, range(schedule.seq_len)))


@dataclass(eq=False, slots=True)
class Sequence:
    """The state of a request in an engine.

    `number`: number of the request, in the order of submission. `request`: the user's request. `schedule`: which layers
    its tokens run.
    """

    number: int
    request: Request
    schedule: Schedule
    # Guesses its next tokens; set when an engine that drafts admits the sequence.
    drafter: Drafter | None = field(init=False, default=None)
    prompt: PromptLayers = field(init=False)  # the layers of its prompt tokens
    output: list[int] = field(init=False, default_factory=list)  # new tokens so far
    # Why the sequence has ended; None while it has not.
    finish_reason: FinishReason | None = field(init=False, default=None)
    sampler: Sampler = field(init=False)  # chooses its tokens; set when the sequence is admitted
    slot: int = field(init=False, default=-1)  # its place in the KV store; -1 while it waits
    layers: tuple[int, ...] = field(init=False)  # layers that hold its keys and values, and that its latest token ran
    _layer_sets: tuple[tuple[int, ...], ...] = field(init=False)
    ran: int = field(init=False, default=0)  # tokens of prompt and output that have run
    cached: int = field(init=False, default=0)  # prompt tokens that came from the prefix cache and did not run
    # Log-probabilities of prompt tokens that have run, for requests that ask for them; see `StepOutput.prompt`.
    scores: list[NextToken] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._layer_sets = _layer_sets(self.schedule)
        self.prompt = PromptLayers.of(self.schedule)
        self.layers = self.prompt.held

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """The order of batch jobs: maximum new tokens, prompt tokens, number."""
        return self.request.max_new_tokens, len(self.request.prompt), self.number

    @property
    def total_tokens(self) -> int:
        """Prompt tokens plus maximum new tokens."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def in_prefill(self) -> bool:
        """Whether some prompt tokens have not run yet."""
        return self.ran < len(self.request.prompt)

    @property
    def next_layers(self) -> tuple[int, ...]:
        """The layers that the last output token runs when it is fed back."""
        return self._layer_sets[min(len(self.output), len(self._layer_sets)) - 1]

    def find_drafts(self, drafter: Drafter, most: int) -> Drafter:
        """Have the sequence's drafter find at most so many drafts."""
        drafter.find(self._room(most))
        return drafter

    @property
    def forced_tokens(self) -> tuple[int, ...]:
        """Drafts that the grammar leaves no choice of."""
        tokens = self.sampler.forced_tokens()
        return tuple(tokens[: max(0, self._room(len(tokens)))]) if tokens else ()

    def _room(self, most: int) -> int:
        """The number of drafts, at most `most`: they run the layers of the last output token."""
        end, first = len(self._layer_sets) - 1, len(self.output) - 1
        most = min(most, self.request.max_new_tokens - len(self.output) - 1)
        if first < end:
            same = self._layer_sets[first]
            most = next((n for n in range(most) if self._layer_sets[min(first + n + 1, end)] != same), most)
        return most

    def append(self, token: int) -> None:
        """Append a new token, and end the sequence if the token is its last."""
        self.output.append(token)
        if self.sampler.failed:
            self.finish_reason = "error"
        elif token in self.request.stop_ids:
            self.finish_reason = "eos"
        elif len(self.output) >= self.request.max_new_tokens:
            self.finish_reason = "length"
