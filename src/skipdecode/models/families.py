"""The table of families: where a model type keeps its decoder layers. A new family is a new entry.

`docs/adding-a-family.md` says how to add and test an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from skipdecode.errors import AttachError, UnsupportedModelError
from skipdecode.models.release import before


@dataclass(frozen=True)
class Family:
    """The place of the decoder layers in a model type.

    Parameters
    ----------
    layers : str
        Attribute path from the causal LM to its list of decoder layers.
    returns_tuple : bool
        Whether a layer returns a tuple whose first element is the hidden states, instead of the hidden states.
    windows : {"none", "all", "types"}
        The layers that have the config's `sliding_window`, if it is set: none, all, or those of its `layer_types`.
    needs_window : bool
        With "types": whether the class needs a window even if no layer has one.
    renews_keys : bool
        Whether the class's `generate` computes the whole text anew where longrope changes to its long factors.
    """

    layers: str = "model.layers"
    returns_tuple: bool = False
    windows: Literal["none", "all", "types"] = "none"
    needs_window: bool = False
    renews_keys: bool = False


_BLOCKS = Family("transformer.h")
_TUPLE_BLOCKS = Family("transformer.h", returns_tuple=True)
_WINDOWED = Family(windows="all")
_MIXED = Family(windows="types", needs_window=True)
_GPTJ_BLOCKS = Family("transformer.h", returns_tuple=before("5.24"))

FAMILIES: dict[str, Family] = {
    "arcee": Family(),
    "bloom": _TUPLE_BLOCKS,
    "codegen": _GPTJ_BLOCKS,
    "cohere": Family(),
    "cohere2": _MIXED,
    "exaone4": Family(windows="types"),
    "falcon": _TUPLE_BLOCKS,
    "gemma": Family(),
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "glm": Family(),
    "glm4": Family(),
    "gpt2": _BLOCKS,
    "gpt_bigcode": _BLOCKS,
    "gpt_neo": _TUPLE_BLOCKS,
    "gpt_neox": Family("gpt_neox.layers"),
    "gptj": _GPTJ_BLOCKS,
    "granite": Family(),
    "helium": Family(),
    "llama": Family(),
    "ministral": _MIXED,
    "mistral": _WINDOWED,
    "mixtral": _WINDOWED,
    "nemotron": Family(),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": _MIXED,
    "opt": Family("model.decoder.layers"),
    "persimmon": Family(),
    "phi": Family(),
    "phi3": Family(windows="all", renews_keys=True),
    "qwen2": Family(windows="types"),
    "qwen2_moe": _MIXED,
    "qwen3": Family(windows="types"),
    "qwen3_moe": _WINDOWED,
    "seed_oss": Family(),
    "smollm3": Family(windows="types"),
    "stablelm": Family(),
    "starcoder2": _WINDOWED,
}


def unwrap(model: Any) -> Any:
    """The transformers causal LM: `model` itself, or the base model of a PEFT wrapper.

    Raises
    ------
    AttachError
        If the wrapper is prompt learning, which passes its virtual tokens as a cache of its own.
    """
    if not hasattr(model, "get_base_model"):
        return model
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise AttachError("PEFT prompt learning is not supported: its virtual tokens bring their own cache; use LoRA")
    return model.get_base_model()


def find_family(model: Any) -> Family:
    """The table's entry for a transformers causal LM.

    Raises
    ------
    UnsupportedModelError
        If `model` is not a transformers causal LM, or its type is not in the table; the message lists the table.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None or not hasattr(model, "generate"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers causal LM; {_works()}")
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
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported: only decoders whose every layer has attention with a KV "
            f"cache can skip layers, and each is tested before it is listed; {_works()}"
        )
    return FAMILIES[model_type]


def _works() -> str:
    return f"supported model types: {', '.join(sorted(FAMILIES))}"


def layers_in(config: Any) -> int:
    """The number of decoder layers of a model with this transformers config."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def vocabulary_size(model: Any) -> int:
    """Rows of a causal LM's token embedding: tokens have ids below this number."""
    return int(unwrap(model).get_input_embeddings().weight.shape[0])


def decoder_layers(model: Any) -> Any:
    """The list of decoder layers (a ModuleList, first to last) of a supported causal LM."""
    return attrgetter(find_family(model).layers)(model)


def projection(layer: Any, name: str) -> Any:
    """The module of a layer whose path ends in `name`, such as "q_proj"; None if there is none.

    There is none if one module computes queries, keys and values.
    """
    return next((module for path, module in layer.named_modules() if path.endswith(name)), None)


def keys_and_values(layer: Any) -> int | None:
    """Columns of a token's keys and values together in a layer; None if it makes them and queries in one product."""
    found = [projection(layer, name) for name in ("k_proj", "v_proj")]
    return None if None in found else sum(int(module.out_features) for module in found)
