"""`forward` and `generate` of an attached model: the replacements, and the options that they refuse by name.

Also rotary positions that depend on the length of the text: each row of a batch decides by its own length. With the
rope types "longrope" and "dynamic" transformers takes the frequencies of the longest row for the whole batch, and
dynamic ones also of an earlier, longer text. While a `RowRotary` is in place, a row gets the frequencies that it gets
alone.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from skipdecode.common.types import GenerationConfig, PreTrainedModel
from skipdecode.data.batches import Batch
from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.cache import SkipCache
from skipdecode.models.families import find_family, unwrap
from skipdecode.models.release import Arguments, Forward, before, model_cache_name, renamed_cache

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

    def __init__(self, model: PreTrainedModel, run: Forward) -> None:
        self._model = model
        self._run: Forward | None = run
        self._before = model.__dict__.get("forward")
        self._forward = model.forward
        self.__signature__ = inspect.signature(model.forward)
        model.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput:
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

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config
        parameters = inspect.signature(type(model).forward).parameters.values()
        self._names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        self.cache_name = model_cache_name(model)

    def named(self, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
        """All arguments by name, in a new dictionary, the KV cache under `cache_name`.

        Raises TypeError if there are too many arguments, or two caches.
        """
        if len(args) > len(self._names):
            raise TypeError(f"forward takes at most {len(self._names)} positional arguments, {len(args)} were given")
        return renamed_cache(dict(zip(self._names, args, strict=False)) | kwargs, self.cache_name)

    def tokens(self, call: Arguments) -> Tensor:
        """The input: ids (rows, columns), or embeddings (rows, columns, width)."""
        for name in ("input_ids", "inputs_embeds"):
            value = call.get(name)
            if isinstance(value, Tensor):
                return value
        raise UnsupportedFeatureError("a forward under a schedule needs input_ids or inputs_embeds")

    def columns(self, call: Arguments) -> int:
        """Number of columns (tokens of a row) of the input."""
        return int(self.tokens(call).shape[1])

    def wants_cache(self, call: Arguments) -> bool:
        """Whether the forward would create a cache."""
        use = call.get("use_cache")
        return bool(getattr(self._config, "use_cache", True) if use is None else use)

    def check(self, call: Arguments) -> None:
        """Refuse arguments that a forward with skipped layers does not support.

        Raises UnsupportedFeatureError: hidden states, attentions, router logits, packed rows, labels together with a
        cache.
        """
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            requested = call.get(name)
            if getattr(self._config, name, False) if requested is None else requested:
                raise UnsupportedFeatureError(f"{name} is not supported under a schedule: {_NO_STATES}")
        if any(call.get(name) is not None for name in _PACKED) or self._packed(call):
            raise UnsupportedFeatureError(
                "packed rows (several texts in one row) are not supported under a schedule: give each text a row"
            )
        if call.get("labels") is not None and (call.get(self.cache_name) is not None or call.get("use_cache")):
            raise UnsupportedFeatureError(
                f"labels with a KV cache are not supported under a schedule: leave out {self.cache_name} and use_cache"
            )

    def _packed(self, call: Arguments) -> bool:
        """Whether position ids start again in the middle of an unmasked row."""
        ids = call.get("position_ids")
        if not isinstance(ids, Tensor) or call.get("attention_mask") is not None or ids.shape[-1] < 2:
            return False
        return bool((ids.diff(dim=-1) < 0).any())


class GenerationOptions:
    """The options of one `generate` call from all sources.

    `arguments`: those of the call by name, the KV cache under the model's name. `config`: the config object of the
    call. `model`: its generation config has the options that the call leaves open.
    """

    def __init__(self, arguments: Arguments, config: GenerationConfig | None, model: PreTrainedModel) -> None:
        self._arguments = arguments
        self._sources = [config, model.generation_config]
        self._cache_name = model_cache_name(model)

    def value(self, name: str) -> Any:
        """The value of an option; None if it is not set."""
        values = [self._arguments.get(name), *(getattr(source, name, None) for source in self._sources)]
        return next((v for v in values if v is not None), None)

    def uses_cache(self) -> bool:
        """Whether keys and values are cached. Input embeddings are always cached, because they cannot be fed again."""
        return self.value("use_cache") is not False or self._arguments.get("inputs_embeds") is not None

    def prompt_columns(self, inputs: Tensor | None) -> int | None:
        """Number of prompt columns; None if the text starts from the model's own begin token."""
        for candidate in (self._arguments.get("inputs_embeds"), inputs, self._arguments.get("input_ids")):
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
        if kind is not None and self._arguments.get("cache_implementation") != "dynamic":
            return (
                f"cache_implementation={kind!r} is not supported: only a dynamic cache, which is what an attached "
                f"model uses, can leave skipped layers empty; {advice}"
            )
        past = self._arguments.get(self._cache_name)
        return None if past is None or isinstance(past, SkipCache) else foreign_cache(past)


def foreign_cache(past: object) -> str:
    """The error for a cache that is not a `SkipCache`."""
    return (
        f"a KV cache of type {type(past).__name__} is not supported: pass a cache that an attached model "
        "returned, or attachment.new_cache()"
    )


