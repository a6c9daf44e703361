"""The schedules that a server has loaded, those that a request names, and how /v1/models describes them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skipdecode.schedule import Schedule
from skipdecode.serving.errors import invalid

_TOLD = ("seq_len", "warmup_layers", "budgets", "drop_order")  # of a schedule, to clients


class Catalog:
    """Schedules by name.

    `carried`: the checkpoint's own: the default. Without it, that is full depth. `others`: further schedules; two of
    one name get a number. `tuned_under`: what the weights were tuned under.

    Attributes `loaded`: all schedules by name, full depth included. `default`: name of the schedule of requests that
    ask for none.

    Raises ScheduleError: a schedule is for another number of layers.
    """

    def __init__(
        self,
        num_layers: int,
        carried: Schedule | None,
        others: Iterable[Schedule] = (),
        tuned_under: Sequence[Schedule] = (),
    ) -> None:
        self.num_layers = num_layers
        self._tuned_under = tuned_under
        self.loaded: dict[str, Schedule] = {}
        self._add(Schedule.full(num_layers))
        self.default = "full" if carried is None else self._add(carried)
        for schedule in others:
            self._add(schedule)

    def find(self, name: str | None) -> Schedule:
        """The schedule that a request asks for; raises ApiError if there is none."""
        name = self.default if name is None else name
        if name not in self.loaded:
            message = f"there is no schedule of this name: the server has {', '.join(self.loaded)}"
            raise invalid(message, "skipdecode.schedule")
        return self.loaded[name]

    def model_entry(self, model: str, template: Mapping[str, Any] | None = None, *, chat: bool) -> dict[str, Any]:
        """The model, served under this name, with schedules and the template that it was tuned on; `chat`: it chats."""
        schedules = [
            {
                "name": name,
                "nominal_speedup": round(schedule.nominal_speedup, 4),
                "mean_budget": round(schedule.mean_budget(), 4),
                **{field: getattr(schedule, field) for field in _TOLD},
                "prompt_layers": schedule.prompt_layers(),
                "tuned": schedule.fits_weights(self._tuned_under),
            }
            for name, schedule in self.loaded.items()
        ]
        described = {
            "num_layers": self.num_layers,
            "template": template,
            "chat": chat,
            "default_schedule": self.default,
            "schedules": schedules,
        }
        about = {"object": "model", "created": int(time.time()), "owned_by": "skipdecode"}
        return {"id": model, **about, "skipdecode": described}

    def _add(self, schedule: Schedule) -> str:
        schedule.check_fits(self.num_layers)
        named, number = schedule, 1
        while self.loaded.setdefault(named.name, named) != named:
            number += 1
            named = replace(schedule, name=f"{schedule.name}-{number}")
        return named.name
