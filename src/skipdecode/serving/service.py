"""Opens what runs behind the paths of the server: the model, the checks of its requests, its worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from skipdecode.common.progress import note
from skipdecode.common.types import PreTrainedModel, Tokenizer
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.data.prompts import context_length, vocabulary_size
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.kv import KVLayout
from skipdecode.engine.opening import Backend, end_tokens, open_engines
from skipdecode.engine.requests import Request
from skipdecode.generation.detokenizer import TokenTexts
from skipdecode.models.families import check_schedule, decoder_layers, unwrap
from skipdecode.models.recipe import Recipe
from skipdecode.schedule import Schedule
from skipdecode.serving.limits import ServerLimits
from skipdecode.serving.metrics import Metrics
from skipdecode.serving.preprocessing import Preprocessor
from skipdecode.serving.served_model import ServedModel, add_schedule
from skipdecode.serving.worker import ModelWorker

_PROMPT_TOKENS = 128
"""Of one forward: a row's next token waits for it. The kernels are as fast with 512, within 2% (docs/LOG.md)."""


@dataclass(frozen=True)
class Service:
    """Everything that the paths of the server need."""

    model: ServedModel
    entry: dict[str, object]  # of /v1/models
    preprocessor: Preprocessor
    worker: ModelWorker
    metrics: Metrics
    texts: TokenTexts  # of single tokens; the event loop's


def open_service(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    *,
    name: str,
    checkpoint_schedule: Schedule | None = None,
    others: Sequence[Schedule] = (),
    recipe: Recipe | None = None,
    use_template: bool = True,
    chat_template_kwargs: Mapping[str, object] | None = None,
    backend: Backend | None = None,
    limits: ServerLimits | None = None,
) -> Service:
    """Open a service for a loaded model, whose projection weights may be fused in place; its worker is not started yet.

    `checkpoint_schedule`: the default of requests, else full depth. `others`: further schedules. `recipe`: the
    checkpoint's. `backend`: what requests do not say is as it says; default: that of `open_engines`. The others are
    fields of `ServedModel`.

    Raises UsageError, ScheduleError, UnsupportedModelError.
    """
    config, num_layers = unwrap(model).config, len(decoder_layers(unwrap(model)))
    listed = () if checkpoint_schedule is None else (checkpoint_schedule,)
    for schedule in (*listed, *others):
        check_schedule(config, schedule)
    schedules: dict[str, Schedule] = {}
    names = [add_schedule(schedules, schedule) for schedule in (Schedule.full(num_layers), *listed, *others)]
    recipe = recipe or Recipe()
    backend = backend or open_engines(model, "auto", note)
    served = ServedModel(
        name=name,
        tokenizer=tokenizer,
        schedules=schedules,
        default=names[len(listed)],
        limits=limits or ServerLimits(),
        context=context_length(config),
        vocab_size=vocabulary_size(unwrap(model)),
        end_tokens=end_tokens(model, tokenizer),
        sampling=backend.sampling,
        stops=StopStrings(backend.stop),
        layout=_kv_layout(backend),
        template=recipe.template,
        use_template=use_template and recipe.template is not None,
        variables=chat_template_kwargs or {},
    )
    Request((0,), 1, served.sampling).check_vocabulary(served.vocab_size)
    make_engine = partial(
        backend.engine,
        max_rows=served.limits.max_rows,
        refill_below=1,
        in_order=True,
        prefix_cache=served.limits.prefix_cache,
        prompt_tokens=_PROMPT_TOKENS,
    )
    metrics = Metrics(num_layers)
    return Service(
        served,
        served.entry(recipe.tuned_under),
        Preprocessor(served),
        ModelWorker(served, make_engine, metrics),
        metrics,
        TokenTexts(tokenizer),
    )


def _kv_layout(backend: Backend) -> KVLayout:
    if backend.fast is not None:
        return backend.fast.new_kv().layout
    plain = unwrap(backend.model)
    return ModelGeometry.from_config(plain.config, plain.dtype.itemsize).mean_layout()
