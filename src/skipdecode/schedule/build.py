"""The ways to make a schedule: the paper's, its rivals', and those that an existing one gives. Pure Python.

`Schedule.published` makes those of published methods by name, all for the same mean number of layers over `seq_len`
positions, as near as whole layers allow, so that a table compares them at one cost:

================= ============== ==============================================
method            layers dropped layers run
================= ============== ==============================================
full              none           all; the speed-up can only be 1
skipdecode        bottom up      linear decay (SkipDecode, arXiv 2307.02628)
even              evenly spaced  linear decay
unified           evenly spaced  constant (Unified Layer Skipping, 2404.06954)
d3                bottom up      power law (D3)
early_termination from the top   linear decay (SkipDecode's own contrast)
static_pruning    by influence   constant (ShortGPT, arXiv 2403.03853)
================= ============== ==============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from skipdecode.common.registry import check_name
from skipdecode.errors import ScheduleError
from skipdecode.schedule import order as layer_order
from skipdecode.schedule.order import least_budget, one_or_more, require_int, require_positive
from skipdecode.schedule.schedule import NestedLayers, PromptDepth, curve_name

__all__ = ["ORDER_OF_ITS_OWN", "PUBLISHED", "Schedule"]

PUBLISHED = ("full", "skipdecode", "even", "unified", "d3", "early_termination", "static_pruning")
ORDER_OF_ITS_OWN = ("full", "even", "unified", "early_termination")


class Schedule(NestedLayers):
    """A nested layer schedule. `NestedLayers` has its parameters; the class methods here make the known kinds."""

    @classmethod
    def full(cls, num_layers: int) -> Self:
        """Every layer at every position."""
        return cls(num_layers, (), (num_layers,), warmup_layers=min(1, num_layers), name="full")

    @classmethod
    def paper(
        cls,
        num_layers: int,
        *,
        min_exit_layer: int,
        max_exit_layer: int,
        seq_len: int,
        warmup_layers: int = 1,
        prompt: PromptDepth = "full",
        drop_order: Sequence[int] | None = None,
        name: str = "skipdecode",
    ) -> Self:
        """Linear decay from `max_exit_layer` to `min_exit_layer` layers over `seq_len` positions, bottom up.

        `drop_order` replaces the bottom-up order and keeps the linear budgets. Source: SkipDecode, section 3.
        """
        require_int("min_exit_layer", min_exit_layer)
        require_int("max_exit_layer", max_exit_layer)
        if min_exit_layer > max_exit_layer:
            raise ScheduleError(
                f"min_exit_layer={min_exit_layer} is above max_exit_layer={max_exit_layer}: "
                "depth may only fall along the text; swap them"
            )
        require_positive("seq_len", seq_len)
        budgets = layer_order.linear(max_exit_layer, min_exit_layer, seq_len)
        order = layer_order.bottom_up(num_layers, warmup_layers) if drop_order is None else drop_order
        return cls(num_layers, tuple(order), budgets, warmup_layers, prompt, name)

    @classmethod
    def from_speedup(
        cls,
        num_layers: int,
        nominal_speedup: float,
        seq_len: int,
        *,
        warmup_layers: int = 1,
        spread: float = 1 / 3,
        prompt: PromptDepth = "full",
        drop_order: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Self:
        """The paper's schedule for a *nominal* speed-up: mean exit layer = `num_layers` / `nominal_speedup`.

        `spread` sets the decay, from mean·(1 + spread) to mean·(1 - spread). `skipdecode plan` solves for wall-clock.
        """
        if not isinstance(nominal_speedup, int | float) or not nominal_speedup >= 1:
            raise ScheduleError(f"nominal_speedup={nominal_speedup!r} is not accepted: give a number of 1 or more")
        require_int("num_layers", num_layers)
        if not 0 <= spread < 1:
            raise ScheduleError(f"spread={spread!r} is not accepted: give a number in [0, 1)")
        mean = num_layers / nominal_speedup
        floor = least_budget(num_layers, warmup_layers)
        if mean < floor:
            raise ScheduleError(
                f"nominal_speedup={nominal_speedup:g} leaves {mean:.2f} of {num_layers} layers, but at least {floor} "
                f"must run with warmup_layers={warmup_layers}: at most {num_layers / floor:.2f} is possible"
            )
        most = min(num_layers, round(mean * (1 + spread)))
        least = max(floor, min(most, round(2 * mean) - most))
        return cls.paper(
            num_layers,
            min_exit_layer=least,
            max_exit_layer=max(most, least),
            seq_len=seq_len,
            warmup_layers=warmup_layers,
            prompt=prompt,
            drop_order=drop_order,
            name=name or f"skipdecode-{nominal_speedup:g}x",
        )

    @classmethod
    def constant(
        cls,
        num_layers: int,
        budget: int,
        *,
        drop_order: Sequence[int] | None = None,
        warmup_layers: int = 1,
        prompt: PromptDepth = "full",
        name: str = "constant",
    ) -> Self:
        """`budget` layers at every generation position; bottom up unless `drop_order` is given.

        By block influence this is static depth pruning of the generated part (ShortGPT).
        """
        order = layer_order.bottom_up(num_layers, warmup_layers) if drop_order is None else drop_order
        return cls(num_layers, tuple(order), (budget,), warmup_layers, prompt, name)

    @classmethod
    def even(
        cls,
        num_layers: int,
        budgets: int | Sequence[int],
        *,
        warmup_layers: int = 1,
        prompt: PromptDepth = "full",
        name: str = "even",
    ) -> Self:
        """Evenly spaced layers are left out (Unified Layer Skipping, arXiv 2404.06954); one budget or a list."""
        values = one_or_more(budgets)
        order = layer_order.evenly_spaced(num_layers, values[-1], warmup_layers)
        return cls(num_layers, order, values, warmup_layers, prompt, name)

    @classmethod
    def published(
        cls,
        method: str,
        num_layers: int,
        nominal_speedup: float,
        seq_len: int,
        *,
        warmup_layers: int = 1,
        prompt: PromptDepth = "full",
        drop_order: Sequence[int] | None = None,
    ) -> Self:
        """The schedule of a published method (`PUBLISHED`, see the table above) for the budget of `from_speedup`.

        `drop_order` replaces the bottom-up order; `static_pruning` needs one.

        Raises
        ------
        UsageError
            The method is not known.
        ScheduleError
            The speed-up is out of reach, or a drop order is missing, or was given to a method that has its own.
        """
        check_name("schedule", method, PUBLISHED)
        _check_order_given(method, drop_order is not None)
        if method == "full":
            if nominal_speedup != 1:
                raise ScheduleError(
                    f"'full' runs every layer: nominal_speedup={nominal_speedup:g} needs another schedule"
                )
            return cls.full(num_layers)
        flat = method in ("unified", "static_pruning")
        schedule = cls.from_speedup(
            num_layers,
            nominal_speedup,
            1 if flat else seq_len,
            warmup_layers=warmup_layers,
            spread=0.0 if flat else 1 / 3,
            prompt=prompt,
            drop_order=drop_order,
            name=f"{method.replace('_', '-')}-{nominal_speedup:g}x",
        )
        if flat:
            # Over one position and without decay, the paper's first budget is the constant one.
            schedule = replace(schedule, budgets=schedule.budgets[:1])
        if method == "d3":
            floor = least_budget(num_layers, warmup_layers)
            return replace(schedule, budgets=_power_law_of(num_layers, num_layers / nominal_speedup, seq_len, floor))
        if method in ORDER_OF_ITS_OWN:
            return schedule.reordered("top-down" if method == "early_termination" else "even")
        return schedule

    def with_speedup(self, nominal_speedup: float) -> Self:
        """The schedule of another nominal speed-up with this one's order, positions, warm-up and prompt depth.

        A flat schedule gives a flat one, any other the paper's linear one; 1 is full depth, for prompts too. Raises
        ScheduleError if the drop order cannot give this speed-up.
        """
        layers, name = self.num_layers, f"{curve_name(self.name)}-{nominal_speedup:g}x"
        if nominal_speedup == 1:
            return self.full(layers)
        if not self.drop_order:
            raise ScheduleError(
                f"a full-depth schedule has no drop order to sample {nominal_speedup:g}x from: give --nominal-speedup "
                "above 1 or a --schedule"
            )
        if self.is_flat:
            return replace(self, budgets=(max(1, round(layers / nominal_speedup)),), name=name)
        return self.from_speedup(
            layers,
            nominal_speedup,
            self.seq_len,
            warmup_layers=self.warmup_layers,
            prompt=self.prompt,
            drop_order=self.drop_order,
            name=name,
        )

    @classmethod
    def top_down(
        cls,
        num_layers: int,
        budgets: int | Sequence[int],
        *,
        warmup_layers: int = 1,
        prompt: PromptDepth = "full",
        name: str = "early-termination",
    ) -> Self:
        """Early termination: the first budget layers run, the rest are left out. One budget or a list of them."""
        order = layer_order.top_down(num_layers, warmup_layers)
        return cls(num_layers, order, one_or_more(budgets), warmup_layers, prompt, name)

    @classmethod
    def split(
        cls,
        num_layers: int,
        prompt_layers: int,
        budgets: int | Sequence[int],
        *,
        warmup_layers: int = 1,
        name: str = "split",
    ) -> Self:
        """Prompt tokens run the lowest `prompt_layers` layers, generated ones the warm-up layers and the highest.

        An encoder-decoder made of one decoder: with halves, each token runs its half of the model. Of the upper layers
        the prompt's keys and values are projected. One budget for generated tokens, or a list of them.
        """
        require_int("prompt_layers", prompt_layers)
        if not 1 <= prompt_layers <= num_layers:
            raise ScheduleError(f"prompt_layers={prompt_layers} is not accepted: give 1 to {num_layers}")
        order = layer_order.bottom_up(num_layers, warmup_layers)
        return cls(num_layers, order, one_or_more(budgets), warmup_layers, tuple(range(prompt_layers)), name)


def _power_law(num_layers: int, alpha: float, seq_len: int, floor: int) -> tuple[int, ...]:
    return tuple(max(floor, round(num_layers * alpha**i)) for i in range(seq_len))


def _power_law_of(num_layers: int, mean: float, seq_len: int, floor: int) -> tuple[int, ...]:
    """The power law of a mean number of layers, its base found by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(_power_law(num_layers, middle, seq_len, floor)) < mean * seq_len:
            low = middle
        else:
            high = middle
    return _power_law(num_layers, high, seq_len, floor)


def _check_order_given(method: str, given: bool) -> None:
    if given and method in ORDER_OF_ITS_OWN:
        raise ScheduleError(f"{method!r} has a drop order of its own: leave drop_order out, or choose another schedule")
    if not given and method == "static_pruning":
        raise ScheduleError(
            "static_pruning drops layers by their influence, which is measured: give a drop_order, such as "
            "a calibrated schedule's"
        )
