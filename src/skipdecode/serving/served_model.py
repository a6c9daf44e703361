"""The model that a server serves: what requests are checked against, and what /v1/models shows of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from skipdecode.common.types import Tokenizer
from skipdecode.data.chats import template_fault
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.kv import KVLayout
from skipdecode.engine.requests import Sampling
from skipdecode.schedule import Schedule
from skipdecode.serving.errors import invalid
from skipdecode.serving.limits import ServerLimits


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model with the schedules and limits of its server."""

    name: str  # for clients
    tokenizer: Tokenizer  # not safe for several threads: each copies it
    schedules: Mapping[str, Schedule]  # by the name that requests give
    default: str  # the schedule of requests that name none
    limits: ServerLimits
    context: int | None  # tokens that the model can see at once
    vocab_size: int
    end_tokens: frozenset[int]  # a choice ends after any of them
    sampling: Sampling  # of requests that do not say, as `stops`
    stops: StopStrings
    layout: KVLayout  # of keys and values
    template: PromptTemplate | None  # that the checkpoint was tuned on: texts of completions go into it
    use_template: bool  # whether they do where a request does not say
    variables: Mapping[str, object]  # of the chat template, where a request gives no others

    def schedule(self, name: str | None) -> Schedule:
        """Return the schedule of this name, or the default; raises ApiError if there is none."""
        name = self.default if name is None else name
        if name not in self.schedules:
            message = f"there is no schedule of this name: the server has {', '.join(self.schedules)}"
            raise invalid(message, "skipdecode.schedule")
        return self.schedules[name]

    @property
    def num_layers(self) -> int:
        return self.schedules[self.default].num_layers

    @property
    def most_kv_bytes(self) -> int:
        """Bytes of keys and values of a full batch, each sequence as long as the limits allow."""
        longest = self.limits.max_prompt_tokens + self.limits.max_new_tokens
        return self.limits.max_rows * self.layout.bytes(min(longest, self.context or longest), self.num_layers)

    def entry(self, tuned_under: Sequence[Schedule]) -> dict[str, object]:
        """Make OpenAI's entry of the model; `tuned_under`: the schedules that the weights were tuned under."""
        schedules = [
            {
                "name": name,
                "nominal_speedup": round(schedule.nominal_speedup, 4),
                "mean_budget": round(schedule.mean_budget(), 4),
                **{field: getattr(schedule, field) for field in ("seq_len", "warmup_layers", "budgets", "drop_order")},
                "prompt_layers": schedule.prompt_layers(),
                "tuned": schedule.fits_weights(tuned_under),
            }
            for name, schedule in self.schedules.items()
        ]
        tuned, used = self.template, self.use_template
        template = tuned and {"prompt": tuned.text, "fields": tuned.fields, "chat": tuned.chat, "used": used}
        description = {
            "num_layers": self.num_layers,
            "template": template,
            "chat": template_fault(self.tokenizer) is None,
            "default_schedule": self.default,
            "schedules": schedules,
        }
        about = {"object": "model", "created": int(time.time()), "owned_by": "skipdecode"}
        return {"id": self.name, **about, "skipdecode": description}


def add_schedule(schedules: dict[str, Schedule], schedule: Schedule) -> str:
    """Add a schedule under its name, or a numbered one if another schedule has that; returns the name."""
    added, number = schedule, 1
    while schedules.setdefault(added.name, added) != added:
        number += 1
        added = replace(schedule, name=f"{schedule.name}-{number}")
    return added.name
