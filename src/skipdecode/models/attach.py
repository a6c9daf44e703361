"""attach / detach: put a schedule on a transformers causal LM, and take it off again without a trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from skipdecode.errors import AlreadyAttachedError, AttachError, ScheduleError, UnsupportedFeatureError
from skipdecode.models.cache import SkipCache
from skipdecode.models.families import decoder_layers, find_family, unwrap
from skipdecode.models.forward import CallArguments
from skipdecode.models.gate import Conductor, gate_layer, is_gated, ungate_layer
from skipdecode.models.generation import GenerationStats, check_features, prompt_columns
from skipdecode.models.plan import StepPlan, label_positions, length_positions
from skipdecode.schedule import Schedule

__all__ = ["Attachment", "attach", "detach"]

_MARK = "_skipdecode_attachment"


def attach(model: Any, schedule: Schedule | None = None) -> Attachment:
    """Put a schedule on a model: from here on its `generate` and `forward` skip layers.

    Works with and without `with`; on exit (also after an exception) or `detach` the model is as it was.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        A causal LM of a family in `skipdecode.models.families`.
    schedule : Schedule, optional
        Default: the one in the model's config (key `skipdecode`), as a tuned checkpoint carries it.

    Returns
    -------
    Attachment

    Raises
    ------
    UnsupportedModelError
        The model's type is not in the table; names it and lists what works.
    AlreadyAttachedError
        A schedule is attached already.
    ScheduleError
        The schedule is for another number of layers, or there is none.
    """
    return Attachment(model, schedule)


def detach(model: Any) -> None:
    """Take a model's schedule off; does nothing if there is none."""
    attachment = unwrap(model).__dict__.get(_MARK)
    if attachment is not None:
        attachment.detach()


