"""Solves schedules for a wall-clock speed-up of requests or of decoding, and predicts their figures. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from skipdecode.errors import TargetError
from skipdecode.performance.cost import CostModel, Phase, Use, between
from skipdecode.schedule import PromptDepth, Schedule
from skipdecode.schedule import order as layer_order

if TYPE_CHECKING:
    from skipdecode.performance.geometry import ModelGeometry

Auto = Literal["auto"]
"""The layers of prompts follow from the target; see `solve`."""
_ROUNDS = 60
_PAYS = 0.9


def solve(
    cost: CostModel,
    target_speedup: float,
    seq_len: int,
    *,
    phase: Phase = "request",
    prompt: PromptDepth | Auto = "auto",
    use: Use = "lockstep",
    warmup_layers: int = 1,
    spread: float = 1 / 3,
    drop_order: Sequence[int] | None = None,
    prompt_len: int = 64,
) -> Schedule:
    """The schedule that skips least among those that reach a wall-clock speed-up.

    Lockstep: the paper's linear decay, from mean·(1 + spread) to mean·(1 - spread) layers, with the largest mean that
    reaches the target. Continuous: the largest flat budget that does (`why_flat`).

    Parameters
    ----------
    cost : CostModel
        Cost of prompts and steps, with the batch to plan for.
    target_speedup : float
        Over full depth, 1 or more.
    seq_len, prompt_len : int
        Generation positions over which the budgets decrease, one step each; tokens of a sequence's prompt.
    phase : {"request", "decode"}
        What the target is for: prompt and steps together, or the steps alone.
    prompt : {"auto"} or as in `Schedule`
        Layers of prompts. auto: first new tokens skip layers, down to half depth; then prompts, which run the lowest
        layers and project the others, down to half depth; then both. Prompts stay at full depth for the phase
        "decode", and if half of their layers save less than a tenth of their time. In a memory-bound prompt the last
        token, which also runs the upper layers, takes as long as all tokens.
    spread : float
        Strength of the decay, in [0, 1).
    drop_order : sequence of int, optional
        Default: bottom up. Layers that are not listed always run.

    Raises TargetError, with the bound and its cause, if no schedule of this kind reaches the target.
    """
    _check(target_speedup, spread, seq_len)
    order = layer_order.bottom_up(cost.num_layers, warmup_layers) if drop_order is None else tuple(drop_order)
    decay, positions = (0.0, 1) if use == "continuous" else (spread, seq_len)
    label = f"{'flat' if use == 'continuous' else 'skipdecode'}-{target_speedup:g}x-wall"
    family = _Family(cost.num_layers, order, warmup_layers, decay, positions, label)
    tokens = prompt_len, seq_len + 1

    def reaches(schedule: Schedule) -> bool:
        return cost.speedup(schedule, *tokens, use, phase) >= target_speedup

    if prompt == "auto":
        halved = cost.prompts_seconds(family.schedule(1.0, prompt), prompt_len)
        full = cost.prompts_seconds(Schedule.full(cost.num_layers), prompt_len)
        prompt = prompt if phase == "request" and halved < _PAYS * full else "full"
    found = family.deepest(prompt, reaches)
    if found is None:
        raise TargetError(_out_of_reach(cost, target_speedup, family.schedule(0.0, prompt), phase, tokens))
    return found


@dataclass(frozen=True)
class _Family:
    """Schedules that differ in depth alone."""

    layers: int
    order: tuple[int, ...]
    warmup: int
    spread: float
    positions: int
    label: str

    def schedule(self, depth: float, prompt: PromptDepth | Auto) -> Schedule:
        """The schedule of a depth from 0, the least, to 3, full; auto: half depth at 1, full prompts from 2."""
        least, most = float(max(1, self.layers - len(self.order))), float(self.layers)
        half, ends = max(least, most / 2), ((0.0, least / (1 + self.spread), least), (3.0, most, most))
        stages = (ends[0], (1.0, half, half), (2.0, half, most), ends[1]) if prompt == "auto" else ends
        mean, lowest = between(stages, depth)
        if prompt == "auto":
            run = max(self.warmup, round(lowest))
            prompt = "full" if run == self.layers else tuple(range(run))
        budgets = _decay(mean, self.spread, self.positions, int(least), self.layers)
        return Schedule(self.layers, self.order, budgets, self.warmup, prompt, self.label)

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


def why_flat(cost: CostModel, linear: Schedule, prompt_len: int, new_tokens: int, phase: Phase = "decode") -> str:
    """Why continuous use gets a flat schedule: the speed-up of `linear`, solved for lockstep, in a stream."""
    layers = cost.layers_per_step(linear, new_tokens, "continuous")
    together = cost.speedup(linear, prompt_len, new_tokens, "lockstep", phase)
    mixed = cost.speedup(linear, prompt_len, new_tokens, "continuous", phase)
    return (
        f"flat, because rows of mixed ages share a step and the youngest sets its depth: the linear schedule that "
        f"brings {together:.2f}x in lockstep would run {layers:.1f} of {cost.num_layers} layers a step at batch "
        f"{cost.batch} and bring {mixed:.2f}x"
    )


def _check(target_speedup: float, spread: float, seq_len: int) -> None:
    if not isinstance(target_speedup, int | float) or not 1 <= target_speedup < math.inf:
        raise TargetError(f"target_speedup={target_speedup!r} is not accepted: give a number of 1 or more")
    if not 0 <= spread < 1:
        raise TargetError(f"spread={spread!r} is not accepted: give a number in [0, 1)")
    if seq_len < 1:
        raise TargetError(f"seq_len={seq_len} is not accepted: give 1 or more positions")


def _rounded(value: float) -> int:
    return math.floor(value + 0.5)


def _out_of_reach(cost: CostModel, target: float, least: Schedule, phase: Phase, tokens: tuple[int, int]) -> str:
    """The bound and its cause; `least` is the schedule of the least depth, `tokens` of prompt and output."""
    layers, fewest, bound = cost.num_layers, least.budgets[-1], cost.speedup(least, *tokens, phase=phase)
    what = f"target_speedup={target:g} is out of reach for {layers} layers at batch {cost.batch}"
    if phase == "request":
        seconds = cost.request_seconds(least, *tokens)
        prompts = cost.prompts_seconds(least, tokens[0]) / seconds
        outside = (tokens[1] - 1) * cost.step.fixed_seconds / seconds
        return (
            f"{what} with {tokens[0]} prompt and {tokens[1]} new tokens: with {fewest} layers for new tokens, the "
            f"fewest, and {len(least.prompt_layers())} for prompts the bound of the whole request is "
            f"{_floored(bound)}x, and of that time prompts take {prompts:.0%}, embeddings, head and all else outside "
            f"the layers {outside:.0%}"
        )
    half = max(fewest, _rounded(layers / 2))
    return (
        f"{what}: embeddings, head and all else outside the layers take {cost.fixed_share(*tokens):.0%} of a full step "
        f"and cannot be skipped; with the least budget, {fewest} layers, the bound is {_floored(bound)}x "
        f"({half} layers: {_floored(cost.bound(half, *tokens))}x)"
    )


def _floored(value: float) -> str:
    """Two decimals, rounded down, so that a bound that is shown can be reached."""
    return f"{math.floor(value * 100) / 100:.2f}"


@dataclass(frozen=True)
class Assessment:
    """Predicted figures of a schedule in `use`, for a batch of sequences of one length.

    Parameters
    ----------
    nominal_speedup : float
        Layers of the model / mean layers of a token over the decode phase. Not wall-clock.
    predicted_decode_speedup, decode_speedup_lockstep, decode_speedup_continuous : float
        Wall-clock speed-up of the decode phase over full depth: in `use`, and in either use.
    predicted_request_speedup, request_bound : float
        The same for whole requests, and its bound: the least budget after the same prompts.
    request_seconds, request_seconds_full, prompt_share : float
        Time of a batch's requests in `use` and at full depth; share of the former that prompts take.
    layers_per_step : float
        Layers that a step runs for any of its sequences, on average, in `use`.
    step_seconds, step_seconds_full : float
        Mean step in `use`, and at full depth.
    bound, least_budget : float, int
        Speed-up with the least budget that this drop order allows, and that budget.
    bound_at_half, half_budget : float, int
        Speed-up with half the layers, and how many those are.
    fixed_share : float
        Share of a full step that cannot be skipped.
    kv_bytes_held, kv_bytes_saved : int
        KV cache at the end of the batch's generation, and what full depth would hold in addition.
    """

    use: Use
    nominal_speedup: float
    predicted_decode_speedup: float
    decode_speedup_lockstep: float
    decode_speedup_continuous: float
    predicted_request_speedup: float
    request_bound: float
    request_seconds: float
    request_seconds_full: float
    prompt_share: float
    layers_per_step: float
    step_seconds: float
    step_seconds_full: float
    bound: float
    least_budget: int
    bound_at_half: float
    half_budget: int
    fixed_share: float
    kv_bytes_held: int
    kv_bytes_saved: int


def assess(
    schedule: Schedule,
    cost: CostModel,
    geometry: ModelGeometry,
    prompt_len: int,
    new_tokens: int,
    use: Use = "lockstep",
) -> Assessment:
    """Figures of a schedule for a batch of sequences of `prompt_len` prompt and `new_tokens` (2 or more) new tokens."""
    uses: tuple[Use, Use] = ("lockstep", "continuous")
    lockstep, continuous = (cost.speedup(schedule, prompt_len, new_tokens, u) for u in uses)
    full = cost.sequence_seconds(Schedule.full(cost.num_layers), prompt_len, new_tokens) / (new_tokens - 1)
    request = cost.request_seconds(schedule, prompt_len, new_tokens, use)
    gain = cost.request_speedup(schedule, prompt_len, new_tokens, use)
    least = max(1, cost.num_layers - len(schedule.drop_order))
    half = max(least, _rounded(cost.num_layers / 2))
    speedup = lockstep if use == "lockstep" else continuous
    return Assessment(
        use=use,
        nominal_speedup=cost.num_layers / schedule.mean_budget(new_tokens - 1),
        predicted_decode_speedup=speedup,
        decode_speedup_lockstep=lockstep,
        decode_speedup_continuous=continuous,
        predicted_request_speedup=gain,
        request_bound=cost.request_speedup(replace(schedule, budgets=(least,)), prompt_len, new_tokens, use),
        request_seconds=request,
        request_seconds_full=request * gain,
        prompt_share=cost.prompts_seconds(schedule, prompt_len) / request,
        layers_per_step=cost.layers_per_step(schedule, new_tokens, use),
        step_seconds=full / speedup,
        step_seconds_full=full,
        bound=cost.bound(least, prompt_len, new_tokens),
        least_budget=least,
        bound_at_half=cost.bound(half, prompt_len, new_tokens),
        half_budget=half,
        fixed_share=cost.fixed_share(prompt_len, new_tokens),
        kv_bytes_held=geometry.kv_bytes_held(schedule, prompt_len, new_tokens, cost.batch),
        kv_bytes_saved=geometry.kv_bytes_saved(schedule, prompt_len, new_tokens, cost.batch),
    )
