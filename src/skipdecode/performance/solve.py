"""Budgets solved for a wall-clock speed-up of the decode phase, and what a schedule brings, in figures. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skipdecode.errors import TargetError
from skipdecode.performance.cost import CostModel, Use
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.schedule import Schedule
from skipdecode.schedule import order as layer_order

__all__ = ["Assessment", "assess", "solve", "why_flat"]

_ROUNDS = 60


def solve(
    cost: CostModel,
    target_speedup: float,
    seq_len: int,
    *,
    use: Use = "lockstep",
    warmup_layers: int = 1,
    spread: float = 1 / 3,
    drop_order: Sequence[int] | None = None,
    prompt_len: int = 64,
) -> Schedule:
    """The schedule that skips least among those that reach a wall-clock speed-up of the decode phase.

    Lockstep: the paper's linear decay, from mean·(1 + spread) to mean·(1 - spread) layers, with the largest mean that
    reaches the target. Continuous: a flat schedule with the largest budget that does (`why_flat`).

    Parameters
    ----------
    cost : CostModel
        What a step costs, with the batch to plan for.
    target_speedup : float
        Wall-clock speed-up over full depth, 1 or more. Prompts are not part of the decode phase.
    seq_len : int
        Generation positions over which the budgets fall.
    spread : float
        Strength of the decay, in [0, 1).
    drop_order : sequence of int, optional
        Default: bottom up. Layers that it does not list always run.
    prompt_len : int
        Tokens of a row's prompt. New ones are `seq_len` + 1, whose steps run each position once.

    Raises
    ------
    TargetError
        No schedule of this kind reaches the target; states the bound and what sets it.
    """
    _check(target_speedup, spread, seq_len)
    order = layer_order.bottom_up(cost.num_layers, warmup_layers) if drop_order is None else tuple(drop_order)
    least = max(1, cost.num_layers - len(order))
    tokens = seq_len + 1
    decay, positions = (0.0, 1) if use == "continuous" else (spread, seq_len)
    label = f"{'flat' if use == 'continuous' else 'skipdecode'}-{target_speedup:g}x-wall"

    def schedule_of(mean: float) -> Schedule:
        budgets = _decay(mean, decay, positions, least, cost.num_layers)
        return Schedule(cost.num_layers, order, budgets, warmup_layers, name=label)

    def reaches(schedule: Schedule) -> bool:
        return cost.speedup(schedule, prompt_len, tokens, use) >= target_speedup

    if reaches(full := schedule_of(cost.num_layers)):
        return full
    fewest = least / (1 + spread)
    if not reaches(schedule_of(fewest)):
        raise TargetError(_out_of_reach(cost, target_speedup, least, prompt_len, tokens))
    return schedule_of(_largest(lambda mean: reaches(schedule_of(mean)), fewest, cost.num_layers))


def _decay(mean: float, spread: float, positions: int, least: int, most: int) -> tuple[int, ...]:
    """The linear decay with this mean, within `least` and `most` layers."""
    first = max(least, min(most, mean * (1 + spread)))
    last = max(least, min(first, 2 * mean - first))
    if positions == 1:
        first = last = (first + last) / 2
    return layer_order.linear(first, last, positions)


def _largest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """By bisection, the largest value that `holds`; it does at `low`, and not at `high`.

    Both ends of the decay grow with the mean, so the budget at every position does, and the speed-up falls.
    """
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def why_flat(cost: CostModel, linear: Schedule, prompt_len: int, new_tokens: int) -> str:
    """Why continuous use gets a flat schedule: what `linear`, solved for lockstep, would bring in a stream instead."""
    layers = cost.layers_per_step(linear, new_tokens, "continuous")
    together = cost.speedup(linear, prompt_len, new_tokens)
    mixed = cost.speedup(linear, prompt_len, new_tokens, "continuous")
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


def _out_of_reach(cost: CostModel, target: float, least: int, prompt_len: int, new_tokens: int) -> str:
    share = cost.fixed_share(prompt_len, new_tokens)
    bound = cost.bound(least, prompt_len, new_tokens)
    half = max(least, _rounded(cost.num_layers / 2))
    return (
        f"target_speedup={target:g} is out of reach for {cost.num_layers} layers at batch {cost.batch}: embeddings, "
        f"head and all else outside the layers take {share:.0%} of a full step and cannot be skipped; with the least "
        f"budget, {least} layers, the bound is {_floored(bound)}x ({half} layers: "
        f"{_floored(cost.bound(half, prompt_len, new_tokens))}x)"
    )


def _floored(value: float) -> str:
    """Two decimals, never rounded up: a bound that is shown must be reachable."""
    return f"{math.floor(value * 100) / 100:.2f}"


@dataclass(frozen=True)
class Assessment:
    """What a schedule brings in `use`, for a batch of rows of one length.

    Parameters
    ----------
    nominal_speedup : float
        Layers of the model / mean layers of a row's token over the decode phase. Not wall-clock.
    predicted_decode_speedup, decode_speedup_lockstep, decode_speedup_continuous : float
        Wall-clock speed-up of the decode phase over full depth: in `use`, and in each.
    predicted_request_speedup : float
        The same of whole requests, prompts included.
    layers_per_step : float
        Layers that a step runs for any of its rows, on average, in `use`.
    step_seconds, step_seconds_full : float
        Mean step in `use`, and at full depth.
    bound, least_budget : float, int
        Speed-up with the least budget that this drop order allows, and that budget.
    bound_at_half, half_budget : float, int
        Speed-up with half the layers, and how many those are.
    fixed_share : float
        Share of a full step that cannot be skipped.
    kv_bytes_held, kv_bytes_saved : int
        KV cache at the end of the batch's generation, and what full depth would hold on top.
    """

    use: Use
    nominal_speedup: float
    predicted_decode_speedup: float
    decode_speedup_lockstep: float
    decode_speedup_continuous: float
    predicted_request_speedup: float
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
    *,
    use: Use = "lockstep",
    prompt_len: int,
    new_tokens: int,
) -> Assessment:
    """Figures of a schedule for a batch of rows of `prompt_len` prompt and `new_tokens` (2 or more) generated ones."""
    uses: tuple[Use, Use] = ("lockstep", "continuous")
    lockstep, continuous = (cost.speedup(schedule, prompt_len, new_tokens, u) for u in uses)
    full = cost.sequence_seconds(Schedule.full(cost.num_layers), prompt_len, new_tokens) / (new_tokens - 1)
    least = max(1, cost.num_layers - len(schedule.drop_order))
    half = max(least, _rounded(cost.num_layers / 2))
    speedup = lockstep if use == "lockstep" else continuous
    return Assessment(
        use=use,
        nominal_speedup=cost.num_layers / schedule.mean_budget(new_tokens - 1),
        predicted_decode_speedup=speedup,
        decode_speedup_lockstep=lockstep,
        decode_speedup_continuous=continuous,
        predicted_request_speedup=cost.request_speedup(schedule, prompt_len, new_tokens, use),
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
