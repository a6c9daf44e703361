"""The sizes of a decoder that set its decoding speed: bytes and FLOPs of a layer, of what is no layer, of the KV cache.

Pure Python, from a config alone: no weights are needed. Counts weights that a decode step reads, so the input
embedding, of which a step reads one row a token, counts only as its rows. Configs of different families name the same
size differently, and leave out what their family fixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skipdecode.errors import ModelLoadError
from skipdecode.schedule import Schedule

__all__ = ["ConfigReader", "ModelGeometry"]

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
}
# Families whose MLP is up and down only (all others have a gate as well), whose linear layers have biases or not.
_PLAIN_BIASED = ("bloom", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "opt", "persimmon", "phi", "starcoder2")
_PLAIN_UNBIASED = ("arcee", "codegen", "falcon", "gptj", "nemotron")
# Families that have a key and a value head for every query head, whatever else their config says.
_NO_GROUPS = ("falcon", "gpt_neox", "persimmon")


@dataclass(frozen=True)
class ModelGeometry:
    """Sizes of a decoder-only model.

    Parameters
    ----------
    num_layers, hidden_size, vocab_size, num_heads, num_kv_heads, head_dim : int
        As in the model's config.
    dtype_bytes : float
        Bytes of one weight, and of one cached key or value element.
    tied_head : bool
        Whether the head shares the input embedding's matrix. It changes what the model holds, not what a step reads.
    layer_params : float
        Weights of a layer that every token reads: attention, norms, dense MLP or shared expert and router; the mean
        over the layers where they differ.
    head_params : int
        Weights of the head, the final norm and the projections around it.
    embedding_params : int
        Weights of the token embedding.
    expert_params, num_experts, experts_per_token, expert_layers : int
        Weights of one expert, experts of a mixture-of-experts layer, how many a token takes, layers that have them.
    window : int
        Tokens that sliding-window attention sees; 0 without any.
    windowed : tuple of int
        Layers with sliding-window attention.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: float
    tied_head: bool
    layer_params: float
    head_params: int
    embedding_params: int
    expert_params: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0
    window: int = 0
    windowed: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Any, dtype_bytes: float = 2) -> ModelGeometry:
        """Sizes from a transformers config, or a dictionary with the same keys (a parsed config.json).

        Of a multimodal config the `text_config` is read. Raises ModelLoadError, which names it, if a size is missing.
        """
        read = ConfigReader(config)
        hidden, heads, num_layers, vocabulary = map(read.size, ("hidden_size", "num_heads", "num_layers", "vocab_size"))
        head_dim = read.first("head_dim") or hidden // heads
        groups = _kv_heads(read, heads)
        width = read.first("word_embed_proj_dim") or hidden
        embedding = vocabulary * width + (hidden * width if width != hidden else 0)
        sparse = _experts(read, num_layers, hidden)
        dense = _mlp_params(read, hidden, read.ffn_width(hidden))
        mlp = (sparse.layers * sparse.shared + (num_layers - sparse.layers) * dense) / num_layers
        window, windowed = _windows(read, num_layers)
        return cls(
            num_layers=num_layers,
            hidden_size=hidden,
            vocab_size=vocabulary,
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=head_dim,
            dtype_bytes=dtype_bytes,
            tied_head=bool(read.first("tie_word_embeddings", default=True)),
            layer_params=_attention_params(read, hidden, heads * head_dim, groups * head_dim) + mlp,
            head_params=embedding + hidden,
            embedding_params=embedding,
            expert_params=sparse.params,
            num_experts=sparse.count,
            experts_per_token=sparse.per_token,
            expert_layers=sparse.layers,
            window=window,
            windowed=windowed,
        )

    # ------------------------------------------------------------------ one step

    def layer_bytes(self, batch: int = 1) -> float:
        """Weight bytes that one layer reads in a step of `batch` rows.

        With experts this is an expectation: rows choose experts independently and evenly, so a batch reads
        E·(1 - (1 - k/E)^batch) of E experts.
        """
        weights = self.layer_params
        if self.num_experts:
            missed = (1 - self.experts_per_token / self.num_experts) ** batch
            weights += self._expert_share * self.num_experts * (1 - missed) * self.expert_params
        return weights * self.dtype_bytes

    def layer_flops(self) -> float:
        """Floating-point operations of one layer for one token, attention over the cache not counted."""
        return 2 * (self.layer_params + self._expert_share * self.experts_per_token * self.expert_params)

    def projection_bytes(self) -> float:
        """Weight bytes of a layer's keys and values alone: what a prompt reads where it does not run the layer."""
        return self.hidden_size * 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def projection_flops(self) -> float:
        """Floating-point operations of one token's keys and values in one layer."""
        return 2.0 * self.hidden_size * 2 * self.num_kv_heads * self.head_dim

    def fixed_bytes(self, batch: int = 1) -> float:
        """Bytes that a step of `batch` rows reads whatever its depth: head, final norm, embedding rows."""
        return (self.head_params + batch * self.hidden_size) * self.dtype_bytes

    def fixed_flops(self) -> float:
        """Floating-point operations outside the layers for one token."""
        return 2.0 * self.head_params

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def kv_flops_per_token(self) -> float:
        """Floating-point operations of one layer's attention for one token over one cached token."""
        return 4.0 * self.num_heads * self.head_dim

    def weight_bytes(self) -> float:
        """Bytes of all weights that the model holds."""
        layers = self.num_layers * self.layer_params + self.expert_layers * self.num_experts * self.expert_params
        outside = self.head_params + (0 if self.tied_head else self.embedding_params)
        return (layers + outside) * self.dtype_bytes

    @property
    def window_share(self) -> float:
        """Share of the layers that have sliding-window attention."""
        return len(self.windowed) / self.num_layers

    @property
    def _expert_share(self) -> float:
        return self.expert_layers / self.num_layers

    # ------------------------------------------------------------------ a text

    def kv_bytes_held(self, schedule: Schedule, prompt_len: int, new_tokens: int, batch: int = 1) -> int:
        """KV bytes at the end of a generation under a schedule: a skipped layer stores nothing.

        The last generated token is never fed back, so `new_tokens` generated ones leave `new_tokens` - 1 in the cache.
        """
        schedule.check_fits(self.num_layers)
        on_prompt = {*schedule.prompt_layers(), *schedule.projected}
        fed = max(new_tokens - 1, 0)
        tokens = 0
        for layer in range(self.num_layers):
            drop = schedule.drop_position(layer)
            held = (prompt_len if layer in on_prompt else 0) + (fed if drop is None else min(fed, drop))
            tokens += min(held, self.window - 1) if layer in self.windowed else held
        return round(batch * tokens * self.kv_bytes_per_token())

    def kv_bytes_saved(self, schedule: Schedule, prompt_len: int, new_tokens: int, batch: int = 1) -> int:
        """KV bytes that full depth would hold on top of `kv_bytes_held`."""
        full = self.kv_bytes_held(Schedule.full(self.num_layers), prompt_len, new_tokens, batch)
        return full - self.kv_bytes_held(schedule, prompt_len, new_tokens, batch)


