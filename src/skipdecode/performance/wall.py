"""Schedules for a wall-clock speed-up by their text, such as "1.5x-wall"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from skipdecode.errors import ScheduleError
from skipdecode.models.fit import Fit
from skipdecode.models.loading.ref import ModelRef
from skipdecode.performance.cost_source import kept_cost
from skipdecode.performance.solve import SPREAD, solve
from skipdecode.schedule import Schedule


def wall_solver(
    ref: ModelRef, seq_len: int, carried: Schedule | None = None, **engine: str | None
) -> Callable[[float], Schedule]:
    """What makes the schedule for a wall-clock speed-up of whole requests, for `parse_schedule`.

    The cost is the newest one that was measured for the model on this machine, with its batch and prompt length; a fit
    of the checkpoint is counted. The drop order, positions and prompts are those of `carried`, if it has a drop order.

    Parameters
    ----------
    seq_len : int
        Generation positions over which the depth decreases, unless `carried` has a drop order.
    engine
        dtype, device, engine and quantization as for `kept_cost`.
    """

    def solved(target: float) -> Schedule:
        source = kept_cost(ref, **engine)  # type: ignore[arg-type]
        if source is None:
            raise ScheduleError(
                f"{target:g}x-wall needs times that were measured on this machine, and there are none for {ref.name}: "
                f"run skipdecode plan {ref.name} for this speed-up first"
            )
        cost = source.cost
        if (file := ref.fit) is not None:
            fit = Fit.load(file)
            cost = cost.with_fit(source.geometry, fit.rank, fit.taps)
        if carried is None or not carried.drop_order:
            return solve(cost, target, seq_len, prompt_len=source.prompt_len)
        found = solve(
            cost,
            target,
            carried.seq_len if carried.seq_len > 1 else seq_len,
            prompt=carried.prompt,
            warmup_layers=carried.warmup_layers,
            spread=0.0 if carried.is_flat else SPREAD,
            drop_order=carried.drop_order,
            prompt_len=source.prompt_len,
        )
        return replace(found, family=carried.family)

    return solved
