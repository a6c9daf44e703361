"""`forward` and `generate` of an attached model: the replacements, and the options that they refuse by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.cache import SkipCache
from skipdecode.models.release import model_cache_name, renamed_cache

ALL_PROMPT = (
    "this forward runs full depth, because all tokens are prompt: give prompt_length=… or labels so that a response "
    "runs the schedule, or use_cache=True to begin a decoding loop (said once)"
)
PART_ALONE = (
    "layers of this model were called by themselves, not through its forward or generate, and run full depth: call the "
    "causal language model itself, or use attachment.paused() (said once)"
)
SECOND_TURN = (
    "a second turn on a used cache runs the schedule's last set of layers, and its prompt would run other layers in a "
    "fresh cache: leave the cache out if the text of a fresh run is needed (said once)"
)

_NO_STATES = "skipped layers have nothing to report; leave it out, or use attachment.paused()"
_ROLLBACK = "it rolls the cache back, and skipped layers have nothing to roll back to"
_REFUSED_IF_SET = {
    "assistant_model": f"assisted generation is not supported: {_ROLLBACK}",
    "prompt_lookup_num_tokens": f"prompt lookup is not supported: {_ROLLBACK}",
    "assistant_early_exit": f"self-speculation is not supported: {_ROLLBACK}",
    "exact": "drafts are not supported here: LLM(model).generate(prompts) has them",
    "use_mtp": f"multi-token prediction is not supported: {_ROLLBACK}",
    "custom_generate": "custom decoding loops are not supported: their use of the cache is unknown",
    "penalty_alpha": "contrastive search is not supported: it copies and rolls back the cache",
    "dola_layers": "DoLa is not supported: it reads layers that may have been skipped",
    "negative_prompt_ids": "classifier-free guidance is not supported: it keeps a second cache of its own",
    "output_hidden_states": "it is not supported: skipped layers have no states to report",
    "output_attentions": "it is not supported: skipped layers have no attentions to report",
}
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class ForwardSlot:
    """Replaces `forward` on one model object, for both `model(...)` and `model.forward(...)`.

    The signature is that of the replaced forward, because trainers read it to choose columns. The replacement is an
    object and not a closure, so that a deep copy of the model calls the copy.
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
        """Restore the model's own forward; if another tool has wrapped this one since, only pass calls through."""
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
        self.cache_name = model_cache_name(model)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, in a new dictionary, the KV cache under `cache_name`.

        Raises TypeError if there are too many arguments, or two caches.
        """
        if len(args) > len(self._names):
            raise TypeError(f"forward takes at most {len(self._names)} positional arguments, {len(args)} were given")
        return renamed_cache(dict(zip(self._names, args, strict=False)) | kwargs, self.cache_name)

    def batch(self, call: dict[str, Any]) -> tuple[int, torch.device]:
        """Number of rows of the input, and its device."""
        tokens = self._tokens(call)
        return int(tokens.shape[0]), tokens.device

    def columns(self, call: dict[str, Any]) -> int:
        """Number of columns (tokens of a row) of the input."""
        return int(self._tokens(call).shape[1])

    def wants_cache(self, call: dict[str, Any]) -> bool:
        """Whether the forward would create a cache."""
        use = call.get("use_cache")
        return bool(getattr(self._config, "use_cache", True) if use is None else use)

    def check(self, call: dict[str, Any]) -> None:
        """Refuse arguments that a forward with skipped layers does not support.

        Raises UnsupportedFeatureError: hidden states, attentions, router logits, packed rows, labels together with a
        cache.
        """
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            asked = call.get(name)
            if getattr(self._config, name, False) if asked is None else asked:
                raise UnsupportedFeatureError(f"{name} is not supported under a schedule: {_NO_STATES}")
        if any(call.get(name) is not None for name in _PACKED) or self._packed(call):
            raise UnsupportedFeatureError(
                "packed rows (several texts in one row) are not supported under a schedule: give each text a row"
            )
        if call.get("labels") is not None and (call.get(self.cache_name) is not None or call.get("use_cache")):
            raise UnsupportedFeatureError(
                f"labels with a KV cache are not supported under a schedule: leave out {self.cache_name} and use_cache"
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


class GenerationOptions:
    """The options of one `generate` call from all sources.

    `given`: keyword arguments of the call, the KV cache under the model's name. `config`: the config object of the
    call. `model`: its generation config has the options that the call leaves open.
    """

    def __init__(self, given: dict[str, Any], config: Any, model: Any) -> None:
        self._given = given
        self._sources = [config, model.generation_config]
        self._cache_name = model_cache_name(model)

    def value(self, name: str) -> Any:
        """The value of an option; None if it is not set."""
        values = [self._given.get(name), *(getattr(source, name, None) for source in self._sources)]
        return next((v for v in values if v is not None), None)

    def uses_cache(self) -> bool:
        """Whether keys and values are cached. Input embeddings are always cached, because they cannot be fed again."""
        return self.value("use_cache") is not False or self._given.get("inputs_embeds") is not None

    def prompt_columns(self, inputs: Any) -> int | None:
        """Number of prompt columns; None if the text starts from the model's own begin token."""
        for candidate in (self._given.get("inputs_embeds"), inputs, self._given.get("input_ids")):
            if isinstance(candidate, Tensor):
                return int(candidate.shape[1])
        return None

    def refusal(self) -> str | None:
        """The option that prevents the call from running under a schedule, and the reason; None if there is none."""
        advice = "leave it out, or detach first"
        for name, reason in _REFUSED_IF_SET.items():
            value = self.value(name)
            if value is not None and value is not False:
                return f"{name}: {reason}; {advice}"
        if self.value("guidance_scale") not in (None, 1, 1.0):
            return f"guidance_scale: {_REFUSED_IF_SET['negative_prompt_ids']}; {advice}"
        kind = self.value("cache_implementation")
        if kind is not None and self._given.get("cache_implementation") != "dynamic":
            return (
                f"cache_implementation={kind!r} is not supported: only a dynamic cache, which is what an attached "
                f"model uses, can leave skipped layers empty; {advice}"
            )
        past = self._given.get(self._cache_name)
        return None if past is None or isinstance(past, SkipCache) else foreign_cache(past)


def foreign_cache(past: Any) -> str:
    """The error for a cache that is not a `SkipCache`."""
    return (
        f"a KV cache of type {type(past).__name__} is not supported: pass a cache that an attached model "
        "returned, or attachment.new_cache()"
    )
