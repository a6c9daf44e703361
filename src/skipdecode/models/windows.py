"""Sliding windows: the window with which the class of a model computes the attention of each layer.

A config may name windows and layer types that its class does not read. transformers' caches follow the config, so
cached decoding would see other tokens than the class does without a cache.
"""

from __future__ import annotations

from typing import Any

from skipdecode.errors import UnsupportedModelError
from skipdecode.models.families import family_of, layers_in

_SLIDING = "sliding_attention"
_KNOWN = (_SLIDING, "full_attention")
# Settings from which transformers' caches learn what a layer holds.
_SETTINGS = ("sliding_window", "layer_types", "attention_chunk_size", "kv_sharing_modes")


def layer_windows(config: Any) -> list[int | None]:
    """For each layer of a causal LM the number of latest tokens that a token attends to, itself included; None: all.

    Raises UnsupportedModelError: a layer has a window below 1 or a type that the family does not compute, or there is
    no window where the model's class needs one.
    """
    family, layers = family_of(config.model_type), layers_in(config)
    if family.windows == "none":
        return [None] * layers
    if family.windows == "cache":
        from transformers import DynamicCache  # brings torch, which refusals of the command line do without

        made = DynamicCache(config=config).layers
        windows = [int(one.sliding_window) if getattr(one, "is_sliding", False) else None for one in made]
        if any(window is not None and window < 2 for window in windows):  # the cache keeps all tokens for 1
            raise _refused(config, f"sliding_window is {config.sliding_window}", "2 or more tokens are accepted")
        return windows
    window = _window(config)
    types = getattr(config, "layer_types", None) if family.windows == "types" else None
    slides = [True] * layers if types is None else [kind == _SLIDING for kind in types]
    if unknown := sorted({kind for kind in types or () if kind not in _KNOWN}):
        raise _refused(config, f"layer_types names {', '.join(unknown)}", f"accepted are {' and '.join(_KNOWN)}")
    told = f"sliding_window is {'null' if window is None else window}"
    if getattr(config, "use_sliding_window", True) is False:
        told += ", because use_sliding_window is false"
    if types is not None and window is None and (any(slides) or family.needs_window):
        raise _refused(config, told, "its class needs a number of tokens, 1 or more")
    if window is not None and window < 1 and any(slides):
        raise _refused(config, told, "layers that slide need 1 or more tokens")
    return [window if slide else None for slide in slides]


def drop_unread(config: Any) -> None:
    """Remove from a config what names windows and types of layers and is not read by the class of the model.

    With these entries other readers, such as the caches of transformers, would compute another model.
    """
    windows = family_of(config.model_type).windows
    names = {"none": _SETTINGS, "all": _SETTINGS[1:], "types": _SETTINGS[2:], "cache": ()}[windows]
    for name in names:
        vars(config).pop(name, None)


def _window(config: Any) -> int | None:
    try:
        window: int | None = config.sliding_window
    except (AttributeError, RuntimeError) as e:  # of transformers, if each layer has a value
        raise _refused(config, "sliding_window has no value for all layers", "give all layers one window") from e
    return window


def _refused(config: Any, what: str, accepted: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the config of this {config.model_type} model: {what}; {accepted}")
