"""The model behind the server: loaded, with its schedules, its groups and its worker. Knows nothing about HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.data.prompts import context_length
from skipdecode.engine.opening import EngineSource, end_tokens, open_engines
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.schedule import Schedule
from skipdecode.serving.catalog import Catalog
from skipdecode.serving.groups import KvSize, make_groups
from skipdecode.serving.limits import ServerLimits
from skipdecode.serving.metrics import Metrics
from skipdecode.serving.preprocessing import Preprocessor
from skipdecode.serving.worker import ModelWorker

__all__ = ["Service", "open_service"]


@dataclass(frozen=True)
class Service:
    """What the paths of the server need."""

    name: str  # of the model, as clients see it
    catalog: Catalog
    preprocessor: Preprocessor
    worker: ModelWorker
    metrics: Metrics
    limits: ServerLimits
    token_text: Callable[[int], str]  # of a single token
    kv_bytes_most: int  # of keys and values, within the limits


def open_service(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    carried: Schedule | None = None,
    others: Sequence[Schedule] = (),
    engine: str = "auto",
    weights: str = "model",
    limits: ServerLimits | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Service:
    """A service for a loaded model; its worker is not started yet.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        Its projection weights may be fused in place.
    name : str
        The model's name as clients see it.
    carried, others
        See `Catalog`.
    engine, weights : str
        See `skipdecode.engine.opening.open_fast`.
    note : callable
        Told one line where the choice of the engine needs a word.

    Raises
    ------
    UsageError, ScheduleError, UnsupportedModelError
    """
    limits = limits or ServerLimits()
    plain = unwrap(model)
    num_layers = len(decoder_layers(plain))
    catalog = Catalog(num_layers, carried, others)
    source = open_engines(model, engine, note, weights)
    schedules = [*catalog.loaded.values(), catalog.budget_schedule()]
    groups = make_groups(source, schedules, limits.max_rows, limits.prefix_cache)
    kv_size = _kv_size(source)
    metrics = Metrics(num_layers)
    context = context_length(plain)
    vocab_size = plain.get_input_embeddings().weight.shape[0]
    preprocessor = Preprocessor(tokenizer, context, vocab_size, end_tokens(model, tokenizer), catalog, limits)
    longest = limits.max_prompt_tokens + limits.max_new_tokens
    return Service(
        name=name,
        catalog=catalog,
        preprocessor=preprocessor,
        worker=ModelWorker(groups, num_layers, kv_size, limits, metrics),
        metrics=metrics,
        limits=limits,
        token_text=lambda token: str(tokenizer.decode([token])),
        kv_bytes_most=limits.max_rows * kv_size.of(min(longest, context or longest), num_layers),
    )


def _kv_size(source: EngineSource) -> KvSize:
    if source.fast is not None:
        kv = source.fast.new_kv()
        return KvSize(kv.page_tokens, kv.page_bytes)
    plain = unwrap(source.model)
    return KvSize(1, round(ModelGeometry.from_config(plain.config, plain.dtype.itemsize).kv_bytes_per_token()))
