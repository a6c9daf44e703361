"""The layers of a budget in the drop order of an engine, those of prompts, and the rows of a layer. Pure Python."""

from __future__ import annotations

from typing import NamedTuple, Self

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Schedule


class LayerRows(NamedTuple):
    """The rows of a forward in one layer.

    Rows `stored` to before `runs` only store keys and values, rows `runs` to before `end` run the layer. The others
    skip the layer.
    """

    stored: int
    runs: int
    end: int


class PromptLayers(NamedTuple):
    """The layers that prompt tokens run, and the layers in which they are projected; the last token runs both.

    `own`: the prompt's layers are a set of its own, not a budget of the drop order.
    """

    run: tuple[int, ...]
    projected: tuple[int, ...] = ()
    own: bool = False

    @classmethod
    def of(cls, schedule: Schedule) -> Self:
        """The prompt layers of a schedule."""
        if isinstance(schedule.prompt, str):
            return cls(schedule.prompt_layers())
        return cls(schedule.prompt_layers(), schedule.projected, own=True)

    @property
    def held(self) -> tuple[int, ...]:
        """Layers that store keys and values, ascending."""
        return tuple(sorted(self.run + self.projected))


class DepthOrder:
    """The layers of each budget, in one drop order for all sequences of an engine."""

    def __init__(self, schedule: Schedule) -> None:
        self.num_layers = schedule.num_layers
        self._drop_order = schedule.drop_order
        # The least budget at which a layer runs; layers that are never dropped run at every budget.
        self._least = [0] * self.num_layers
        for rank, layer in enumerate(schedule.drop_order):
            self._least[layer] = self.num_layers - rank
        self._layers: dict[int, tuple[int, ...]] = {}

    def takes(self, schedule: Schedule) -> bool:
        """Whether the layers that a schedule drops are the first of this order, in this order."""
        dropped = schedule.dropped
        return schedule.num_layers == self.num_layers and dropped == self._drop_order[: len(dropped)]

    def check(self, schedule: Schedule) -> None:
        """Raise ScheduleError unless sequences under a schedule can run beside those of this order."""
        schedule.check_fits(self.num_layers)
        if not self.takes(schedule):
            raise ScheduleError(f"schedule {schedule.name!r} drops layers in another order than this engine")

    def layers(self, budget: int) -> tuple[int, ...]:
        """Layers of a budget, ascending."""
        if budget not in self._layers:
            chosen = tuple(i for i, least in enumerate(self._least) if budget >= least)
            if len(chosen) != budget:
                raise ScheduleError(f"budget {budget} is not accepted: the drop order allows {len(chosen)} at least")
            self._layers[budget] = chosen
        return self._layers[budget]
