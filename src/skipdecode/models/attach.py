"""attach / detach: put a schedule on a transformers causal LM, and restore the model."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from skipdecode.common.environment import isolated_torch
from skipdecode.common.types import GenerationConfig, PreTrainedModel
from skipdecode.errors import (
    AlreadyAttachedError,
    AttachError,
    DepthWarning,
    ScheduleError,
    UnsupportedFeatureError,
    UntunedScheduleWarning,
)
from skipdecode.models.cache import SkipCache, bounded_steps, check_states
from skipdecode.models.checkpoint_schedule import named_schedule, schedule_of_model, tuned_under, untuned_line
from skipdecode.models.families import check_schedule, decoder_layers, find_family, lenders, unwrap
from skipdecode.models.fit import Fit
from skipdecode.models.forward import (
    ALL_PROMPT,
    PART_ALONE,
    SECOND_TURN,
    CallArguments,
    ForwardSlot,
    GenerationOptions,
    RowRotary,
    foreign_cache,
)
from skipdecode.models.gate import GateState, gate_layer, gate_of, text_columns, ungate_layer
from skipdecode.models.loading.fit_file import fit_of_checkpoint
from skipdecode.models.plan import AFTER, PROMPT, StepPlan, check_prompt_length, label_positions, length_positions
from skipdecode.models.release import Arguments, Forward, renamed_cache
from skipdecode.schedule import Schedule

_MARK = "_skipdecode_attachment"


def attach(model: PreTrainedModel, schedule: Schedule | str | None = None, fit: Fit | None = None) -> Attachment:
    """Put a schedule on a model: its `generate` and `forward` then skip layers.

    Works with and without `with`. On exit (also after an exception), or after `detach`, the model is as before.

    Projected prompt tokens have two exceptions. Families with one product for queries, keys and values compute the
    queries too (`skipdecode info MODEL` says so). Under gradient checkpointing the layer runs, and its output is
    dropped.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        A causal LM of a family in `skipdecode.models.families`.
    schedule : Schedule or str, optional
        A schedule, or its text (`skipdecode.schedule.grammar`), such as "2x:p15". Default: the schedule of the model's
        PEFT adapter, else of its config (key `skipdecode`), as `skipdecode tune` writes it.
    fit : Fit, optional
        Bridges and prompt maps for skipped layers. Default: the fit with which the model was loaded, or which lies in
        the directory, or at the hub id, that transformers loaded it from.

    Returns
    -------
    Attachment

    Warns
    -----
    UntunedScheduleWarning
        The model does not record that its weights were tuned under the schedule, or under one that it contains, and no
        fit has maps for it. Before training, call `model.train()` first; then there is no warning.

    Raises
    ------
    UnsupportedModelError
        The model's type is not in the table of families; the message lists the table.
    AlreadyAttachedError
        A schedule is attached already.
    ScheduleError
        The schedule is for another number of layers, or there is none.
    FitError
        The fit is for another model, or has prompt maps for a family with one product for queries, keys and values; or
        the weights were tuned with a fit, and it is missing: PEFT does not load the one beside an adapter.
    """
    attachment = Attachment(model, schedule, fit)
    if not attachment.model.training:
        line = untuned_line([attachment.schedule], tuned_under(model), fit=attachment.fit)
        if line is not None:
            warnings.warn(line, UntunedScheduleWarning, stacklevel=2)
    return attachment


def detach(model: PreTrainedModel) -> None:
    """Remove the schedule from a model; does nothing if there is none."""
    attachment = unwrap(model).__dict__.get(_MARK)
    if attachment is not None:
        attachment.detach()


def at_full_depth(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which a model and its parts run at full depth, whether a schedule is attached or not."""
    attachment = unwrap(model).__dict__.get(_MARK)
    return contextlib.nullcontext() if attachment is None else attachment.paused()


