"""The table of families: where a model type keeps its decoder layers, and the sliding window of each layer.

A new family is a new entry; `docs/adding-a-family.md` says how to add and test it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from skipdecode.common.types import PeftConfig, PeftModel, PretrainedConfig, PreTrainedModel
from skipdecode.errors import AttachError, ScheduleError, UnsupportedModelError
from skipdecode.models.release import before
from skipdecode.schedule import Schedule
from skipdecode.schedule.order import lent_order

if TYPE_CHECKING:
    from torch.nn import Module, ModuleList

# Types of PEFT adapters, and entries of the configs of other types, with which an adapter is no change of weights.
_NOT_OF_WEIGHTS = ("ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "XLORA")
_BEYOND_WEIGHTS = ("layer_replication", "alora_invocation_tokens", "arrow_config", "sample_at_inference")


@dataclass(frozen=True)
class Family:
    """Facts on a model type; `tests/models/test_oracle.py` tests each entry on a real model."""

    layers: str = "model.layers"  # attribute path from the causal LM to its list of decoder layers
    # Elements of the tuple that a layer returns, the first of which is the hidden states; 0: the hidden states alone.
    returns: int = 0
    # The layers that have the config's `sliding_window`, if it is set: none, all, or those of its `layer_types`.
    # "cache": each layer has the cache that transformers makes of the config, which may hold recurrent states.
    windows: Literal["none", "all", "types", "cache"] = "none"
    needs_window: bool = False  # with "types": whether the class needs a window even if no layer has one
    # Whether the class's `generate` computes the whole text anew where longrope changes to its long factors.
    renews_keys: bool = False
    # Whether a layer depends on its number in a way that no config can express, so that others cannot be left out.
    numbered: bool = False
    # Whether layers have a recurrent state (state spaces, linear attention, convolutions) in the cache. A forward of
    # several tokens leaves padding out of it, and a forward of one token does not.
    recurrent: bool = False
    # Whether a forward of several tokens goes on from the cached states; else only one of a single token does.
    continues: bool = True
    # Whether a forward without position ids counts from the length of the cache; else it counts from 0.
    counts_positions: bool = True
    # Whether `generate` goes on from a used cache; else it reads the whole text again, on top of the states.
    resumes_cache: bool = True


_BLOCKS = "transformer.h"
_MIXED = Family(windows="types", needs_window=True)
_STATES = Family(windows="cache", recurrent=True)

_ROWS: list[tuple[Family, str]] = [
    (
        Family(),
        "apertus arcee aria_text axk1 bitnet cohere deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe flex_olmo "
        "gemma glm glm4 glm4_moe glm4_moe_lite granite granitemoe granitemoeshared helium hunyuan_v1_dense "
        "hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe llama minicpm3 minimax_m2 "
        "nanochat nemotron olmo olmo2 olmoe persimmon phi seed_oss solar_open stablelm xglm youtu",
    ),
    (Family(windows="cache"), "llama4_text"),
    (Family(windows="types"), "dots1 exaone4 exaone_moe qwen2 qwen3 smollm3"),
    (Family(windows="all"), "doge ministral3 mistral mixtral phimoe qwen3_moe starcoder2"),
    (
        _MIXED,
        "afmoe cohere2 cohere2_moe cwm flint gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text "
        "gpt_oss granite_swa granitemoe_swa kolibri1 laguna mellum mimo_v2_flash ministral modernbert-decoder olmo3 "
        "qwen2_moe vaultgemma",
    ),
    (Family(numbered=True), "diffllama"),
    (replace(_MIXED, numbered=True), "beam"),
    (Family(windows="all", renews_keys=True), "phi3"),
    (Family(_BLOCKS), "ctrl gpt2 gpt_bigcode"),
    (Family(_BLOCKS, returns=1), "bloom falcon gpt_neo"),
    (Family(_BLOCKS, returns=int(before("5.24"))), "codegen gptj"),
    (Family("transformer.blocks"), "dbrx"),
    (Family("transformer.blocks", returns=1), "mpt"),
    (Family("biogpt.layers"), "biogpt"),
    (Family("gpt_neox.layers"), "gpt_neox"),
    (Family("gpt_neox_japanese.layers", returns=1), "gpt_neox_japanese"),
    (Family("model.decoder.layers"), "opt"),
    (
        _STATES,
        "bailing_hybrid granitemoehybrid inkling_text kimi_linear lfm2 lfm2_moe lfm3 nemotron_h olmo_hybrid "
        "qwen3_5_moe_text qwen3_5_text qwen3_next",
    ),
    (replace(_STATES, numbered=True), "zamba2"),
    (replace(_STATES, returns=1), "falcon_h1"),
    (replace(_STATES, returns=2, counts_positions=False), "bamba"),
    (replace(_STATES, continues=False), "jamba"),
    (replace(_STATES, continues=False, numbered=True), "zamba"),
    (_ALONE := replace(_STATES, layers="backbone.layers", resumes_cache=False), "mamba2"),
    (replace(_ALONE, continues=False), "falcon_mamba mamba"),
]
FAMILIES = {model_type: family for family, types in _ROWS for model_type in types.split()}
_REFUSED = {
    "minimax": "its class of caches moves and resets only a half of its states",
    "recurrent_gemma": "its states lie on its modules, not in a cache, and take in left padding",
    "rwkv": "each cached step mixes the rows of its batch",
    "xlstm": "its states take in left padding, and generate takes no cache for it",
    "zaya": "its layers hand on a second state, that of the router",
    "longcat_flash": "each of its layers has two caches",
    "hrm_text": "its depth is not one list of layers",
    "openai-gpt": "it has no KV cache",
}


def unwrap(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers causal LM: `model` itself, or the base model of a PEFT wrapper.

    Raises AttachError if the adapter is not one of weights (`check_adapter`).
    """
    if not hasattr(model, "get_base_model"):
        return model
    check_adapter(model.active_peft_config)
    return model.get_base_model()


