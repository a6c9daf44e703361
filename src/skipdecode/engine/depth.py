"""The layers of prompts, and the rows of a layer. Pure Python."""

from __future__ import annotations

from typing import NamedTuple, Self

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
