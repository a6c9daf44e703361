"""Reads the sizes that a decoder's cost depends on from a transformers config, or from a parsed config.json.

Configs of different families name the same size differently, and leave out what their family fixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skipdecode.errors import ModelLoadError

__all__ = ["ConfigReader", "Experts", "attention_params", "experts", "kv_heads", "mlp_params", "windows"]

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
}
# Families whose MLP is up and down only (all others have a gate as well), and whether their linear layers have biases.
_PLAIN_MLP = {
    "arcee": False,
    "bloom": True,
    "codegen": False,
    "falcon": False,
    "gpt2": True,
    "gpt_bigcode": True,
    "gpt_neo": True,
    "gpt_neox": True,
    "gptj": False,
    "nemotron": False,
    "opt": True,
    "persimmon": True,
    "phi": True,
    "starcoder2": True,
}
# Families that have a key and a value head for every query head, whatever else their config says.
_NO_GROUPS = ("falcon", "gpt_neox", "persimmon")


class ConfigReader:
    """One way to read a config object and a plain dictionary."""

    def __init__(self, config: Any) -> None:
        inner = config.get("text_config") if isinstance(config, Mapping) else getattr(config, "text_config", None)
        self._config = config if inner is None else inner

    def first(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is there and not None."""
        for name in names:
            if isinstance(self._config, Mapping):
                value = self._config.get(name)
            else:
                value = getattr(self._config, name, None)
            if value is not None:
                return value
        return default

    def size(self, key: str) -> int:
        """One of the sizes that every config gives; raises ModelLoadError without it."""
        return self._whole(*_NAMES[key])

    def ffn_width(self, hidden: int) -> int:
        """Inner size of a dense MLP; where a config leaves it out, it is four times the hidden size."""
        return self._whole("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", default=4 * hidden)

    def _whole(self, *names: str, default: int | None = None) -> int:
        value = self.first(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(
                f"the model's config gives {value!r} for {' or '.join(names)}: a whole number of 1 or more is needed"
            )
        return value

    @property
    def model_type(self) -> str:
        """The family's name."""
        return str(self.first("model_type", default=""))


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts sizes, all zero for a dense model; `shared` is what every token reads of a sparse layer."""

    count: int = 0
    per_token: int = 0
    params: int = 0
    layers: int = 0
    shared: int = 0


def experts(read: ConfigReader, num_layers: int, hidden: int) -> Experts:
    """Mixture-of-experts sizes of a config."""
    count = read.first("num_local_experts", "num_experts", default=0)
    if not count:
        return Experts()
    step = read.first("decoder_sparse_step", default=1)
    dense = set(read.first("mlp_only_layers", default=()))
    shared = read.first("shared_expert_intermediate_size", default=0)
    router = hidden * count + (hidden if shared else 0)
    return Experts(
        count=count,
        per_token=read.first("num_experts_per_tok", default=1),
        params=mlp_params(read, hidden, read.first("moe_intermediate_size", "intermediate_size")),
        layers=sum(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        shared=router + mlp_params(read, hidden, shared),
    )


def kv_heads(read: ConfigReader, heads: int) -> int:
    """Key and value heads of a layer with `heads` query heads."""
    if read.first("new_decoder_architecture"):
        return int(read.first("num_kv_heads", default=heads))
    if read.first("multi_query"):
        return 1
    return heads if read.model_type in _NO_GROUPS else int(read.first("num_key_value_heads", default=heads))


def attention_params(read: ConfigReader, hidden: int, inner: int, kv_inner: int) -> int:
    """Weights of attention and of the layer's norms."""
    biased = _PLAIN_MLP.get(read.model_type, False)
    biases = inner + 2 * kv_inner + hidden if biased else 0
    norms = (4 if biased else 2) * hidden
    return hidden * (inner + 2 * kv_inner) + inner * hidden + biases + norms


def mlp_params(read: ConfigReader, hidden: int, width: int) -> int:
    """Weights of one MLP, or one expert, of inner size `width`."""
    biased = _PLAIN_MLP.get(read.model_type)
    if biased is None:
        return 3 * hidden * width
    return 2 * hidden * width + (hidden + width if biased else 0)


def windows(read: ConfigReader, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Window and layers of sliding-window attention, by the rules of transformers' caches."""
    window = read.first("sliding_window")
    if window is None or read.first("use_sliding_window", default=True) is False:
        return 0, ()
    types = read.first("layer_types")
    if types is None:
        return int(window), tuple(range(num_layers))
    windowed = tuple(i for i, kind in enumerate(types[:num_layers]) if kind == "sliding_attention")
    return (int(window), windowed) if windowed else (0, ())