class RowRotary:
    """Replaces the forward of a model's rotary embedding until `restore`; without effect on other rope types."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._limit = switch_length(model)
        self._module = _rotary(model)
        self._kinds = _kinds(self._module)
        self.active = any("dynamic" in kind or kind == "longrope" for kind in self._kinds.values())
        if self.active:
            self._forward = self._module.forward
            self._module.__dict__["forward"] = self

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, ...]:
        """Cosines and sines, each (rows, columns, head_dim), of positions (rows, columns)."""
        named = {} if layer_type is None else {"layer_type": layer_type}
        parts = []
        for row in torch.split(position_ids, 1):
            self._start_anew(layer_type, x.device)
            parts.append(self._forward(x, row, **named))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def restore(self) -> None:
        """Give the rotary embedding its forward back."""
        if self.active and self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]
            for layer_type, kind in self._kinds.items():
                if "dynamic" in kind:
                    self._start_anew(layer_type, next(self._module.buffers()).device)

    def set_positions(self, call: Arguments, columns: int) -> None:
        """Set each token's position in its text, and 0 for padding, in the arguments of a forward."""
        mask = call.get("attention_mask")
        if not self.active or not isinstance(mask, Tensor) or mask.dim() != 2:
            return
        text = mask.bool().long()
        position_ids = call.get("position_ids")
        positions = (text.cumsum(1) - 1)[:, -columns:] if position_ids is None else position_ids
        call["position_ids"] = (positions * text[:, -columns:]).clamp(min=0)

    def check_growth(self, call: Arguments, past: int, columns: int) -> None:
        """Refuse a forward after `past` cached columns in which a text grows beyond the keys that the cache holds.

        Raises UnsupportedFeatureError: the keys of the earlier tokens were made for a text of at most `switch_length`
        tokens.
        """
        if self._limit is None:
            return
        positions, mask = call.get("position_ids"), call.get("attention_mask")
        if not past:
            # It gives the last token alone to the forward that makes all keys anew.
            if before("5.20") and positions is not None and bool((positions[:, 0] > 0).any()):
                raise UnsupportedFeatureError(
                    f"generate of transformers before 5.20 forgets a text that grows beyond {self._limit} tokens "
                    "(original_max_position_embeddings): install transformers 5.20, or give use_cache=False; "
                    "skipdecode.LLM takes such texts"
                )
            return
        after = torch.tensor([past + columns]) if positions is None else positions.amax(1) + 1
        earlier = after - (columns if mask is None else mask[:, -columns:].bool().sum(1))
        if bool(((earlier > 0) & (earlier <= self._limit) & (after > self._limit)).any()):
            raise UnsupportedFeatureError(
                f"a text grows beyond {self._limit} tokens (original_max_position_embeddings) on a cache whose keys "
                "were made for a shorter one: give use_cache=False, or rows of one length to generate; skipdecode.LLM "
                "takes any rows"
            )

    def _start_anew(self, layer_type: str | None, device: torch.device) -> None:
        """Forget the longest text that dynamic frequencies have seen."""
        if "dynamic" not in self._kinds[layer_type]:
            return
        module, prefix = self._module, "" if layer_type is None else f"{layer_type}_"
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        frequencies = getattr(module, f"{prefix}original_inv_freq").to(device)
        module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)


def switch_length(model: PreTrainedModel) -> int | None:
    """The number of tokens beyond which `generate` of this model makes all keys anew, with long factors; None: never.

    Other classes with "longrope" keep the keys that were made with short factors.
    """
    if not find_family(model).renews_keys or "longrope" not in _kinds(_rotary(model)).values():
        return None
    return int(model.config.original_max_position_embeddings)


def _rotary(model: PreTrainedModel) -> Any:
    path = find_family(model).layers.rpartition(".")[0]
    return getattr(attrgetter(path)(model), "rotary_emb", None)


def _kinds(rotary: object) -> dict[str | None, str]:
    """The rope types of a rotary embedding by layer type; the key is None if all layers rotate alike."""
    kind = getattr(rotary, "rope_type", "default")
    return dict(kind) if isinstance(kind, dict) else {None: kind}


def response_logits(model: PreTrainedModel, batch: Batch, *, attached: bool = True) -> Tensor:
    """Logits that predict the response columns, (rows, response columns, vocabulary).

    With `attached` the teacher-forced parallel form under the model's schedule. The last prompt token predicts response
    token 0; the last response token is not fed, for nothing follows it. Where the model can, the head runs on these
    columns only.
    """
    columns = batch.targets.shape[1]
    accepted = _forward_parameters(model)
    extra: Arguments = {"prompt_length": batch.prompt_length} if attached else {}
    if "position_ids" in accepted:
        extra["position_ids"] = batch.position_ids[:, :-1]
    if "logits_to_keep" in accepted:
        # Indices, because a slice would not be contiguous, and a head without gradients is then five times as slow.
        length = batch.input_ids.shape[1] - 1
        extra["logits_to_keep"] = torch.arange(length - columns, length, device=batch.input_ids.device)
    mask = batch.attention_mask[:, :-1]
    out = model(input_ids=batch.input_ids[:, :-1], attention_mask=mask, use_cache=False, **extra)
    logits: Tensor = out.logits
    return logits if logits.shape[1] == columns else logits[:, -columns:]  # a slice's gradient is a copy


def _forward_parameters(model: PreTrainedModel) -> frozenset[str]:
    while hasattr(model, "module"):
        model = model.module
    return frozenset(inspect.signature(type(unwrap(model)).forward).parameters)