class Attachment:
    """A schedule on a model. Made by `attach`.

    A forward of the attached model has one of three forms:

    * With a cache (`generate`, or a loop that passes one): prompt columns run `schedule.prompt_layers()`,
      and the i-th generated column runs `schedule.layers(i)`. A new prompt after generated tokens (a second turn on the
      same cache) cannot run layers that those tokens skipped. It and all later tokens run the schedule's last set.
    * With `labels`, or with `prompt_length=` (a number of columns, or one per row): teacher-forced, without a cache.
      Response token j runs `schedule.layers(j)`. The forward is differentiable.
    * With neither: all tokens are prompt. If prompts run full depth, this is the model without a schedule.

    Not thread-safe: one forward at a time per model.

    Warns
    -----
    DepthWarning
        Once for each kind: a forward of the third form while prompts run full depth, except at the start of a loop that
        passes `use_cache=True`; a second turn on a cache whose tokens run other layers than in a fresh cache; and a
        call of a part of the model, such as its decoder, which runs full depth.
    """

    @isolated_torch()
    def __init__(self, model: PreTrainedModel, schedule: Schedule | str | None = None, fit: Fit | None = None) -> None:
        self._model = unwrap(model)
        self._family = find_family(self._model)
        self._layers = list(decoder_layers(self._model))
        if _MARK in self._model.__dict__ or any(map(gate_of, self._layers)):
            raise AlreadyAttachedError(
                f"a schedule is attached to this {type(self._model).__name__} already: assign attachment.schedule "
                "to change it, or detach first"
            )
        shared = lenders(self._model.config)
        self._gate_state = GateState(self._family.returns, self.new_cache, self._warn_of_parts, shared)
        self._schedule = Schedule.full(len(self._layers))
        self._find_fit: Callable[[], Fit | None] | None = functools.partial(fit_of_checkpoint, model)
        self._fit: Fit | None = None
        if fit is not None:
            self.fit = fit
        schedule = named_schedule(model, schedule) if isinstance(schedule, str) else schedule
        self.schedule = schedule_of_model(model) if schedule is None else schedule
        self._arguments = CallArguments(self._model)
        self._prompt_columns: int | None = None  # within generate
        self._latest: SkipCache | None = None
        self._paused = False
        self._warned: set[str] = set()
        self._install()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model that is gated (inside a PEFT wrapper, its base model)."""
        return self._model

    @property
    def schedule(self) -> Schedule:
        """The schedule. It may be assigned between forwards, but not in the middle of a cached text."""
        return self._schedule

    @schedule.setter
    @isolated_torch()
    def schedule(self, schedule: Schedule) -> None:
        if not isinstance(schedule, Schedule):
            raise ScheduleError(f"a Schedule is needed, not {type(schedule).__name__}: see skipdecode.Schedule")
        check_schedule(self._model.config, schedule)
        if self._find_fit is not None and not schedule.is_full:
            self.fit = self._find_fit()
        self._schedule = schedule
        self._gate_state.take_fit(self._fit, schedule, self._layers)

    @property
    def fit(self) -> Fit | None:
        """Maps that replace skipped layers; may be assigned as the schedule may."""
        return self._fit

    @fit.setter
    @isolated_torch()
    def fit(self, fit: Fit | None) -> None:
        if fit is not None:
            fit.check_fits(self._model)
        self._fit, self._find_fit = fit, None
        self._gate_state.take_fit(fit, self._schedule, self._layers)

    def new_cache(self, prompt_length: int | None = None) -> SkipCache:
        """An empty cache for a decoding loop of your own (`SkipCache`)."""
        return SkipCache(self._model.config, prompt_length)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the model runs at full depth, such as for the teacher of a distillation."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def detach(self) -> None:
        """Restore the model; may be called twice."""
        if self._model.__dict__.pop(_MARK, None) is None:
            return
        self._forward.restore()
        self._rotary.restore()
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            ungate_layer(layer)
        for name in ("generate", "generate_batch"):
            self._model.__dict__.pop(name, None)

    def _install(self) -> None:
        for name in ("generate", "generate_batch"):
            if name in self._model.__dict__:
                raise AttachError(f"this model's {name} was replaced by another tool: undo that before attaching")
        for index, layer in enumerate(self._layers):
            gate_layer(layer, index, self._gate_state)
        self._model.__dict__[_MARK] = self
        self._rotary = RowRotary(self._model)
        self._hooks = bounded_steps(self._model, self._family)
        self._forward = ForwardSlot(self._model, self._run_forward)
        # Instance attributes, so that the class and every other model of it stay as they are.
        self._model.__dict__["generate"] = self._generate
        self._model.__dict__["generate_batch"] = self._refuse_generate_batch

    def _run_forward(self, forward: Forward, args: tuple[Any, ...], kwargs: Arguments) -> ModelOutput:
        """Run the model's own forward under a plan, on a `SkipCache`."""
        call = self._arguments.named(args, kwargs)
        prompt_length = call.pop("prompt_length", None)
        if self._rotary.active:
            self._rotary.set_positions(call, self._arguments.columns(call))
        if self._paused:
            return forward(**call)
        try:
            advance = self._plan(call, prompt_length)
            output = forward(**call)
        finally:
            self._gate_state.plan = self._gate_state.text = self._gate_state.cache = None
        if advance is not None:
            cache, positions = advance
            cache.advance(positions)
        return output

    def _plan(self, call: Arguments, prompt_length: int | Tensor | None) -> tuple[SkipCache, list[int]] | None:
        """Set the plan of a forward; returns the cache to fill, and the positions of the columns."""
        columns = self._arguments.columns(call)
        if not self._schedule.is_full:
            self._arguments.check(call)
        if prompt_length is not None:
            check_prompt_length(prompt_length, columns, call.get(self._arguments.cache_name))
        past = call.get(self._arguments.cache_name)
        self._rotary.check_growth(call, 0 if past is None else past.get_seq_length(), columns)
        if past is not None:
            return self._plan_cached(call, prompt_length, columns)
        if self._schedule.is_full:
            return None
        self._gate_state.text = text_columns(call.get("attention_mask"), columns)
        forced = call.get("labels") is not None or (prompt_length is not None and not call.get("use_cache"))
        prompt_alone = not forced and self._prompt_columns is None and not call.get("use_cache")
        if prompt_alone and len(self._schedule.prompt_layers()) == len(self._layers):
            self._warn_once(ALL_PROMPT)
        if not forced and self._arguments.wants_cache(call):
            return self._plan_cached(call, prompt_length, columns)
        if forced:
            self._plan_teacher_forced(call, prompt_length, columns)
        else:
            prompt = columns if self._prompt_columns is None else self._prompt_columns
            positions = [max(PROMPT, i - prompt) for i in range(columns)]
            self._gate_state.plan = StepPlan.of_columns(self._schedule, positions)
        return None

    def _warn_of_parts(self) -> None:
        if not (self._paused or self._schedule.is_full):
            self._warn_once(PART_ALONE)

    def _warn_once(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(line, DepthWarning, stacklevel=2)

    def _plan_teacher_forced(self, call: Arguments, prompt_length: int | Tensor | None, columns: int) -> None:
        call["use_cache"] = False
        if prompt_length is None:
            positions = label_positions(call["labels"])
        else:
            tokens = self._arguments.tokens(call)
            positions = length_positions(prompt_length, len(tokens), columns, tokens.device)
        self._gate_state.plan = StepPlan.of_rows(self._schedule, positions)

    def _plan_cached(
        self, call: Arguments, prompt_length: int | Tensor | None, columns: int
    ) -> tuple[SkipCache, list[int]] | None:
        name = self._arguments.cache_name
        cache = call.get(name)
        if cache is None:
            cache = call[name] = self.new_cache(self._prompt_columns)
        elif not isinstance(cache, SkipCache):
            if self._schedule.is_full:
                return None
            raise UnsupportedFeatureError(foreign_cache(cache))
        if prompt_length is not None:
            cache.prompt_length = int(prompt_length)
        if self._schedule.projected and cache.prompt_length is None and cache.fed is None:
            raise UnsupportedFeatureError(
                f"schedule {self._schedule.name!r} runs more layers on the last prompt token than on the others: say "
                "where the prompt ends, with prompt_length=… in the call or in new_cache"
            )
        check_states(self._family, cache, call.get("attention_mask"), columns)
        if not self._family.counts_positions and call.get("position_ids") is None:
            call["position_ids"] = torch.arange(cache.length, cache.length + columns, device=self._model.device)[None]
        self._latest = self._gate_state.cache = cache
        self._gate_state.steps = cache.length > 0 and not self._family.continues
        positions = cache.next_positions(columns)
        if cache.fed is not None and columns > 1 and self._schedule.prompt_layers() != self._schedule.layers(AFTER):
            self._warn_once(SECOND_TURN)
        self._gate_state.text = text_columns(call.get("attention_mask"), columns)
        self._gate_state.plan = StepPlan.of_columns(self._schedule, positions)
        return cache, positions

    def _generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' `generate` under the schedule; refuses options that cannot work with skipped layers."""
        plain = functools.partial(type(self._model).generate, self._model, inputs, generation_config, *args)
        if self._paused:
            return plain(**kwargs)
        name = self._arguments.cache_name
        kwargs = renamed_cache(kwargs, name)
        options = GenerationOptions(kwargs, generation_config, self._model)
        if (refusal := options.refusal()) is not None:
            if not self._schedule.is_full:
                raise UnsupportedFeatureError(refusal)
            with self.paused():
                return plain(**kwargs)
        if self._model.training and any(getattr(layer, "gradient_checkpointing", False) for layer in self._layers):
            raise UnsupportedFeatureError(
                "generate in training mode with gradient checkpointing is not supported: checkpointed layers keep no "
                "cache; call model.eval() first"
            )
        prompt = options.prompt_columns(inputs) or 1
        kwargs.pop("cache_implementation", None)
        cache: SkipCache | None = None
        if options.uses_cache():
            cache = kwargs[name] = kwargs.get(name) or self.new_cache()
            if cache.length and not self._family.resumes_cache:
                raise UnsupportedFeatureError(
                    "a second turn on a used cache is not supported for this model: transformers' generate reads the "
                    "whole text again, on top of the states; leave the cache out"
                )
            if cache.fed is None:
                cache.prompt_length = prompt
        self._prompt_columns = prompt
        try:
            result = plain(**kwargs)
        finally:
            self._prompt_columns = None
        if cache is not None:
            (self._latest or cache).begin_response()  # generate may have begun a new one on the way
        return result

    def _refuse_generate_batch(self, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedFeatureError(
            "generate_batch (continuous batching) is not supported while attached: its rows have different ages in one "
            "paged cache; use generate, or detach first"
        )