def check_adapter(config: PeftConfig) -> None:
    """Refuse an adapter, by its PEFT config, that is not a fixed change of the base model's own weights.

    Virtual tokens bring their own cache, and routers, repeated layers and samples are not in any weight of the model.

    Raises AttachError.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    entry = next((name for name in _BEYOND_WEIGHTS if getattr(config, name, None)), None)
    if entry is not None or kind in _NOT_OF_WEIGHTS or config.is_prompt_learning:
        raise AttachError(
            f"a PEFT adapter of type {kind}{f' with {entry}' if entry else ''} is not supported: a fixed change of the "
            "model's own weights is needed, such as LoRA, not prompt learning, routing, sampling or more layers"
        )


def find_family(model: PreTrainedModel) -> Family:
    """The table's entry for a transformers causal LM.

    Raises UnsupportedModelError if `model` is not a transformers causal LM, or its type is not in the table; the
    message lists the table.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None or not hasattr(model, "generate"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers causal LM; {_supported()}")
    family = family_of(model_type)
    try:
        layers = attrgetter(family.layers)(model)
        head = model.get_output_embeddings()
    except AttributeError:
        layers = head = None
    if layers is None or head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not the causal LM of model type {model_type!r}: load it with "
            "AutoModelForCausalLM"
        )
    return family


def family_of(model_type: str) -> Family:
    """The table's entry for a model type; raises UnsupportedModelError as `find_family`."""
    if model_type not in FAMILIES:
        reason = _REFUSED.get(model_type, "a type is listed when its decoding has passed the tests under schedules")
        raise UnsupportedModelError(f"model type {model_type!r} is not supported: {reason}; {_supported()}")
    return FAMILIES[model_type]


def check_schedule(config: PretrainedConfig, schedule: Schedule) -> None:
    """Raise ScheduleError if a model with this transformers config cannot run the schedule; errors as `family_of`."""
    family_of(config.get_text_config(decoder=True).model_type)
    schedule.check_fits(layers_in(config))
    shared = lenders(config)
    if schedule.projected and not projects(config):
        reason = "read other layers' keys and values" if shared else "have recurrent states"
        raise ScheduleError(
            f"prompts of a {config.model_type} model cannot run layers of their own, because its layers {reason} and "
            "need each token of a prompt: give prompts full or max_exit"
        )
    sets = [schedule.prompt_layers(), *map(schedule.layers, range(schedule.seq_len))]
    missing = [(reader, lender) for reader, lender in shared.items() for s in sets if reader in s and lender not in s]
    if missing:
        raise ScheduleError(
            f"layer {missing[0][0]} reads the keys and values of layer {missing[0][1]}, which schedule "
            f"{schedule.name!r} skips where layer {missing[0][0]} runs: drop layers that lend theirs after all that "
            "read them"
        )


def projects(config: PretrainedConfig) -> bool:
    """Whether prompts of a model with this transformers config may run layers of their own."""
    return not (lenders(config) or family_of(config.get_text_config(decoder=True).model_type).recurrent)