# ---------------------------------------------------------------------- reading a config


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
class _Experts:
    """Mixture-of-experts sizes, all zero for a dense model; `shared` is what every token reads of a sparse layer."""

    count: int = 0
    per_token: int = 0
    params: int = 0
    layers: int = 0
    shared: int = 0


def _experts(read: ConfigReader, num_layers: int, hidden: int) -> _Experts:
    count = read.first("num_local_experts", "num_experts", default=0)
    if not count:
        return _Experts()
    step = read.first("decoder_sparse_step", default=1)
    dense = set(read.first("mlp_only_layers", default=()))
    shared = read.first("shared_expert_intermediate_size", default=0)
    router = hidden * count + (hidden if shared else 0)
    return _Experts(
        count=count,
        per_token=read.first("num_experts_per_tok", default=1),
        params=_mlp_params(read, hidden, read.first("moe_intermediate_size", "intermediate_size")),
        layers=sum(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        shared=router + _mlp_params(read, hidden, shared),
    )


def _kv_heads(read: ConfigReader, heads: int) -> int:
    """Key and value heads of a layer with `heads` query heads."""
    if read.first("new_decoder_architecture"):
        return int(read.first("num_kv_heads", default=heads))
    if read.first("multi_query"):
        return 1
    return heads if read.model_type in _NO_GROUPS else int(read.first("num_key_value_heads", default=heads))


def _attention_params(read: ConfigReader, hidden: int, inner: int, kv_inner: int) -> int:
    """Weights of attention and of the layer's norms."""
    biased = read.model_type in _PLAIN_BIASED
    biases = inner + 2 * kv_inner + hidden if biased else 0
    norms = (4 if biased else 2) * hidden
    return hidden * (inner + 2 * kv_inner) + inner * hidden + biases + norms


def _mlp_params(read: ConfigReader, hidden: int, width: int) -> int:
    """Weights of one MLP, or one expert, of inner size `width`."""
    if read.model_type in _PLAIN_BIASED:
        return 2 * hidden * width + hidden + width
    return (2 if read.model_type in _PLAIN_UNBIASED else 3) * hidden * width


def _windows(read: ConfigReader, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Window and layers of sliding-window attention, by the rules of transformers' caches."""
    window = read.first("sliding_window")
    if window is None or read.first("use_sliding_window", default=True) is False:
        return 0, ()
    types = read.first("layer_types")
    if types is None:
        return int(window), tuple(range(num_layers))
    windowed = tuple(i for i, kind in enumerate(types[:num_layers]) if kind == "sliding_attention")
    return (int(window), windowed) if windowed else (0, ())
