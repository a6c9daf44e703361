"""The cost of requests, prompts and decode steps: a fixed part, a part per layer that runs, the read of cached tokens.

Pure Python. A *request* is a prompt and the tokens generated from it, as one of a batch of equals. Its *decode phase*
has one step less than tokens: the first comes out of the prompt's forward, and the last one is never fed back.

All sequences of a batch have the same age, so the step at position i runs `budget(i)` layers. In a stream of sequences
of different ages a step runs each layer that any of them needs: only for a flat schedule is that the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from skipdecode.engine.scheduler import PROMPT_TOKENS
from skipdecode.errors import DataError, UsageError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:  # it brings torch, which costs read from files do without
    from skipdecode.cost.geometry import ModelGeometry

FORMAT = 3


class StepCost(NamedTuple):
    """Seconds of the parts of a decode step of `rows` sequences.

    `fixed_seconds` do not depend on depth: embeddings, head, sampling, the host's loop. `layer_seconds` is the time of
    one layer on all sequences without the cache read, `kv_seconds` that of its attention over one cached token of one
    sequence.
    """

    rows: int
    fixed_seconds: float
    layer_seconds: float
    kv_seconds: float = 0.0


class PromptCost(NamedTuple):
    """Seconds of one layer in a forward over `tokens` tokens of prompts, if it runs and if it is projected.

    A projected layer stores the keys and values of the tokens and computes nothing else.
    """

    tokens: float
    layer_seconds: float
    projection_seconds: float = 0.0


def tokens_read(kv_tokens: float, window: int, window_share: float) -> float:
    """Cached tokens of a sequence that a layer reads, averaged over full and sliding-window attention."""
    return kv_tokens - window_share * max(0, kv_tokens - window)


def between(known: Sequence[tuple[float, ...]], position: float) -> Sequence[float]:
    """Values at `position`, interpolated between `known`, each a position and its values; constant before the first."""
    right = bisect_left(known, (position,))
    if right == 0 or known[right][0] == position:
        return known[right][1:]
    (low, *below), (high, *above) = known[right - 1 : right + 1]
    share = (position - low) / (high - low)
    return [least + share * (most - least) for least, most in zip(below, above, strict=True)]


@dataclass(frozen=True)
class CostModel:
    """Seconds of the decode steps and prompts of a model on one machine. All layers cost the same."""

    num_layers: int  # decoder layers of the model
    batch: int  # sequences of a step to plan for
    steps: tuple[StepCost, ...]  # known costs, by increasing number of sequences
    # Known costs, by increasing number of tokens. Empty: a prompt token, and its projection, cost as much as a sequence
    # of the largest step, which are upper bounds.
    prompts: tuple[PromptCost, ...] = ()
    # Tokens that sliding-window attention sees, and the share of layers that have it.
    window: int = 0
    window_share: float = 0.0
    source: str = "assumed"  # origin of the costs
    residual: float | None = None  # measured: the largest relative distance between the fit and a measurement
    # A fit's bridge over a skipped layer, as a share of the layer's time without the cache read; and the tokens before
    # its own that a map of a prompt's keys and values sees, each of which costs one more projection. Every skipped
    # layer is taken to have a bridge. See `with_fit`.
    bridge_share: float = 0.0
    taps: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "batch"):
            if not getattr(self, name) >= 1:
                raise UsageError(f"{name}={getattr(self, name)!r} is not accepted: give a whole number of 1 or more")
        parts = [*(s._asdict() for s in self.steps), *(p._asdict() for p in self.prompts)]
        for name, value in (item for part in parts for item in part.items()):
            if not 0 <= value < math.inf:
                raise UsageError(f"{name}={value!r} is not accepted: give a number of 0 or more")
        for name, counts in (("rows", [s.rows for s in self.steps]), ("tokens", [p.tokens for p in self.prompts])):
            if counts != sorted(set(counts)) or 0 in counts:
                raise UsageError(f"costs by {name} {counts} are not accepted: give each once, rising from 1 or more")
        if not (0 <= self.bridge_share < math.inf and self.taps >= 0):
            raise UsageError(f"bridge_share={self.bridge_share!r}, taps={self.taps!r} are not accepted: give 0 or more")
        if not self.steps or any(s.layer_seconds + s.kv_seconds == 0 for s in self.steps):
            raise UsageError("a layer that takes no time leaves nothing to skip: give steps with layer_seconds above 0")
        if self.batch > self.max_rows:
            raise UsageError(
                f"batch={self.batch} is not accepted: the cost is known for 1 to {self.max_rows} rows; measure a "
                "larger batch for more"
            )

    @classmethod
    def of_step(
        cls, num_layers: int, batch: int, fixed_seconds: float, layer_seconds: float, kv_seconds: float = 0.0
    ) -> Self:
        """A cost model of steps of `batch` sequences alone; see `StepCost`."""
        return cls(num_layers, batch, (StepCost(batch, fixed_seconds, layer_seconds, kv_seconds),))

    def with_fit(self, geometry: ModelGeometry, rank: float, taps: int = 0) -> Self:
        """The cost with a fit's bridges of `rank` over skipped layers, and its maps with `taps`."""
        bridge = (2 * rank + 1) * geometry.hidden_size  # weights
        return replace(self, bridge_share=bridge / geometry.layer_params, taps=taps)

    @property
    def max_rows(self) -> int:
        """Most sequences for which the cost is known."""
        return self.steps[-1].rows

    def at(self, rows: int) -> StepCost:
        """The parts of a step of `rows` sequences, interpolated linearly between the known ones.

        Below the smallest known number, a step costs as much as that one, because it reads the same weights.
        """
        if not 1 <= rows <= self.max_rows:
            raise UsageError(f"rows={rows} is not accepted: the cost is known for 1 to {self.max_rows} rows")
        return StepCost(rows, *between(self.steps, rows))

    @cached_property
    def step(self) -> StepCost:
        """The parts of a step of `batch` sequences."""
        return self.at(self.batch)

    def step_seconds(self, active_layers: float, kv_tokens: float = 0) -> float:
        """Seconds of a step of `batch` sequences: `active_layers` layers, `kv_tokens` cached tokens in each."""
        reads = self.batch * self.step.kv_seconds * tokens_read(kv_tokens, self.window, self.window_share)
        active = active_layers * (self.step.layer_seconds + reads)
        return self.step.fixed_seconds + active + self._bridges(active_layers) * self.step.layer_seconds

    def _bridges(self, layers_run: float) -> float:
        """The bridges over the layers that a token skips, in layers' times."""
        return self.bridge_share * (self.num_layers - layers_run)

    def prompt_seconds(self, schedule: Schedule, tokens: int, ends: int = 1) -> float:
        """Seconds of one forward over `tokens` tokens of prompts, `ends` of them the last of their prompt.

        These give new tokens, and run the layers that are projected for the other tokens.
        """
        layer, projection = self.prompt_layer_seconds(tokens)
        last = self.at(max(1, ends))
        above = (1 + self.taps) * projection + (last.layer_seconds if ends else 0.0)
        run = len(schedule.prompt_layers())
        if schedule.prompt == "max_exit":
            bridges = self._bridges(run) * layer
        else:  # the last token alone takes them
            bridges = self._bridges(len(schedule.last_prompt_layers())) * last.layer_seconds if ends else 0.0
        return last.fixed_seconds + run * layer + len(schedule.projected) * above + bridges

    def prompt_layer_seconds(self, tokens: int) -> tuple[float, float]:
        """Seconds of one layer in a forward over `tokens` tokens of prompts, run and projected, without the cache read.

        Constant below the smallest known number of tokens, interpolated between known ones, proportional beyond.
        """
        known = self.prompts or (self._row_as_prompt(),)
        last = known[-1]
        beyond = max(1.0, tokens / last.tokens)
        layer, projection = between(known, tokens) if beyond == 1 else last[1:]
        return beyond * layer, beyond * projection

    def _row_as_prompt(self) -> PromptCost:
        """Bound the cost if no prompt was measured: a prompt token costs as much as a sequence of the largest step."""
        row, least = self.steps[-1].layer_seconds / self.max_rows, self.at(1).layer_seconds
        seconds = max(row, least)
        return PromptCost(max(1.0, least / row) if row else 1.0, seconds, seconds)

    def prompts_seconds(self, schedule: Schedule, prompt_len: int) -> float:
        """The prompts of a batch, `prompt_len` tokens each, in forwards of `PROMPT_TOKENS` tokens at most.

        In the engine, prompts share forwards with decoding sequences. They are counted separately here, because a token
        costs about the same in both.
        """
        schedule.check_fits(self.num_layers)
        total, seconds = self.batch * prompt_len, 0.0
        for start in range(0, total, PROMPT_TOKENS):
            end = min(start + PROMPT_TOKENS, total)
            seconds += self.prompt_seconds(schedule, end - start, end // prompt_len - start // prompt_len)
        return seconds

    def text(self, prompt_len: int, new_tokens: int, *, whole: bool = False) -> TextCost:
        """The cost of a batch of texts of one length; see `TextCost.of_lengths`."""
        return TextCost.of_lengths(self, prompt_len, [new_tokens], whole=whole)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        parts = {name: [part._asdict() for part in getattr(self, name)] for name in ("steps", "prompts")}
        return {"format": FORMAT} | asdict(self) | parts

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A cost model from `to_dict`'s dictionary; raises DataError on all else."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise DataError(f"not a cost model: a JSON object with format {FORMAT} is needed")
        values = {name: value for name, value in data.items() if name != "format"}
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise DataError(f"unknown cost model field {unknown[0]!r}")
        try:
            values["steps"] = tuple(StepCost(**step) for step in values["steps"])
            values["prompts"] = tuple(PromptCost(**prompt) for prompt in values.get("prompts", ()))
            return cls(**values)
        except (KeyError, TypeError, UsageError) as e:
            raise DataError(f"not a cost model: {e}") from None


@dataclass(frozen=True)
class TextCost:
    """A cost model with the texts that are decoded.

    Texts differ in length, so late positions are decoded less often than early ones, and a layer that is skipped there
    saves less.
    """

    cost: CostModel
    prompt_len: int  # tokens of each prompt
    # Expected decode steps of a batch at generation position 0, 1, …: while any sequence of the batch goes on.
    steps: tuple[float, ...]
    whole: bool = False  # the time of whole requests, prompts included, instead of the decode phase alone

    @classmethod
    def of_lengths(cls, cost: CostModel, prompt_len: int, lengths: Sequence[int], *, whole: bool = False) -> Self:
        """Make it of the texts' lengths in generated tokens, with end tokens; a batch draws its texts independently.

        Raises DataError if no text has a decode step: two tokens are the least.
        """
        longest = max(lengths, default=0)
        if longest < 2:
            raise DataError("no response has two tokens or more: there is no decode step whose layers can be skipped")
        going_on = [sum(length > position + 1 for length in lengths) / len(lengths) for position in range(longest - 1)]
        return cls(cost, prompt_len, tuple(1 - (1 - share) ** cost.batch for share in going_on), whole)

    def prompts_seconds(self, schedule: Schedule) -> float:
        """Seconds of a batch's prompts, if they count."""
        return self.cost.prompts_seconds(schedule, self.prompt_len) if self.whole else 0.0

    def seconds(self, schedule: Schedule) -> float:
        """Expected seconds of the decode phase, or of the whole request."""
        schedule.check_fits(self.cost.num_layers)
        counts = enumerate(self.steps)
        steps = (n * self.cost.step_seconds(schedule.budget(i), self.prompt_len + i + 1) for i, n in counts)
        return self.prompts_seconds(schedule) + sum(steps)

    def speedup(self, schedule: Schedule) -> float:
        """Speed-up over full depth."""
        return self.full_seconds / self.seconds(schedule)

    def mean_layers(self, schedule: Schedule) -> float:
        """Layers that a step runs, on average."""
        return sum(n * schedule.budget(i) for i, n in enumerate(self.steps)) / sum(self.steps)

    @cached_property
    def full_seconds(self) -> float:
        """Expected seconds at full depth."""
        return self.seconds(Schedule.full(self.cost.num_layers))
