"""Solves schedules for a wall-clock speed-up of requests. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from skipdecode.common.options import Options, option
from skipdecode.cost.model import CostModel, TextCost, between
from skipdecode.errors import TargetError, UsageError
from skipdecode.schedule import PromptDepth, Schedule
from skipdecode.schedule import order as layer_order

Auto = Literal["auto"]
"""The layers of prompts follow from the target; see `solve`."""
_SPREAD = 1 / 3
_ROUNDS = 60
_MOST_PROMPT_TOKENS = 2**20  # in a batch: the cost of its forwards is added one by one
_PAYS = 0.9
_SLACK = 1 + 1e-12


@dataclass(frozen=True)
class Depths:
    """Schedules that differ in depth alone: flat ones, or linear decays over `seq_len` positions.

    Layers that the drop order does not name always run.
    """

    layers: int
    order: tuple[int, ...]
    warmup: int
    seq_len: int
    flat: bool

    def schedule(self, depth: float, prompt: PromptDepth | Auto) -> Schedule:
        """The schedule of a depth from 0, the least, to 3, full; auto: half depth at 1, full prompts from 2."""
        least, most = float(max(1, self.layers - len(self.order))), float(self.layers)
        spread, positions = (0.0, 1) if self.flat else (_SPREAD, self.seq_len)
        half, ends = max(least, most / 2), ((0.0, least / (1 + spread), least), (3.0, most, most))
        stages = (ends[0], (1.0, half, half), (2.0, half, most), ends[1]) if prompt == "auto" else ends
        mean, lowest = between(stages, depth)
        if prompt == "auto":
            run = max(self.warmup, round(lowest))
            prompt = "full" if run == self.layers else tuple(range(run))
        budgets = _decay(mean, spread, positions, int(least), self.layers)
        return Schedule(self.layers, self.order, budgets, self.warmup, prompt)

    def within(self, texts: TextCost, seconds: float, prompt: PromptDepth | Auto) -> Schedule | None:
        """The deepest schedule that takes `seconds` at most; None if there is none."""
        return self.deepest(prompt, lambda schedule: texts.seconds(schedule) <= seconds * _SLACK)

    def deepest(self, prompt: PromptDepth | Auto, reaches: Callable[[Schedule], bool]) -> Schedule | None:
        """The deepest schedule that reaches the target, by bisection: less depth never adds layers."""
        if reaches(full := self.schedule(3.0, prompt)):
            return full
        if not reaches(self.schedule(0.0, prompt)):
            return None
        low, high = 0.0, 3.0
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if reaches(self.schedule(middle, prompt)) else (low, middle)
        return self.schedule(low, prompt)


def _decay(mean: float, spread: float, positions: int, least: int, most: int) -> tuple[int, ...]:
    """The linear decay with this mean, within `least` and `most` layers."""
    first = max(least, min(most, mean * (1 + spread)))
    last = max(least, min(first, 2 * mean - first))
    if positions == 1:
        first = last = (first + last) / 2
    return layer_order.linear(first, last, positions)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """The target and the workload of a plan; each field's help text is its documentation."""

    target_speedup: float | None = option(
        "wall-clock speed-up of whole requests, prompts included; the layers are solved for it", default=None, least=1
    )
    prompt_layers: str | None = option(
        "layers that prompt tokens run, in place of those that the target leaves: full, max_exit, a number n (the "
        "lowest n), or a list such as 0-14,20",
        default=None,
    )
    seq_len: int = option(
        "positions over which the depth decreases; also the number of new tokens after the first, which comes with the "
        "prompt; best near the real output length",
        default=64,
        least=1,
        most=2**15,
    )
    flat: bool = option(
        "the same depth at every position, for servers: sequences at different positions share a decode step, which "
        "costs as much as the deepest of them",
        default=False,
    )
    batch: int = option("sequences decoded together", default=1, least=1, most=1024)
    prompt_len: int = option("prompt tokens of a sequence", default=64, least=1, most=_MOST_PROMPT_TOKENS)
    remeasure: bool = option("time prompts and steps again, and ignore earlier measurements", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (tokens := self.batch * self.prompt_len) > _MOST_PROMPT_TOKENS:
            raise UsageError(
                f"{self.batch} prompts of {self.prompt_len} tokens are {tokens} tokens: give at most "
                f"{_MOST_PROMPT_TOKENS}"
            )

    @property
    def new_tokens(self) -> int:
        """Generated tokens of a sequence: each position runs once."""
        return self.seq_len + 1


def solve(
    cost: CostModel,
    target_speedup: float,
    seq_len: int,
    *,
    prompt: PromptDepth | Auto = "auto",
    flat: bool = False,
    drop_order: Sequence[int] | None = None,
    prompt_len: int = 64,
) -> Schedule:
    """The schedule that skips least among those that reach a wall-clock speed-up.

    The paper's linear decay, from 4/3 to 2/3 of its mean number of layers, with the largest mean that reaches the
    target; or the largest flat budget that does.

    `cost` has the batch to plan for; `target_speedup` is that of whole requests over full depth, 1 or more. Budgets
    decrease over `seq_len` positions, one step each. Layers that are not in the `drop_order` (default: bottom up)
    always run.

    `prompt` auto: first new tokens skip layers, down to half depth; then prompts, which run the lowest layers and
    project the others, down to half depth; then both. Prompts stay at full depth if half of their layers save less than
    a tenth of their time. In a memory-bound prompt the last token, which also runs the upper layers, takes as long as
    all tokens.

    Raises TargetError, with the bound and its cause, if no schedule of this kind reaches the target.
    """
    layers = cost.num_layers
    order = layer_order.bottom_up(layers, 1) if drop_order is None else tuple(drop_order)
    depths = Depths(layers, order, 1, seq_len, flat)
    texts = cost.text(prompt_len, seq_len + 1, whole=True)
    if prompt == "auto":
        halved = texts.prompts_seconds(depths.schedule(1.0, prompt))
        prompt = prompt if halved < _PAYS * texts.prompts_seconds(Schedule.full(layers)) else "full"
    deepest = depths.deepest(prompt, lambda schedule: texts.speedup(schedule) >= target_speedup)
    if deepest is None:
        raise TargetError(out_of_reach(texts, target_speedup, depths.schedule(0.0, prompt)))
    return deepest.named_by_layers("flat" if flat else "skipdecode")


def out_of_reach(texts: TextCost, target: float, least: Schedule, why: str = "") -> str:
    """The bound and its cause; `least` is the schedule with the fewest layers, `why` says what sets them."""
    cost = texts.cost
    seconds = texts.seconds(least)
    outside = sum(texts.steps) * cost.step.fixed_seconds / seconds
    bound = math.floor(texts.speedup(least) * 100) / 100  # so that a bound that is shown can be reached
    prompts = texts.prompts_seconds(least) / seconds
    return (
        f"a speed-up of {target:g} is out of reach at batch {cost.batch}: with {least.budgets[-1]} of "
        f"{cost.num_layers} layers, the fewest{why}, and {len(least.prompt_layers())} for prompts, the bound of the "
        f"whole request is {bound:.2f}x, and of that time prompts take {prompts:.0%}, embeddings, head and all else "
        f"outside the layers {outside:.0%}"
    )
