"""Nested layer schedules: which layers run at which generation position. Pure Python, no torch.

A schedule is a *drop order* (which layer goes first, second, …) and a non-increasing list of *budgets* (how many
layers run at position 0, 1, …; the last value holds for ever). Because the budgets never grow and the order is fixed,
the layer sets are nested by construction, which is what makes KV caching free (docs/architecture.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

from skipdecode.errors import ScheduleError
from skipdecode.schedule import checks
from skipdecode.schedule import order as layer_order
from skipdecode.schedule.budgets import check_budgets, least_budget, linear, one_or_more

__all__ = ["PromptDepth", "Schedule"]
PromptDepth = Literal["full", "max_exit"]
REQUIRED = ("num_layers", "drop_order", "budgets")
FIELDS = (*REQUIRED, "warmup_layers", "prompt", "name")


@dataclass(frozen=True)
class Schedule:
    """Which layers run at each generation position.

    Position 0 is the first generated token that is fed back; the prompt is not a position.

    Parameters
    ----------
    num_layers : int
        Decoder layers of the model.
    drop_order : sequence of int
        Layers in the order in which they are dropped. Layers that are not listed are never dropped.
    budgets : sequence of int
        Layers that run at position 0, 1, …, non-increasing; the last value holds for every later position.
    warmup_layers : int
        First layers that always run (paper: 1).
    prompt : {"full", "max_exit"}
        Depth of prompt tokens: every layer, or the layers of position 0.
    name : str
        A label for tables and files.

    Raises
    ------
    ScheduleError
        If the sets would not be nested, a warm-up layer or the last layer would be dropped (a pure top-down order,
        early termination, may drop the last layer), or a value is out of range.

    References
    ----------
    SkipDecode, arXiv 2307.02628, section 3.
    """

    num_layers: int
    drop_order: tuple[int, ...]
    budgets: tuple[int, ...]
    warmup_layers: int = 1
    prompt: PromptDepth = "full"
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in ("num_layers", "warmup_layers"):
            checks.require_int(field, getattr(self, field))
        for field in ("drop_order", "budgets"):
            object.__setattr__(self, field, checks.int_tuple(field, getattr(self, field)))
        checks.require_positive("num_layers", self.num_layers)
        if not 0 <= self.warmup_layers <= self.num_layers:
            raise ScheduleError(f"warmup_layers={self.warmup_layers} is not accepted: give 0 to {self.num_layers}")
        if self.prompt not in ("full", "max_exit"):
            raise ScheduleError(f"prompt={self.prompt!r} is not accepted: give 'full' or 'max_exit'")
        if not isinstance(self.name, str):
            raise ScheduleError(f"name={self.name!r} is not accepted: give text")
        layer_order.check_order(self.drop_order, self.num_layers, self.warmup_layers)
        check_budgets(self.budgets, self.num_layers, len(self.drop_order))

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
        checks.require_int("min_exit_layer", min_exit_layer)
        checks.require_int("max_exit_layer", max_exit_layer)
        if min_exit_layer > max_exit_layer:
            raise ScheduleError(
                f"min_exit_layer={min_exit_layer} is above max_exit_layer={max_exit_layer}: "
                "depth may only fall along the text; swap them"
            )
        checks.require_positive("seq_len", seq_len)
        budgets = linear(max_exit_layer, min_exit_layer, seq_len)
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
        checks.require_int("num_layers", num_layers)
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
    def power_law(
        cls,
        num_layers: int,
        alpha: float,
        seq_len: int,
        *,
        min_exit_layer: int | None = None,
        warmup_layers: int = 1,
        prompt: PromptDepth = "full",
        drop_order: Sequence[int] | None = None,
        name: str = "power-law",
    ) -> Self:
        """`num_layers`·`alpha`ⁱ layers at position i (D3), never below `min_exit_layer`, bottom up.

        `seq_len` positions are listed; the last budget holds from there on.
        """
        if not isinstance(alpha, int | float) or not 0 < alpha <= 1:
            raise ScheduleError(f"alpha={alpha!r} is not accepted: give a number in (0, 1]")
        checks.require_positive("seq_len", seq_len)
        floor = least_budget(num_layers, warmup_layers) if min_exit_layer is None else min_exit_layer
        checks.require_int("min_exit_layer", floor)
        budgets = tuple(max(floor, round(num_layers * alpha**i)) for i in range(seq_len))
        order = layer_order.bottom_up(num_layers, warmup_layers) if drop_order is None else drop_order
        return cls(num_layers, tuple(order), budgets, warmup_layers, prompt, name)

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
    def from_layer_sets(
        cls,
        num_layers: int,
        layer_sets: Sequence[Iterable[int]],
        *,
        warmup_layers: int = 1,
        prompt: PromptDepth = "full",
        name: str = "custom",
    ) -> Self:
        """A schedule from explicit layer sets of position 0, 1, …; refuses sets that are not nested."""
        order, budgets = layer_order.from_sets(num_layers, layer_sets)
        return cls(num_layers, order, budgets, warmup_layers, prompt, name)

    @property
    def seq_len(self) -> int:
        """Positions over which the budgets are listed; later ones use the last budget."""
        return len(self.budgets)

    def budget(self, position: int) -> int:
        """Number of layers that run at a generation position (0, 1, …, any size)."""
        checks.require_int("position", position)
        if position < 0:
            raise ScheduleError(f"position={position} is not accepted: positions count from 0")
        return self.budgets[min(position, len(self.budgets) - 1)]

    def layers(self, position: int) -> tuple[int, ...]:
        """Layers that run at a generation position, in ascending order."""
        return self._sets[self.budget(position)]

    def prompt_layers(self) -> tuple[int, ...]:
        """Layers that run on prompt tokens, in ascending order."""
        return tuple(range(self.num_layers)) if self.prompt == "full" else self.layers(0)

    @property
    def dropped(self) -> tuple[int, ...]:
        """The layers that are dropped at some position, in order."""
        return self.drop_order[: self.num_layers - self.budgets[-1]]

    def drop_position(self, layer: int) -> int | None:
        """First generation position at which `layer` no longer runs; None if it always runs."""
        return self._drop_positions[layer]

    @cached_property
    def _sets(self) -> dict[int, tuple[int, ...]]:
        everything = set(range(self.num_layers))
        return {b: tuple(sorted(everything - set(self.drop_order[: self.num_layers - b]))) for b in set(self.budgets)}

    @cached_property
    def _drop_positions(self) -> tuple[int | None, ...]:
        found: list[int | None] = [None] * self.num_layers
        for rank, layer in enumerate(self.drop_order):
            found[layer] = next((i for i, b in enumerate(self.budgets) if self.num_layers - b > rank), None)
        return tuple(found)

    def mean_budget(self, num_tokens: int | None = None) -> float:
        """Mean number of layers over the first `num_tokens` generation positions (default: `seq_len`)."""
        count = self.seq_len if num_tokens is None else num_tokens
        checks.require_positive("num_tokens", count)
        listed = sum(self.budgets[:count])
        return (listed + max(0, count - self.seq_len) * self.budgets[-1]) / count

    @property
    def nominal_speedup(self) -> float:
        """The paper's speed-up, layers of the model / mean layers run over `seq_len`. Not wall-clock time."""
        return self.num_layers / self.mean_budget()

    @property
    def is_full(self) -> bool:
        """Whether every layer runs at every position."""
        return min(self.budgets) == self.num_layers

    @property
    def is_flat(self) -> bool:
        """Whether all positions run the same layers, so rows of different ages fit in one batch."""
        return self.budgets[0] == self.budgets[-1]

    def flattened(self) -> Self:
        """The constant schedule of the same mean budget (rounded) and drop order."""
        return replace(self, budgets=(max(self.budgets[-1], round(self.mean_budget())),), name=f"{self.name}-flat")

    def check_fits(self, num_layers: int) -> None:
        """Raise ScheduleError unless the schedule is for a model of `num_layers` layers."""
        if self.num_layers != num_layers:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.num_layers} layers, but the model has {num_layers}: "
                f"make one with num_layers={num_layers}"
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary, also the value of `skipdecode` in a model's config.json."""
        values = ((f, getattr(self, f)) for f in FIELDS)
        return {f: list(v) if isinstance(v, tuple) else v for f, v in values}

    def to_json(self, indent: int | None = None) -> str:
        """The schedule as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A schedule from `to_dict`'s dictionary; refuses unknown, missing and wrongly typed fields by name."""
        return cls(**checks.fields("schedule", data, FIELDS, REQUIRED))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A schedule from JSON text."""
        return cls.from_dict(checks.json_value("a schedule", text))
