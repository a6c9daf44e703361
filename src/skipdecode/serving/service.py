"""The model behind the server: loaded, with its schedules by name and its worker."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skipdecode.common.progress import note
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.data.chats import template_fault
from skipdecode.data.prompts import context_length
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.kv import KVLayout
from skipdecode.engine.opening import Backend, end_tokens, open_engines
from skipdecode.generation.detokenizer import TokenTexts
from skipdecode.models.families import check_schedule, decoder_layers, unwrap
from skipdecode.models.recipe import Recipe, tuned_template
from skipdecode.schedule import Schedule
from skipdecode.serving.errors import invalid
from skipdecode.serving.limits import ServerLimits
from skipdecode.serving.metrics import Metrics
from skipdecode.serving.preprocessing import Preprocessor
from skipdecode.serving.worker import ModelWorker

_TOLD = ("seq_len", "warmup_layers", "budgets", "drop_order")  # of a schedule, to clients
_PROMPT_TOKENS = 128
"""Of one forward: a row's next token waits for it. The kernels are as fast with 512, within 2% (docs/LOG.md)."""


class Catalog:
    """Schedules by name.

    `carried`: the checkpoint's own: the default. Without it, that is full depth. `others`: further schedules; two of
    one name get a number. `tuned_under`: what the weights were tuned under.

    Attributes `loaded`: all schedules by name, full depth included. `default`: name of the schedule of requests that
    ask for none.
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
        named, number = schedule, 1
        while self.loaded.setdefault(named.name, named) != named:
            number += 1
            named = replace(schedule, name=f"{schedule.name}-{number}")
        return named.name


@dataclass(frozen=True)
class Service:
    """Everything that the paths of the server need."""

    name: str  # of the model, as clients see it
    catalog: Catalog
    preprocessor: Preprocessor
    worker: ModelWorker
    metrics: Metrics
    limits: ServerLimits
    texts: TokenTexts  # of single tokens; the event loop's
    kv_bytes_most: int  # of keys and values, within the limits
    chat: bool  # whether there is a chat template
    template: dict[str, Any] | None = None  # that the checkpoint was tuned on


def open_service(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    carried: Schedule | None = None,
    others: Sequence[Schedule] = (),
    recipe: Recipe | None = None,
    use_template: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    backend: Backend | None = None,
    limits: ServerLimits | None = None,
) -> Service:
    """A service for a loaded model; its worker is not started yet.

    `model`: its projection weights may be fused in place. `name`: the model's name as clients see it. `carried` and
    `others`: see `Catalog`. `recipe`: the checkpoint's; `use_template` puts completions into its template where a
    request does not say. `chat_template_kwargs`: variables of the chat template, where a request gives no others.
    `backend`: of the model; what requests do not say is as it says. Default: that of `open_engines`.

    Raises UsageError, ScheduleError, UnsupportedModelError.
    """
    limits, plain = limits or ServerLimits(), unwrap(model)
    num_layers = len(decoder_layers(plain))
    for schedule in filter(None, (carried, *others)):
        check_schedule(plain.config, schedule)
    template = tuned_template(recipe)
    catalog = Catalog(num_layers, carried, others, () if recipe is None else recipe.tuned_under)
    source = backend or open_engines(model, "auto", note)
    make_engine = partial(
        source.engine,
        max_rows=limits.max_rows,
        refill_below=1,
        in_order=True,
        prefix_cache=limits.prefix_cache,
        prompt_tokens=_PROMPT_TOKENS,
    )
    layout = _kv_layout(source)
    context = context_length(plain.config)
    words, ends = plain.get_input_embeddings().weight.shape[0], end_tokens(model, tokenizer)
    preprocessor = Preprocessor(
        tokenizer, context, words, ends, catalog, limits, template, use_template, chat_template_kwargs
    )
    preprocessor.sampling, preprocessor.stops = source.sampling, StopStrings(source.stop)
    longest, metrics = limits.max_prompt_tokens + limits.max_new_tokens, Metrics(num_layers)
    return Service(
        name=name,
        catalog=catalog,
        preprocessor=preprocessor,
        worker=ModelWorker(make_engine, num_layers, layout, limits, metrics),
        metrics=metrics,
        limits=limits,
        texts=TokenTexts(tokenizer),
        kv_bytes_most=limits.max_rows * layout.bytes(min(longest, context or longest), num_layers),
        chat=template_fault(tokenizer) is None,
        template=None if template is None else template.described() | {"used": use_template},
    )


def _kv_layout(source: Backend) -> KVLayout:
    if source.fast is not None:
        return source.fast.new_kv().layout
    plain = unwrap(source.model)
    return ModelGeometry.from_config(plain.config, plain.dtype.itemsize).mean_layout()
