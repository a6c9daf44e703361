"""A causal LM's forward while attached: what is called in its place, and its arguments by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError

__all__ = ["CallArguments", "ForwardSlot"]

_NO_STATES = "skipped layers have nothing to report; leave it out, or use attachment.paused()"
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class ForwardSlot:
    """Stands as `forward` on one model object, so that `model(...)` and `model.forward(...)` go the same way.

    Its signature is that of the forward it stands for: trainers read it to choose columns. An object, not a closure, so
    that a deep copy of the model calls the copy.
    """

    def __init__(self, model: Any, run: Callable[..., Any]) -> None:
        self._model = model
        self._run: Callable[..., Any] | None = run
        self._before = model.__dict__.get("forward")
        self._forward = model.forward
        self.__signature__ = inspect.signature(model.forward)
        model.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            return self._forward(*args, **kwargs)
        return self._run(self._forward, args, kwargs)

    def restore(self) -> None:
        """Put the model's own forward back; where another tool has wrapped this one since, only stand aside."""
        self._run = None
        if self._model.__dict__.get("forward") is self:
            del self._model.__dict__["forward"]
            if self._before is not None:
                self._model.__dict__["forward"] = self._before


class CallArguments:
    """Reads the arguments of one model's forward."""

    def __init__(self, model: Any) -> None:
        self._config = model.config
        parameters = inspect.signature(type(model).forward).parameters.values()
        self._names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, in a new dictionary; raises TypeError if there are too many."""
        if len(args) > len(self._names):
            raise TypeError(f"forward takes at most {len(self._names)} positional arguments, {len(args)} were given")
        return dict(zip(self._names, args, strict=False)) | kwargs

    def batch(self, call: dict[str, Any]) -> tuple[int, torch.device]:
        """Rows of the input, and where it lies."""
        tokens = self._tokens(call)
        return int(tokens.shape[0]), tokens.device

    def columns(self, call: dict[str, Any]) -> int:
        """Columns (tokens of a row) of the input."""
        return int(self._tokens(call).shape[1])

    def wants_cache(self, call: dict[str, Any]) -> bool:
        """Whether the forward would make a cache."""
        use = call.get("use_cache")
        return bool(getattr(self._config, "use_cache", True) if use is None else use)

    def check(self, call: dict[str, Any]) -> None:
        """Refuse, by name, what a forward that skips layers cannot give.

        Raises
        ------
        UnsupportedFeatureError
            Hidden states, attentions, router logits, packed rows, labels together with a cache.
        """
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            asked = call.get(name)
            if getattr(self._config, name, False) if asked is None else asked:
                raise UnsupportedFeatureError(f"{name} is not supported under a schedule: {_NO_STATES}")
        if any(call.get(name) is not None for name in _PACKED) or self._packed(call):
            raise UnsupportedFeatureError(
                "packed rows (several texts in one row) are not supported under a schedule: give each text a row"
            )
        if call.get("labels") is not None and (call.get("past_key_values") is not None or call.get("use_cache")):
            raise UnsupportedFeatureError(
                "labels with a KV cache are not supported under a schedule: leave out past_key_values and use_cache"
            )

    def _packed(self, call: dict[str, Any]) -> bool:
        """Whether position ids start again in the middle of an unmasked row."""
        ids = call.get("position_ids")
        if not isinstance(ids, Tensor) or call.get("attention_mask") is not None or ids.shape[-1] < 2:
            return False
        return bool((ids.diff(dim=-1) < 0).any())

    def _tokens(self, call: dict[str, Any]) -> Tensor:
        for name in ("input_ids", "inputs_embeds"):
            value = call.get(name)
            if isinstance(value, Tensor):
                return value
        raise UnsupportedFeatureError("a forward under a schedule needs input_ids or inputs_embeds")