class Attachment:
    """A schedule on a model. Made by `attach`.

    While attached, per forward:

    * with a cache (`generate`, or a loop that passes `past_key_values`): prompt columns run `schedule.prompt_layers()`,
      the i-th generated column `schedule.layers(i)`. A new prompt after generated tokens (a second turn on the same
      cache) cannot run layers that those tokens skipped: it and all that follows run the schedule's last set.
    * with `labels`, or `prompt_length=` (a number of columns, or one for each row): teacher-forced, without a cache.
      Response token j runs `schedule.layers(j)`. Differentiable.
    * with neither: all tokens are prompt.

    Not thread-safe: one forward at a time per model.

    Attributes
    ----------
    last_run : GenerationStats or None
        What the last `generate` call ran and held.
    """

    def __init__(self, model: Any, schedule: Schedule | None = None) -> None:
        self._model = unwrap(model)
        family = find_family(self._model)
        self._layers = list(decoder_layers(self._model))
        if _MARK in self._model.__dict__ or any(map(is_gated, self._layers)):
            raise AlreadyAttachedError(
                f"a schedule is attached to this {type(self._model).__name__} already: assign attachment.schedule "
                "to change it, or detach first"
            )
        self.last_run: GenerationStats | None = None
        self.schedule = _schedule_of(self._model) if schedule is None else schedule
        self._conductor = Conductor(family.returns_tuple)
        self._arguments = CallArguments(self._model)
        self._pending: tuple[SkipCache, list[int]] | None = None
        self._uncached_prompt: int | None = None
        self._paused = False
        self._counts = (0, 0, 0)
        self._install()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    # ------------------------------------------------------------------ public

    @property
    def model(self) -> Any:
        """The transformers model that is gated (inside a PEFT wrapper, its base model)."""
        return self._model

    @property
    def schedule(self) -> Schedule:
        """The schedule; may be assigned between forwards, not in the middle of a cached text."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        if not isinstance(schedule, Schedule):
            raise ScheduleError(f"a Schedule is needed, not {type(schedule).__name__}: see skipdecode.Schedule")
        schedule.check_fits(len(self._layers))
        self._schedule = schedule

    def new_cache(self, prompt_length: int | None = None) -> SkipCache:
        """An empty cache for a decoding loop of your own (`SkipCache`)."""
        return SkipCache(self._model.config, prompt_length)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it the model runs at full depth as if nothing were attached (a distillation teacher's pass)."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def detach(self) -> None:
        """Restore the model; may be called twice."""
        if self._model.__dict__.pop(_MARK, None) is None:
            return
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            ungate_layer(layer)
        for name in ("generate", "generate_batch"):
            self._model.__dict__.pop(name, None)

    # ------------------------------------------------------------------ installation

    def _install(self) -> None:
        for name in ("generate", "generate_batch"):
            if name in self._model.__dict__:
                raise AttachError(f"this model's {name} was replaced by another tool: undo that before attaching")
        for index, layer in enumerate(self._layers):
            gate_layer(layer, index, self._conductor)
        self._handles = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, always_call=True),
        ]
        self._model.__dict__[_MARK] = self
        # Instance attributes, so that the class and every other model of it stay as they are.
        self._model.__dict__["generate"] = self._generate
        self._model.__dict__["generate_batch"] = self._refuse_generate_batch

    # ------------------------------------------------------------------ forward

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Plan the forward, and see to it that it uses our cache."""
        self._conductor.plan = self._pending = None
        call = self._arguments.named(args, kwargs)
        prompt_length = call.pop("prompt_length", None)
        if self._paused:
            return (), call
        columns = self._arguments.columns(call)
        if not self._schedule.is_full:
            self._arguments.check(call)
        past = call.get("past_key_values")
        if past is None and (prompt_length is not None or call.get("labels") is not None):
            self._plan_teacher_forced(call, prompt_length, columns)
        elif past is None and not self._arguments.wants_cache(call):
            self._plan_uncached(columns)
        else:
            self._plan_cached(call, prompt_length, columns)
        return (), call

    def _plan_teacher_forced(self, call: dict[str, Any], prompt_length: int | Tensor | None, columns: int) -> None:
        call["use_cache"] = False
        if prompt_length is None:
            positions = label_positions(call["labels"])
        else:
            batch, device = self._arguments.batch(call)
            positions = length_positions(prompt_length, batch, columns, device)
        self._conductor.plan = StepPlan.of_rows(self._schedule, positions)

    def _plan_uncached(self, columns: int) -> None:
        prompt = columns if self._uncached_prompt is None else self._uncached_prompt
        self._set_columns([max(-1, i - prompt) for i in range(columns)])

    def _plan_cached(self, call: dict[str, Any], prompt_length: int | None, columns: int) -> None:
        cache = call.get("past_key_values")
        if cache is None:
            cache = call["past_key_values"] = self.new_cache()
        elif not isinstance(cache, SkipCache):
            if self._schedule.is_full:
                return
            check_features({"past_key_values": cache}, None)
        if prompt_length is not None:
            cache.prompt_length = int(prompt_length)
        positions = cache.next_positions(columns)
        self._set_columns(positions)
        self._pending = cache, positions

    def _set_columns(self, positions: list[int]) -> None:
        plan = self._conductor.plan = StepPlan.of_columns(self._schedule, positions)
        forwards, run, full = self._counts
        run += sum(layer.count for layer in plan.layers)
        self._counts = (forwards + 1, run, full + plan.columns * len(plan.layers))

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self._conductor.plan = None
        if self._pending is not None and output is not None:
            cache, positions = self._pending
            cache.advance(positions)
        self._pending = None

    # ------------------------------------------------------------------ generate

    def _generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate` under the schedule; refuses by name what cannot work with skipped layers."""
        plain = functools.partial(type(self._model).generate, self._model, inputs, generation_config, *args)
        defaults = generation_config or self._model.generation_config
        try:
            check_features(kwargs, defaults)
        except UnsupportedFeatureError:
            if not self._schedule.is_full:
                raise
            with self.paused():
                return plain(**kwargs)
        prompt = prompt_columns(inputs, kwargs) or 1
        self._counts = (0, 0, 0)
        if kwargs.get("use_cache", getattr(defaults, "use_cache", True)) is False:
            with self._prompt_without_cache(prompt):
                result = plain(**kwargs)
            held = (0, 0)
        else:
            cache = kwargs["past_key_values"] = kwargs.get("past_key_values") or self.new_cache()
            if cache.fed is None:
                cache.prompt_length = prompt
            result = plain(**kwargs)
            cache.begin_response()
            held = cache.kv_bytes(), cache.kv_bytes_full()
        self.last_run = GenerationStats(*self._counts, *held)
        return result

    @contextlib.contextmanager
    def _prompt_without_cache(self, columns: int) -> Iterator[None]:
        self._uncached_prompt = columns
        try:
            yield
        finally:
            self._uncached_prompt = None

    def _refuse_generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedFeatureError(
            "generate_batch (continuous batching) is not supported while attached: its rows have different ages in one "
            "paged cache; use generate, or detach first"
        )


def _schedule_of(model: Any) -> Schedule:
    data = getattr(model.config, "skipdecode", None)
    if data is None:
        raise ScheduleError("no schedule was given and the model's config has none (key 'skipdecode'): pass a Schedule")
    return Schedule.from_dict(data)
