"""The gate of a decoder layer: it follows the plan of the forward.

Gating changes the class of a layer object to a subclass that overrides `__call__`; ungating restores the class. The
layer stays the same object with the same parameters in the model's own layer list. So state dicts, PEFT, hooks and
device placement do not change, and gradient checkpointing recomputes the layer, not the gate.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.cache import SkipCache
from skipdecode.models.families import projection
from skipdecode.models.fit import Fit
from skipdecode.models.fit_maps import Bridge, PromptMap, prompt_features
from skipdecode.models.plan import LayerPlan, StepPlan
from skipdecode.models.release import Arguments, Forward, cache_name
from skipdecode.schedule import Schedule

SharedKeys = dict[str, tuple[Tensor, ...]]
"""Keys and values that layers share, by the kind of layer."""


@dataclass(eq=False)
class GateState:
    """The plan of the current forward, shared by all gates of a model (None: every layer runs on all columns).

    `returned` is the family's `returns`. In a forward without a cache, `scratch` makes a cache for a layer that
    projects: it joins the keys and values of projected columns and of those that the layer runs. `unplanned` is called
    when a layer is called without a plan. `maps` are the fit's prompt maps of this schedule by layer, and `text` is the
    result of `text_columns`.
    """

    returned: int
    scratch: Callable[[], SkipCache]
    unplanned: Callable[[], None] = lambda: None
    lenders: Mapping[int, int] = field(default_factory=dict)  # `skipdecode.models.families.lenders`
    whole: bool = False  # whether a layer runs on columns that it would project, because its state needs them
    plan: StepPlan | None = None
    cache: SkipCache | None = None  # of the forward
    steps: bool = False  # whether recurrent layers take the forward's columns one by one
    bridges: dict[int, Bridge] = field(default_factory=dict)
    maps: dict[int, PromptMap] = field(default_factory=dict)
    context_tokens: int = 0
    text: tuple[Tensor, Tensor] | None = None

    def take_fit(self, fit: Fit | None, schedule: Schedule, layers: Sequence[nn.Module]) -> None:
        """Use the parts of a fit, which is for these layers, for a schedule."""
        if fit is None or schedule.is_full:
            self.bridges, self.maps = {}, {}
            return
        fit.to(next(layers[0].parameters()).device)
        self.context_tokens = fit.context_tokens
        self.bridges = fit.bridges_over(range(schedule.num_layers))
        self.maps = fit.prompt_maps(schedule.prompt_layers())

    def passed(self, index: int, hidden: Tensor) -> Tensor:
        """The states (batch, columns, hidden_size), after a layer, of tokens that skip the layer."""
        plan, bridge = self.plan.layers[index], self.bridges.get(index)  # type: ignore[union-attr]
        if bridge is None or plan.bridged >= hidden.shape[-2]:
            return hidden
        before, crossing = hidden[..., : plan.bridged, :], hidden[..., plan.bridged :, :]
        across = bridge(crossing)
        if plan.crosses is not None:
            across = torch.where(plan.crosses.to(crossing.device).unsqueeze(-1), across, crossing)
        return torch.cat((before, across), -2) if plan.bridged else across


class _Gated:
    """A mixin for a decoder layer's class; the number and the state of the layer are attributes of the object."""

    _skipdecode: tuple[int, GateState]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index, state = self._skipdecode
        run = super().__call__  # type: ignore[misc]
        if state.plan is None:
            state.unplanned()
            return run(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        plan = state.plan.layers[index]
        if (lender := state.lenders.get(index)) is not None and plan.count:
            kwargs["shared_kv_states"] = _first_keys(
                kwargs["shared_kv_states"], state.plan.layers[lender].count - plan.count
            )
        plan = plan.after(state.plan.columns - hidden.shape[-2])  # some models cut their upper layers' columns
        if plan.count == 0:
            passed = state.passed(index, hidden)
            return (passed, *[None] * (state.returned - 1)) if state.returned else passed
        columns = hidden.shape[-2]
        recurrent = state.cache is not None and state.cache.run_state(index, plan.count)
        steps = recurrent and state.steps and plan.count > 1
        if plan.start or steps:
            kind: Any = type(self)
            named = dict(zip(_positional_names(kind), args, strict=False)) | kwargs
            named.pop("hidden_states", None)
            merged = (self._run_steps if steps else self._run_late)(run, state, hidden, named)
            return (merged, *[None] * (state.returned - 1)) if state.returned else merged
        if plan.count < columns:
            args, kwargs = _leading(type(self), plan.count, columns, args, kwargs)
        out = run(*args, **(_of_one_token(kwargs) if recurrent and columns == 1 else kwargs))
        if plan.count == columns and plan.keep is None:
            return out
        passed = state.passed(index, hidden)
        if not state.returned:
            return _merge(out, passed, plan)
        return (_merge(out[0], passed, plan), *out[1:])

    def _run_steps(self, run: Forward, state: GateState, hidden: Tensor, named: Arguments) -> Tensor:
        """Run the columns one by one, for a layer that goes on from its state in no other way."""
        index, _ = self._skipdecode
        plan, cache, outputs = state.plan.layers[index], state.cache, []  # type: ignore[union-attr]
        for column in range(plan.count):
            step = _of_one_token(_columns(named, column, column + 1, hidden.shape[-2]))
            out = run(hidden[..., column : column + 1, :], **step)
            outputs.append(out[0] if state.returned else out)
            cache.note_columns(column + 1)  # type: ignore[union-attr]
        cache.note_columns(0)  # type: ignore[union-attr]
        return _merge(torch.cat(outputs, -2), state.passed(index, hidden), plan)

    def _run_late(self, run: Forward, state: GateState, hidden: Tensor, named: Arguments) -> Tensor:
        """Project the columns before the plan's start, then run the other columns, which attend to them."""
        index, _ = self._skipdecode
        plan, columns = state.plan.layers[index], hidden.shape[-2]  # type: ignore[union-attr]
        layer: Any = self
        kind: Any = type(self)
        passed = state.passed(index, hidden)
        if state.whole or (getattr(layer, "gradient_checkpointing", False) and layer.training):
            if index in state.maps:
                raise UnsupportedFeatureError(
                    "gradient checkpointing with fitted keys and values of prompts is not supported: turn it off, or "
                    "leave the fit out"
                )
            # A checkpointed layer takes no cache. It runs on all columns; the output of projected columns is dropped.
            out = run(hidden[..., : plan.count, :], **_columns(named, 0, plan.count, columns))
            out = out[0] if state.returned else out
            return _merge(out[..., plan.start :, :], passed, plan)
        name = cache_name(kind.forward)
        cache = named[name] = state.scratch() if named.get(name) is None else named[name]
        before = _columns(named, 0, plan.start, columns)
        fitted = _fitted_keys(state, index, hidden[..., : plan.count, :], cache)
        with _without_queries(layer), _replaced_keys(layer, fitted, slice(0, plan.start)):
            cache.project(lambda: run(hidden[..., : plan.start, :], **before), plan.start)
        try:
            if plan.start == plan.count:
                return passed
            running = _columns(named, plan.start, plan.count, columns)
            running["attention_mask"] = _fitting(running.get("attention_mask"), cache.tokens_held(index), plan, hidden)
            # In a ragged batch the columns that run include prompt tokens of longer rows.
            replaced = None if plan.keep is None else fitted
            with _replaced_keys(layer, replaced, slice(plan.start, plan.count), plan.keep):
                out = run(hidden[..., plan.start : plan.count, :], **running)
        finally:
            cache.note_columns(0)
        return _merge(out[0] if state.returned else out, passed, plan)


def ungate_layer(layer: nn.Module) -> None:
    """Restore the class of a gated layer."""
    base = type(layer).__dict__.get("_skipdecode_base")
    if base is not None:
        layer.__class__ = base
    del layer.__dict__["_skipdecode"]


def text_columns(mask: Tensor | None, columns: int) -> tuple[Tensor, Tensor] | None:
    """Tell of the last columns of a padding mask (batch, all columns) which are text, and which begin one (bool).

    None without such a mask: all columns are text, which begins in the first column of an empty cache.
    """
    if mask is None or mask.dim() != 2:
        return None
    text = mask[:, -columns:].bool()
    return text, text & (mask.cumsum(1) == 1)[:, -columns:]


def gate_layer(layer: nn.Module, index: int, state: GateState) -> None:
    """Gate a decoder layer, number `index` of its model."""
    layer.__dict__["_skipdecode"] = (index, state)
    base: Any = type(layer)  # for mypy, not hashable
    layer.__class__ = with_mixin(_Gated, base)


def gate_of(layer: nn.Module) -> GateState | None:
    """The state that a layer's gate obeys; None where the layer is plain."""
    state: tuple[int, GateState] | None = layer.__dict__.get("_skipdecode")
    return None if state is None else state[1]


@functools.cache
def with_mixin(mixin: type, base: type) -> Any:
    """A subclass of `base` with the same name, in which the methods of `mixin` come first."""
    # The name stays the same, because FSDP and device maps find decoder layers by it.
    body = {"_skipdecode_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
    mixed: Any = type(base.__name__, (mixin, base), body)
    # transformers wraps `forward` of every subclass for checkpointing. Two wrappers would checkpoint twice when the
    # backward pass comes after detach.
    if "forward" in mixed.__dict__:
        del mixed.forward
    return mixed


def _merge(out: Tensor, hidden: Tensor, plan: LayerPlan) -> Tensor:
    """The layer's output for the tokens that run it, and the input for all others."""
    if plan.keep is not None:
        out = torch.where(plan.keep.to(out.device).unsqueeze(-1), out, hidden[..., plan.start : plan.count, :])
    parts = [hidden[..., : plan.start, :], out, hidden[..., plan.count :, :]]
    return torch.cat([part for part in parts if part.shape[-2]], dim=-2)


@contextlib.contextmanager
def calling(module: nn.Module, forward: Forward) -> Iterator[None]:
    """A context in which calls of the module call `forward`."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _without_queries(layer: nn.Module) -> AbstractContextManager[None]:
    """A context in which a layer's query projection, if it is a separate module, returns zeros without computing."""
    query = projection(layer, "q_proj")
    if query is None:
        return contextlib.nullcontext()
    return calling(query, lambda x: x.new_zeros(*x.shape[:-1], query.out_features))


@contextlib.contextmanager
def _replaced_keys(
    layer: nn.Module, fitted: tuple[Tensor, Tensor] | None, columns: slice, keep: Tensor | None = None
) -> Iterator[None]:
    """A context in which key and value projections return the fitted values of these columns, except where `keep`."""
    if fitted is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, values in zip(("k_proj", "v_proj"), fitted, strict=True):
            module = projection(layer, name)
            project, fitted_values = module.forward, values[:, columns]

            def forward(x: Tensor, project: Forward = project, fitted_values: Tensor = fitted_values) -> Tensor:
                keys = fitted_values.to(x.dtype)
                return keys if keep is None else torch.where(keep.to(x.device).unsqueeze(-1), project(x), keys)

            stack.enter_context(calling(module, forward))
        yield


def _first_keys(shared: SharedKeys, skipped: int) -> SharedKeys:
    """Lent keys and values by kind of layer, without the last `skipped` columns, which the reading layer skips."""
    kinds = shared.items() if skipped else ()
    return {kind: tuple(x[..., : x.shape[-2] - skipped, :] for x in pair) for kind, pair in kinds} or shared


def _fitted_keys(state: GateState, index: int, hidden: Tensor, cache: SkipCache) -> tuple[Tensor, Tensor] | None:
    """Fitted keys and values for the states at a layer; None if the fit has no map for the layer."""
    prompt_map = state.maps.get(index)
    if prompt_map is None:
        return None
    columns, text = hidden.shape[-2], None
    if state.text is None:
        first = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        first[:, :1] = cache.length == 0
    else:
        text, first = (marks[:, :columns].to(hidden.device) for marks in state.text)
    context = cache.map_context.get(index)
    features, cache.map_context[index] = prompt_features(hidden, text, context, state.context_tokens)
    keys, values = prompt_map(features, first)
    return keys, values


@functools.cache
def _positional_names(layer_class: Any) -> tuple[str, ...]:
    parameters = inspect.signature(layer_class.forward).parameters.values()
    return "hidden_states", *[p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]


def _leading(
    layer_class: Any, count: int, columns: int, args: tuple[Any, ...], kwargs: Arguments
) -> tuple[tuple[Any, ...], Arguments]:
    """The arguments of a layer, cut to the first `count` of `columns` columns."""
    names = _positional_names(layer_class)
    short = tuple(_cut(n, v, 0, count, columns) for n, v in zip(names, args, strict=False))
    return short, _columns(kwargs, 0, count, columns)


def _columns(named: Arguments, start: int, count: int, columns: int) -> Arguments:
    """The arguments of a layer for the columns from `start` up to `count`, which attend to all earlier columns."""
    return {name: _cut(name, value, start, count, columns) for name, value in named.items()}


def _of_one_token(named: Arguments) -> Arguments:
    """The arguments of a recurrent layer for one token, without a mask of padding, which `check_states` has refused.

    Some layers would multiply the token by the mask of the whole text, and run it once for each column.
    """
    mask = named.get("attention_mask")
    return named | {"attention_mask": None} if isinstance(mask, Tensor) and mask.dim() == 2 else named


def _cut(name: str, value: Any, start: int, count: int, columns: int) -> Any:
    if value is None:
        return None
    skipped = columns - count
    match name:
        case "hidden_states" | "original_hidden_states" | "per_layer_input":
            return value[..., start:count, :]
        case "attention_mask" | "mamba_attention_mask" | "conv_mask" | "causal_mask":
            return _cut_mask(value, start, count, columns)
        case "position_ids":
            return value[..., start:count]
        case "position_embeddings":
            is_complex = isinstance(value, Tensor)  # of complex numbers
            return value[:, start:count] if is_complex else tuple(part[..., start:count, :] for part in value)
        case "attention_scaling":
            return value[..., start:count, :]
        case "cache_position":
            return value[start:count]
        case "alibi":
            return value[..., : value.shape[-1] - skipped]
    return value


def _cut_mask(mask: object, start: int, count: int, columns: int) -> Tensor:
    if not isinstance(mask, Tensor):
        raise UnsupportedFeatureError(
            f"attention masks of type {type(mask).__name__} cannot be cut to a layer's tokens: load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
    mask = mask[..., : mask.shape[-1] - (columns - count)]
    if mask.dim() == 4 and mask.shape[-2] == columns:
        mask = mask[..., start:count, :]
    return mask


def _fitting(mask: Tensor | None, held: int, plan: LayerPlan, hidden: Tensor) -> Tensor | None:
    """The mask for columns after `held` columns; a layer with a sliding window holds fewer keys than the mask covers.

    No mask means a causal mask that begins at the first key. If several columns follow others, this would be wrong, so
    the mask is written out.
    """
    queries = plan.count - plan.start
    if mask is not None:
        return mask[..., -(held + queries) :]
    if queries == 1:
        return None
    return torch.ones(queries, held + queries, dtype=torch.bool, device=hidden.device).tril(held)[None, None]
