"""Nested layer schedules: which layers run at which generation position. Pure Python, no torch.

A schedule is a *drop order* (which layer goes first, second, …) and a non-increasing list of *budgets* (how many
layers run at position 0, 1, …; the last value holds for ever). Because the budgets never grow and the order is fixed,
the layer sets are nested by construction, which is what makes KV caching free (docs/architecture.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from skipdecode.common.files import write_whole
from skipdecode.errors import ScheduleError
from skipdecode.schedule.order import (
    Order,
    PromptDepth,
    check_budgets,
    check_layers,
    check_order,
    int_tuple,
    make_order,
    require_int,
    require_positive,
)

__all__ = ["NestedLayers", "PromptDepth", "curve_name"]

_REQUIRED = ("num_layers", "drop_order", "budgets")
_FIELDS = (*_REQUIRED, "warmup_layers", "prompt", "name")
_SPEED_ENDING = re.compile(r"[-_@ ]\d+(\.\d+)?x$")
_PROMPT_ENDING = re.compile(r"-p\d+$")


def curve_name(name: str) -> str:
    """A schedule's or run's name without a speed-up such as "-2x" at its end: what differs in it only is one curve."""
    return _SPEED_ENDING.sub("", name)


@dataclass(frozen=True)
class NestedLayers:
    """Which layers run at each generation position: the data of a `Schedule`, and what can be asked of it.

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
        What prompt tokens run: every layer, the layers of position 0, or these layers. Of layers that position 0 runs
        beyond them, the prompt's keys and values are projected: computed from the state that passes by, and nothing
        else is (`projected`). The last prompt token runs both.
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
            require_int(field, getattr(self, field))
        for field in ("drop_order", "budgets"):
            object.__setattr__(self, field, int_tuple(field, getattr(self, field)))
        require_positive("num_layers", self.num_layers)
        if not 0 <= self.warmup_layers <= self.num_layers:
            raise ScheduleError(f"warmup_layers={self.warmup_layers} is not accepted: give 0 to {self.num_layers}")
        if isinstance(self.prompt, str) and self.prompt not in ("full", "max_exit"):
            raise ScheduleError(f"prompt={self.prompt!r} is not accepted: give 'full', 'max_exit' or a list of layers")
        if not isinstance(self.name, str):
            raise ScheduleError(f"name={self.name!r} is not accepted: give text")
        check_order(self.drop_order, self.num_layers, self.warmup_layers)
        check_budgets(self.budgets, self.num_layers, len(self.drop_order))
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", check_layers(self.prompt, self.num_layers, self.warmup_layers))

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
        """Layers that run on prompt tokens, the last one apart, in ascending order."""
        if self.prompt == "full":
            return tuple(range(self.num_layers))
        return self.layers(0) if self.prompt == "max_exit" else self.prompt

    @cached_property
    def projected(self) -> tuple[int, ...]:
        """Layers that position 0 runs and prompts do not: the last prompt token runs them, the others are projected."""
        return tuple(sorted(set(self.layers(0)) - set(self.prompt_layers())))

    def last_prompt_layers(self) -> tuple[int, ...]:
        """Layers that run on the last prompt token: the prompt's and those of position 0, in ascending order."""
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
        found: list[int | None] = [None] * self.num_layers
        for rank, layer in enumerate(self.drop_order):
            found[layer] = next((i for i, b in enumerate(self.budgets) if self.num_layers - b > rank), None)
        return tuple(found)

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
    def is_flat(self) -> bool:
        """Whether all positions run the same layers, so rows of different ages fit in one batch."""
        return self.budgets[0] == self.budgets[-1]

    def flattened(self) -> Self:
        """The constant schedule of the same mean budget (rounded) and drop order."""
        return replace(self, budgets=(max(self.budgets[-1], round(self.mean_budget())),), name=f"{self.name}-flat")

    def reordered(self, order: Order, *, name: str | None = None) -> Self:
        """The same budgets, and so the same cost, with layers dropped in another order."""
        drop_order = make_order(order, self.num_layers, self.warmup_layers, self.budgets[-1])
        return replace(self, drop_order=drop_order, name=self.name if name is None else name)

    def with_prompt(self, prompt: PromptDepth) -> Self:
        """The same with another prompt set; the name counts its layers, as in "skipdecode-p15-3x"."""
        if prompt == self.prompt:
            return self
        changed, curve = replace(self, prompt=prompt), curve_name(self.name)
        label = f"{_PROMPT_ENDING.sub('', curve)}-p{len(changed.prompt_layers())}{self.name[len(curve) :]}"
        return replace(changed, name=label)

    def contains(self, other: NestedLayers) -> bool:
        """Whether it runs, in the prompt and at every position, all layers that `other` runs."""
        if self.num_layers != other.num_layers:
            return False
        pairs = [(self.prompt_layers(), other.prompt_layers())]
        pairs += [(self.layers(i), other.layers(i)) for i in range(max(self.seq_len, other.seq_len))]
        return all(set(less) <= set(more) for more, less in pairs)

    def fits_weights(self, tuned_under: Iterable[NestedLayers]) -> bool:
        """Whether weights tuned under these schedules bear it: it is full depth, or one of them is as deep a cut."""
        return self.is_full or any(self.contains(other) for other in tuned_under)

    def check_fits(self, num_layers: int) -> None:
        """Raise ScheduleError unless the schedule is for a model of `num_layers` layers."""
        if self.num_layers != num_layers:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.num_layers} layers, but the model has {num_layers}: "
                f"make one with num_layers={num_layers}"
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary, also the value of `skipdecode` in a model's config.json."""
        values = ((f, getattr(self, f)) for f in _FIELDS)
        return {f: list(v) if isinstance(v, tuple) else v for f, v in values}

    def to_json(self, indent: int | None = None) -> str:
        """The schedule as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """A schedule from `to_dict`'s dictionary; refuses unknown, missing and wrongly typed fields by name."""
        if not isinstance(data, dict):
            raise ScheduleError(f"a schedule is a JSON object, not {type(data).__name__}")
        if unknown := sorted(set(data) - set(_FIELDS)):
            raise ScheduleError(f"unknown schedule field {unknown[0]!r}: accepted are {', '.join(_FIELDS)}")
        if missing := [name for name in _REQUIRED if name not in data]:
            raise ScheduleError(f"schedule field {missing[0]!r} is missing: needed are {', '.join(_REQUIRED)}")
        return cls(**data)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A schedule from JSON text."""
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise ScheduleError(f"a schedule must be JSON: {error}") from None

    def save(self, path: Path | str) -> None:
        """Write the schedule as a JSON file, which `load` and the command line's --schedule read; or OutputError."""
        write_whole(path, self.to_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The schedule of a JSON file; raises ScheduleError naming the file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as e:
            raise ScheduleError(f"cannot read the schedule {path}: {e.strerror or e}") from None
        except UnicodeDecodeError:
            raise ScheduleError(f"{path}: a schedule must be JSON, this is not even text") from None
        except ScheduleError as e:
            raise ScheduleError(f"{path}: {e}") from None
