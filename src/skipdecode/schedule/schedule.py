"""Nested layer schedules: which layers run at which generation position. Pure Python, no torch.

A schedule is a *drop order* (the layer that is dropped first, second, …) and a non-increasing list of *budgets* (the
number of layers that run at position 0, 1, …; the last value holds for all later positions). The budgets never grow and
the order is fixed, so the layer sets are nested, and KV caching needs no recomputation (docs/theory.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import Json
from skipdecode.common.plain import unwrapped
from skipdecode.errors import ScheduleError, UsageError
from skipdecode.schedule import order as layer_order
from skipdecode.schedule.order import (
    PromptDepth,
    check_budgets,
    check_layers,
    check_order,
    int_tuple,
    require_int,
    require_positive,
)

_REQUIRED = ("num_layers", "drop_order", "budgets")
_FIELDS = (*_REQUIRED, "warmup_layers", "prompt", "name")
_LABELS = ("family", "variant", "speedup")


@dataclass(frozen=True)
class Schedule:
    """The layers that run at each generation position. The class methods make the known kinds.

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
    prompt : {"full", "max_exit"} or sequence of int
        Layers that prompt tokens run: all, those of position 0, or the given ones. In layers that position 0 runs and
        prompts do not, the prompt's keys and values are projected: computed from the hidden state that passes by, and
        nothing else is computed (`projected`). The last prompt token runs both sets.
    name : str
        A label for tables and files. Default: `family`, `variant` and `speedup`, as in "skipdecode-p15-3x".
    family : str
        The common name of schedules of one kind with different speed-ups. Default: the name.
    variant : str
        A label that distinguishes schedules of one family and speed-up, such as "p15" for 15 prompt layers.
    speedup : float or None
        The nominal speed-up for which the schedule was made.

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
    name: str = ""
    family: str = field(default="", compare=False)
    variant: str = field(default="", compare=False)
    speedup: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "warmup_layers"):
            require_int(name, getattr(self, name))
            object.__setattr__(self, name, unwrapped(getattr(self, name)))
        for name in ("drop_order", "budgets"):
            object.__setattr__(self, name, int_tuple(name, getattr(self, name)))
        require_positive("num_layers", self.num_layers)
        if not 0 <= self.warmup_layers <= self.num_layers:
            raise ScheduleError(f"warmup_layers={self.warmup_layers} is not accepted: give 0 to {self.num_layers}")
        if isinstance(self.prompt, str) and self.prompt not in ("full", "max_exit"):
            raise ScheduleError(f"prompt={self.prompt!r} is not accepted: give 'full', 'max_exit' or a list of layers")
        check_order(self.drop_order, self.num_layers, self.warmup_layers)
        check_budgets(self.budgets, self.num_layers, len(self.drop_order))
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", check_layers(self.prompt, self.num_layers, self.warmup_layers))
        self._set_labels()

    def _set_labels(self) -> None:
        for name in ("name", "family", "variant"):
            if not isinstance(getattr(self, name), str):
                raise ScheduleError(f"{name}={getattr(self, name)!r} is not accepted: give text")
        speedup = unwrapped(self.speedup)
        if type(speedup) not in (int, float, type(None)):
            raise ScheduleError(f"speedup={speedup!r} is not accepted: give a number or none")
        object.__setattr__(self, "speedup", speedup)
        object.__setattr__(self, "family", self.family or self.name or "custom")
        if not self.name:
            parts = self.family, self.variant, "" if speedup is None else f"{speedup:g}x"
            object.__setattr__(self, "name", "-".join(filter(None, parts)))

    @property
    def seq_len(self) -> int:
        """Positions over which the budgets are listed; later ones use the last budget."""
        return len(self.budgets)

    def budget(self, position: int) -> int:
        """Number of layers that run at a generation position (0, 1, …, any size)."""
        require_int("position", position)
        if position < 0:
            raise ScheduleError(f"position={position} is not accepted: positions count from 0")
        return self.budgets[min(position, len(self.budgets) - 1)]

    def layers(self, position: int) -> tuple[int, ...]:
        """Layers that run at a generation position, in ascending order."""
        return self._sets[self.budget(position)]

    def prompt_layers(self) -> tuple[int, ...]:
        """Layers that prompt tokens except the last one run, in ascending order."""
        if self.prompt == "full":
            return tuple(range(self.num_layers))
        return self.layers(0) if self.prompt == "max_exit" else self.prompt

    @cached_property
    def projected(self) -> tuple[int, ...]:
        """Layers that position 0 runs and prompts do not. The last prompt token runs them; the others are projected."""
        return tuple(sorted(set(self.layers(0)) - set(self.prompt_layers())))

    def last_prompt_layers(self) -> tuple[int, ...]:
        """Layers that the last prompt token runs: those of the prompt and those of position 0, in ascending order."""
        return tuple(sorted({*self.prompt_layers(), *self.layers(0)}))

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
        positions: list[int | None] = [None] * self.num_layers
        for rank, layer in enumerate(self.drop_order):
            positions[layer] = next((i for i, b in enumerate(self.budgets) if self.num_layers - b > rank), None)
        return tuple(positions)

    def mean_budget(self, num_tokens: int | None = None) -> float:
        """Mean number of layers over the first `num_tokens` generation positions (default: `seq_len`)."""
        count = self.seq_len if num_tokens is None else num_tokens
        require_positive("num_tokens", count)
        listed = sum(self.budgets[:count])
        return (listed + max(0, count - self.seq_len) * self.budgets[-1]) / count

    @property
    def nominal_speedup(self) -> float:
        """The paper's speed-up, layers of the model / mean layers run over `seq_len`. Not wall-clock time."""
        return self.num_layers / self.mean_budget()

    @property
    def is_full(self) -> bool:
        """Whether every layer runs on every token."""
        return min(self.budgets) == self.num_layers == len(self.prompt_layers())

    @property
    def shortens_prompts_alone(self) -> bool:
        """Whether new tokens run every layer, and prompts do not."""
        return min(self.budgets) == self.num_layers and not self.is_full

    @property
    def is_flat(self) -> bool:
        """Whether all positions run the same layers, so a batch with sequences of different ages loses nothing."""
        return self.budgets[0] == self.budgets[-1]

    @property
    def fixed_layers(self) -> tuple[int, ...] | None:
        """The layers that every token runs, of prompts and generated; None where two tokens run different layers."""
        same = self.is_flat and self.prompt_layers() == self.layers(0)
        return self.layers(0) if same else None

    def contains(self, other: Schedule) -> bool:
        """Whether this schedule runs all layers that `other` runs, in the prompt and at every position."""
        if self.num_layers != other.num_layers:
            return False
        pairs = [(self.prompt_layers(), other.prompt_layers())]
        pairs += [(self.layers(i), other.layers(i)) for i in range(max(self.seq_len, other.seq_len))]
        return all(set(less) <= set(more) for more, less in pairs)

    def fits_weights(self, tuned_under: Iterable[Schedule]) -> bool:
        """Whether weights tuned under these schedules fit: this one is full depth, or contains one of them."""
        return self.is_full or any(self.contains(other) for other in tuned_under)

    def check_fits(self, num_layers: int) -> None:
        """Raise ScheduleError unless the schedule is for a model of `num_layers` layers."""
        if self.num_layers != num_layers:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.num_layers} layers, but the model has {num_layers}: "
                f"give one for {num_layers} layers"
            )

    def flattened(self) -> Self:
        """The constant schedule of the same mean budget (rounded) and drop order."""
        budgets = (max(self.budgets[-1], round(self.mean_budget())),)
        variant = "-".join(filter(None, (self.variant, "flat")))
        return replace(self, budgets=budgets, name=f"{self.name}-flat", variant=variant)

    def with_prompt(self, prompt: PromptDepth) -> Self:
        """This schedule with another prompt set; the name has its number of layers, as in "skipdecode-p15-3x"."""
        if prompt == self.prompt:
            return self
        changed = replace(self, prompt=prompt)
        schedule = replace(changed, name="", variant=f"p{len(changed.prompt_layers())}")
        flat = "flat" in self.variant.split("-")
        return replace(schedule, name=f"{schedule.name}-flat", variant=f"{schedule.variant}-flat") if flat else schedule

    def named_by_layers(self, family: str) -> Self:
        """Name this schedule after what runs: "calibrated-p15-20to10" is 15 prompt layers, then 20 falling to 10.

        Such a name stays true on every machine, unlike one with a speed-up that was predicted.
        """
        prompt = len(self.prompt_layers())
        variant = f"p{prompt}" if prompt < self.num_layers else ""
        depths = "to".join(map(str, dict.fromkeys((self.budgets[0], self.budgets[-1]))))
        name = "-".join(filter(None, (family, variant, depths)))
        return replace(self, name=name, family=family, variant=variant)

    def with_speedup(self, nominal_speedup: float) -> Self:
        """A schedule for another nominal speed-up with the same drop order, positions, warm-up and prompt depth.

        A flat schedule gives a flat one; any other gives the paper's linear budgets. 1 is full depth, for prompts too.
        Raises ScheduleError if the drop order cannot give this speed-up.
        """
        layer_order.require_speedup(nominal_speedup)
        if nominal_speedup == 1:
            return self.full(self.num_layers)
        if not self.drop_order:
            raise ScheduleError(
                f"a full-depth schedule has no drop order to sample {nominal_speedup:g}x from: give a schedule that "
                "skips layers"
            )
        if self.is_flat:
            budgets: tuple[int, ...] = (max(1, round(self.num_layers / nominal_speedup)),)
        else:
            budgets = layer_order.paper_budgets(self.num_layers, nominal_speedup, self.seq_len, self.warmup_layers)
        return replace(self, budgets=budgets, speedup=nominal_speedup, name="")

    @classmethod
    def full(cls, num_layers: int) -> Self:
        """Every layer at every position."""
        require_int("num_layers", num_layers)
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
        name: str = "",
        family: str = "skipdecode",
    ) -> Self:
        """The paper's schedule for a *nominal* speed-up: mean exit layer = `num_layers` / `nominal_speedup`.

        Budgets fall from mean·(1 + spread) to mean·(1 - spread). `skipdecode plan` solves for a wall-clock speed-up.
        """
        budgets = layer_order.paper_budgets(num_layers, nominal_speedup, seq_len, warmup_layers, spread)
        order = layer_order.bottom_up(num_layers, warmup_layers) if drop_order is None else drop_order
        labels: Json = {"name": name, "family": name or family, "speedup": nominal_speedup}
        return cls(num_layers, tuple(order), budgets, warmup_layers, prompt, **labels)

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

        With a drop order by block influence this is static depth pruning of the generated part (ShortGPT).
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
        """Skips evenly spaced layers (Unified Layer Skipping, arXiv 2404.06954). `budgets` is one number or a list."""
        values = int_tuple("budgets", budgets if isinstance(budgets, Iterable) else (budgets,))
        order = layer_order.evenly_spaced(num_layers, values[-1] if values else num_layers, warmup_layers)
        return cls(num_layers, order, values, warmup_layers, prompt, name)

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
        """Prompt tokens run the lowest `prompt_layers` layers; generated tokens run the warm-up and the highest layers.

        The decoder then works like an encoder-decoder: with halves, each token runs its half of the model. In the upper
        layers the prompt's keys and values are projected. `budgets` is one number or a list.
        """
        require_int("prompt_layers", prompt_layers)
        if not 1 <= prompt_layers <= num_layers:
            raise ScheduleError(f"prompt_layers={prompt_layers} is not accepted: give 1 to {num_layers}")
        order = layer_order.bottom_up(num_layers, warmup_layers)
        return cls(
            num_layers,
            order,
            int_tuple("budgets", budgets if isinstance(budgets, Iterable) else (budgets,)),
            warmup_layers,
            tuple(range(prompt_layers)),
            name,
        )

    def to_dict(self) -> Json:
        """A JSON-ready dictionary, also the value of `skipdecode` in a model's config.json."""
        labels = [name for name in _LABELS if getattr(self, name) not in ("", None, self.name)]
        values = ((name, getattr(self, name)) for name in (*_FIELDS, *labels))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    def to_json(self, indent: int | None = None) -> str:
        """The schedule as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """A schedule from `to_dict`'s dictionary; refuses unknown, missing and wrongly typed fields by name."""
        if not isinstance(data, dict):
            raise ScheduleError(f"a schedule is a JSON object, not {type(data).__name__}")
        known = (*_FIELDS, *_LABELS)
        if unknown := sorted(set(data) - set(known)):
            raise ScheduleError(f"unknown schedule field {unknown[0]!r}: accepted are {', '.join(known)}")
        if missing := [name for name in _REQUIRED if name not in data]:
            raise ScheduleError(f"schedule field {missing[0]!r} is missing: needed are {', '.join(_REQUIRED)}")
        budgets = data["budgets"]
        return cls(**data | {"budgets": layer_order.from_run_lengths(budgets)} if isinstance(budgets, str) else data)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A schedule from JSON text."""
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise ScheduleError(f"a schedule must be JSON: {error}") from None

    def save(self, path: Path | str) -> None:
        """Write the schedule as a JSON file for `load`, with budgets as runs ("20*4, 19*4, 18").

        Raises OutputError if that fails.
        """
        values = self.to_dict() | {"budgets": layer_order.run_lengths(self.budgets)}
        write_whole(_checked(path), json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The schedule of a JSON file; raises ScheduleError naming the file."""
        try:
            return cls.from_json(_checked(path).read_text(encoding="utf-8"))
        except OSError as e:
            raise ScheduleError(f"cannot read the schedule {path}: {e.strerror or e}") from None
        except UnicodeDecodeError:
            raise ScheduleError(f"{path}: a schedule must be JSON, this is not even text") from None
        except ScheduleError as e:
            raise ScheduleError(f"{path}: {e}") from None


def _checked(path: Path | str) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"path={path!r} is not accepted: give the name of a file")
    return Path(path)