def lenders(config: PretrainedConfig) -> dict[int, int]:
    """Map each layer that shares keys and values to the layer that computes them, by a transformers config."""
    config = config.get_text_config(decoder=True)
    kinds: Any = getattr(config, "layer_types", None)
    count = getattr(config, "num_kv_shared_layers", None) or 0
    first = layers_in(config) - count
    if without := {*kinds[first:]} - {*kinds[:first]} if count else ():
        raise UnsupportedModelError(
            f"the config of this {config.model_type} model: no layer makes the keys and values that "
            f"{', '.join(without)} layers among the last {count} read: layer_types and num_kv_shared_layers have to fit"
        )
    return {layer: max(n for n in range(first) if kinds[n] == kinds[layer]) for layer in range(first, first + count)}


def lent_last(config: PretrainedConfig, schedule: Schedule) -> Schedule:
    """A schedule of the same budgets that drops layers that lend keys and values after those that read them.

    Layers whose reader never goes stay too, so the fewest layers may be out of reach: ScheduleError.
    """
    shared = lenders(config)
    return replace(schedule, drop_order=lent_order(schedule.drop_order, shared)) if shared else schedule


def _supported() -> str:
    return f"supported model types: {', '.join(sorted(FAMILIES))}"


def layers_in(config: PretrainedConfig) -> int:
    """The number of decoder layers of a model with this transformers config."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def decoder_layers(model: PreTrainedModel) -> ModuleList:
    """The list of decoder layers (a ModuleList, first to last) of a supported causal LM."""
    layers: ModuleList = attrgetter(find_family(model).layers)(model)
    return layers


def projection(layer: Module, name: str) -> Any:
    """The module of a layer whose path ends in `name`, such as "q_proj"; None if there is none.

    There is none if one module computes queries, keys and values.
    """
    return next((module for path, module in layer.named_modules() if path.endswith(name)), None)


def keys_and_values(layer: Module) -> int | None:
    """Columns of a token's keys and values together in a layer; None if it makes them and queries in one product."""
    projections = [projection(layer, name) for name in ("k_proj", "v_proj")]
    return None if None in projections else sum(int(module.out_features) for module in projections)


_SLIDING = "sliding_attention"
_KNOWN = (_SLIDING, "full_attention")
# Settings from which transformers' caches learn what a layer holds.
_SETTINGS = ("sliding_window", "layer_types", "attention_chunk_size", "kv_sharing_modes")


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Number of latest tokens that a token attends to in each layer of a causal LM, itself included; None: all.

    Raises UnsupportedModelError: a layer has a window below 1 or a type that the family does not compute, or there is
    no window where the model's class needs one.
    """
    family, layers = family_of(config.model_type), layers_in(config)
    if family.windows == "none":
        return [None] * layers
    if family.windows == "cache":
        from transformers import DynamicCache  # brings torch, which refusals of the command line do without

        layer_caches = DynamicCache(config=config).layers
        windows = [int(c.sliding_window) if getattr(c, "is_sliding", False) else None for c in layer_caches]
        if any(window is not None and window < 2 for window in windows):  # the cache keeps all tokens for 1
            raise _refused(config, f"sliding_window is {config.sliding_window}", "2 or more tokens are accepted")
        return windows
    window = _window(config)
    types = getattr(config, "layer_types", None) if family.windows == "types" else None
    slides = [True] * layers if types is None else [kind == _SLIDING for kind in types]
    if unknown := sorted({kind for kind in types or () if kind not in _KNOWN}):
        raise _refused(config, f"layer_types names {', '.join(unknown)}", f"accepted are {' and '.join(_KNOWN)}")
    setting = f"sliding_window is {'null' if window is None else window}"
    if getattr(config, "use_sliding_window", True) is False:
        setting += ", because use_sliding_window is false"
    if types is not None and window is None and (any(slides) or family.needs_window):
        raise _refused(config, setting, "its class needs a number of tokens, 1 or more")
    if window is not None and window < 1 and any(slides):
        raise _refused(config, setting, "layers that slide need 1 or more tokens")
    return [window if slide else None for slide in slides]


def drop_unread(config: PretrainedConfig) -> None:
    """Remove from a config what names windows and types of layers and is not read by the class of the model.

    With these entries other readers, such as the caches of transformers, would compute another model.
    """
    windows = family_of(config.model_type).windows
    names = {"none": _SETTINGS, "all": _SETTINGS[1:], "types": _SETTINGS[2:], "cache": ()}[windows]
    for name in names:
        vars(config).pop(name, None)


def _window(config: PretrainedConfig) -> int | None:
    try:
        window: int | None = config.sliding_window
    except (AttributeError, RuntimeError) as e:  # of transformers, if each layer has a value
        raise _refused(config, "sliding_window has no value for all layers", "give all layers one window") from e
    return window


def _refused(config: PretrainedConfig, what: str, accepted: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the config of this {config.model_type} model: {what}; {accepted}")
