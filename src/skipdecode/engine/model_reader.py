"""Reads a transformers model as data of the fast path: fused weights, norms, positions. `READERS` lists the families.

Fused weights are one tensor, and the model's own parameters become views of it. So the model stays usable, and nothing
is stored twice. A model that differs from its family's entry in any detail is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from skipdecode.common.types import PretrainedConfig, PreTrainedModel
from skipdecode.engine.kernels.spec import Activation, AttentionSpec, LayerSpec, LinearSpec, ModelSpec, Prologue
from skipdecode.engine.kernels.weights import QuantizedWeight, huge_pages
from skipdecode.errors import UnfitModelError
from skipdecode.models.families import layer_windows

Part = Any
"""A module of a model, whose attributes the row of its family names."""
Weight = Tensor | QuantizedWeight
Join = Callable[[list[Tensor]], Weight]


@dataclass(frozen=True)
class Reader:
    """Attribute paths of a family's causal LM to the parts of a `ModelSpec`: of the decoder, in it, and in a layer."""

    body: str = "model"  # the decoder
    # In the decoder: its layers, token embedding, last norm, learned positions ("": it has rotary ones).
    layers: str = "layers"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    positions: str = ""
    # The module with `head_dim`, `scaling`, perhaps the norms `qk_norms`, and perhaps `use_rope`.
    attention: str = "self_attn"
    # The norm of a sublayer's input ("": none) and, if there is one, the norm of its output.
    attention_norms: tuple[str, ...] = ("input_layernorm",)
    mlp_norms: tuple[str, ...] = ("post_attention_layernorm",)
    # One module, or the modules to be fused in this order. An MLP is gated, the gate first, if its first product is
    # twice as wide as the input of its second product.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    out: str = "self_attn.o_proj"
    mlp_out: str = "mlp.down_proj"
    gamma_offset: int = 0  # added to the weights of the norms
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    pairs: bool = False  # neighbouring columns of a head are rotated, not halves
    query_norm: Literal["before", "after"] = "before"  # heads are normed before or after the rotation
    local_rotation: bool = False  # in a model with windows, only layers with a window rotate
    settings: tuple[str, ...] = ()  # of a config: those that this family applies; another's may name them in vain
    convolution: str = ""  # in a layer that has it: the short convolution that stands for attention

    def setting(self, config: PretrainedConfig, name: str, default: Any = None) -> Any:
        """A setting's value, if the family applies it."""
        return getattr(config, name, default) if name in self.settings else default


_LLAMA = Reader()
_POST_NORMS = replace(
    _LLAMA, attention_norms=("", "post_attention_layernorm"), mlp_norms=("", "post_feedforward_layernorm")
)
_GEMMA2 = Reader(
    attention_norms=("input_layernorm", "post_attention_layernorm"), gamma_offset=1,
    mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    settings=("attn_logit_softcapping", "final_logit_softcapping"),
)  # fmt: skip
_GLM4 = Reader(
    attention_norms=("input_layernorm", "post_self_attn_layernorm"), mlp_in=("mlp.gate_up_proj",), pairs=True,
    mlp_norms=("post_attention_layernorm", "post_mlp_layernorm"),
)  # fmt: skip
_GPT2 = Reader(
    body="transformer", layers="h", embedding="wte", norm="ln_f", positions="wpe", attention="attn",
    attention_norms=("ln_1",), qkv=("attn.c_attn",), out="attn.c_proj", mlp_norms=("ln_2",), mlp_in=("mlp.c_fc",),
    mlp_out="mlp.c_proj",
)  # fmt: skip
_LFM2 = Reader(
    norm="embedding_norm", attention_norms=("operator_norm",), out="self_attn.out_proj", mlp_norms=("ffn_norm",),
    mlp_in=("feed_forward.w1", "feed_forward.w3"), mlp_out="feed_forward.w2", qk_norms=("q_layernorm", "k_layernorm"),
    convolution="conv",
)  # fmt: skip
_OPT = Reader(
    body="model.decoder", norm="final_layer_norm", positions="embed_positions", out="self_attn.out_proj",
    attention_norms=("self_attn_layer_norm",), mlp_norms=("final_layer_norm",), mlp_in=("fc1",), mlp_out="fc2",
)  # fmt: skip
READERS: dict[str, Reader] = {
    **dict.fromkeys(("cwm", "internlm3", "iquestcoder", "llama", "ministral", "mistral"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen3", "seed_oss", "smollm3"), _LLAMA),
    **dict.fromkeys(("olmo2", "olmo3"), _POST_NORMS),
    "apertus": replace(
        _LLAMA, attention_norms=("attention_layernorm",), mlp_norms=("feedforward_layernorm",), mlp_in=("mlp.up_proj",)
    ),
    "arcee": replace(_LLAMA, mlp_in=("mlp.up_proj",)),
    "ernie4_5": replace(_LLAMA, pairs=True),
    "exaone4": replace(_POST_NORMS, local_rotation=True),
    "gemma": replace(_LLAMA, gamma_offset=1),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, settings=("final_logit_softcapping",)),
    "glm4": _GLM4,
    "gpt2": _GPT2,
    "granite": replace(_LLAMA, settings=("embedding_multiplier", "logits_scaling", "residual_multiplier")),
    "hunyuan_v1_dense": replace(_LLAMA, qk_norms=("query_layernorm", "key_layernorm"), query_norm="after"),
    "ministral3": replace(_LLAMA, settings=("llama_4_scaling_beta",)),
    "lfm2": _LFM2,
    "opt": _OPT,
    "phi3": Reader(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",)),
    "starcoder2": replace(_LLAMA, mlp_in=("mlp.c_fc",), mlp_out="mlp.c_proj"),
}
_ACTIVATION_NAMES = ("hidden_activation", "hidden_act", "activation_function")
_ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "relu2": "relu_squared", "xielu": "xielu"}
_ACTIVATIONS |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_GATES: dict[str, Prologue] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
# The other config settings that the fast path computes.
_COVERED = {"do_layer_norm_before": True, "_remove_final_layer_norm": False}


def read_model(model: PreTrainedModel, positions: int, join: Join | None = None) -> ModelSpec:
    """Read a transformers causal LM, with rotary tables for `positions` positions.

    `join` makes one matrix of the rows of several; default: a tensor whose views the model's parameters become.

    Raises UnfitModelError if the architecture, or a detail of this model, is not supported.
    """
    kind = model.config.model_type
    if kind not in READERS:
        raise UnfitModelError(f"no fast path for model type {kind!r} (there is one for {', '.join(sorted(READERS))})")
    if len({(p.device, p.dtype) for p in model.parameters()}) != 1:
        raise UnfitModelError("its parameters are on several devices or of several types")
    try:
        return _read(READERS[kind], model, positions, join or _fused)
    except AttributeError as e:
        raise UnfitModelError(f"this release of transformers has another {kind!r}: {e}") from None


def matrices(model: PreTrainedModel) -> list[list[Tensor]]:
    """The parts of each matrix of all layers and of the output embedding, in the order of a step's reads.

    Raises as `read_model`; no weight is moved but transposed ones.
    """
    groups: list[list[Tensor]] = []

    def shape(parts: list[Tensor]) -> Tensor:
        groups.append(parts)
        return parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1], device="meta")

    read_model(model, 1, shape)
    return groups


# ---------------------------------------------------------------------- by a family's row


def _read(reader: Reader, model: PreTrainedModel, positions: int, join: Join) -> ModelSpec:
    config = model.config
    for name, covered in _COVERED.items():
        if (value := getattr(config, name, covered)) != covered:
            raise UnfitModelError(f"its {name} of {value} has no fast path")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnfitModelError("its attention to later tokens has no fast path")
    body = attrgetter(reader.body)(model)
    embedding, weight = getattr(body, reader.embedding), getattr(body, reader.embedding).weight.detach()
    if weight.shape[1] != config.hidden_size:
        raise UnfitModelError("its projected embeddings have no fast path")
    # Hidden states are kept over the factor of what is added to them: norms, which alone read them, take it out.
    factor = reader.setting(config, "residual_multiplier", 1.0)
    if not factor > 0:
        raise UnfitModelError(f"its residual_multiplier of {factor} has no fast path")
    table = getattr(body, reader.positions) if reader.positions else None
    first = getattr(table, "offset", 0)
    rotary: dict[str | None, Any] = {}
    if table is None:
        rotary = {**_rotary_tables(body, positions), "q_scale": _query_scale(reader, config, positions)}
    last = getattr(body, reader.norm)
    gamma = _gamma(reader, last, reader.setting(config, "logits_scaling", 1.0))
    scale = reader.setting(config, "embedding_multiplier", 1.0)
    embed_scale = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", None))
    if embed_scale is not None:
        scale = torch.as_tensor(embed_scale, dtype=weight.dtype).item()
    return ModelSpec(
        [_read_layer(reader, x, config, i, rotary, join) for i, x in enumerate(getattr(body, reader.layers))],
        _linear(join, [model.lm_head], last, gamma, factor),
        weight,
        scale / factor,
        position_embedding=None if table is None else table.weight.detach(),
        position_offset=first,
        max_positions=None if table is None else table.weight.shape[0] - first,
        logit_cap=reader.setting(config, "final_logit_softcapping"),
    )


def _read_layer(
    reader: Reader, layer: Part, config: PretrainedConfig, index: int, rotary: dict[str | None, Any], join: Join
) -> LayerSpec:
    first, *more = (getattr(layer, name) if name else None for name in reader.attention_norms)
    second, *most = (getattr(layer, name) if name else None for name in reader.mlp_norms)
    if convolves := bool(reader.convolution) and hasattr(layer, reader.convolution):
        name = reader.convolution
        reader = replace(reader, attention=name, qkv=(f"{name}.in_proj",), out=f"{name}.out_proj")

    def linear(*names: str, norm: Part = None) -> LinearSpec:
        factor = reader.setting(config, "residual_multiplier", 1.0)
        return _linear(join, [attrgetter(name)(layer) for name in names], norm, _gamma(reader, norm), factor)

    qkv, out = linear(*reader.qkv, norm=first), linear(reader.out)
    mlp_in, mlp_out = linear(*reader.mlp_in, norm=second), linear(reader.mlp_out)
    gated = mlp_in.weight.shape[0] == 2 * mlp_out.weight.shape[1]
    name = next((getattr(config, n) for n in _ACTIVATION_NAMES if hasattr(config, n)), "silu")
    mixer = attrgetter(reader.attention)(layer)
    if name not in (_GATES if gated else _ACTIVATIONS):
        raise UnfitModelError(f"its activation {name!r} has no fast path")
    return LayerSpec(
        qkv,
        _convolution(mixer.conv, config.num_attention_heads)
        if convolves
        else _attention(reader, mixer, config, index, qkv.weight.shape[0], rotary),
        out,
        mlp_in if gated else replace(mlp_in, activation=_ACTIVATIONS[name], constants=_constants(name, layer)),
        replace(mlp_out, prologue=_GATES[name]) if gated else mlp_out,
        _gamma(reader, more[0]) if more else None,
        _gamma(reader, most[0]) if most else None,
        _eps(more[0] if more else first),
    )


def _constants(activation: str, layer: Part) -> tuple[float, float, float]:
    if activation != "xielu" or layer.mlp.act_fn.alpha_p.is_meta:  # `info` makes a model without values
        return 0.0, 0.0, 0.0
    act = layer.mlp.act_fn
    positive, negative = nn.functional.softplus(torch.cat((act.alpha_p, act.alpha_n)))
    return positive.item(), (act.beta + negative).item(), act.beta.item()


def _convolution(module: Part, heads: int) -> AttentionSpec:
    """A short convolution of so many groups of columns: B, C and x are as wide as queries, keys and values together."""
    taps = module.weight.detach()[:, 0].t()
    bias = torch.zeros_like(taps[0]) if module.bias is None else module.bias.detach()
    return AttentionSpec(heads, heads, taps.shape[1] // heads, 1.0, taps=torch.cat((bias[None], taps)))


def _attention(
    reader: Reader, attention: Part, config: PretrainedConfig, index: int, columns: int, rotary: dict[str | None, Any]
) -> AttentionSpec:
    heads, dim, window = config.num_attention_heads, attention.head_dim, layer_windows(config)[index] or 0
    types = getattr(config, "layer_types", None)
    cos, sin = rotary.get(types[index] if types else None) or rotary.get(None, (None, None))
    local = reader.local_rotation and getattr(config, "sliding_window", None) is not None and not window
    if local or not getattr(attention, "use_rope", True):
        cos = sin = None
    q, k = (getattr(attention, name, None) for name in reader.qk_norms)
    q_gamma, k_gamma = _gamma(reader, q), _gamma(reader, k)
    wide = q_gamma is not None and q_gamma.numel() != dim
    return AttentionSpec(
        heads=heads, kv_heads=(columns // dim - heads) // 2, head_dim=dim, scale=attention.scaling, window=window,
        cos=cos, sin=sin, q_gamma=q_gamma, k_gamma=k_gamma, eps=0.0 if q is None else _eps(q), pairs=reader.pairs,
        norm="wide" if wide else reader.query_norm, q_scale=rotary.get("q_scale"),
        cap=reader.setting(config, "attn_logit_softcapping") or 0.0,
    )  # fmt: skip


def _rotary_tables(body: Part, positions: int) -> dict[str | None, tuple[Tensor, Tensor]]:
    """Cosines and sines by layer type; the key is None if all layers rotate alike."""
    rotary = body.rotary_emb
    kinds = getattr(rotary, "rope_type", "default")
    tables = {}
    for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        if kind in ("dynamic", "longrope"):
            raise UnfitModelError(f"its rotary positions ({kind}) depend on the length of the text")
        with torch.no_grad(), next(body.parameters()).device:
            inputs = torch.empty(0, dtype=torch.float32), torch.arange(positions).unsqueeze(0)
            cos, sin = rotary(*inputs, *([layer_type] if layer_type else []))
        half = cos.shape[-1] // 2
        tables[layer_type] = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
    return tables


def _query_scale(reader: Reader, config: PretrainedConfig, positions: int) -> Tensor | None:
    """Factors of the queries that grow with the position (Ministral 3); None if they are 1."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" not in reader.settings or not (beta := rope.get("llama_4_scaling_beta")):
        return None
    turns: Tensor = torch.floor(torch.arange(positions) / rope["original_max_position_embeddings"])
    return turns.log1p().mul(beta) + 1


def _gamma(reader: Reader, norm: Part, divisor: float = 1.0) -> Tensor | None:
    if norm is None or norm.weight is None:
        return None
    gamma: Tensor = norm.weight.detach()
    return (gamma.float() + reader.gamma_offset) / divisor if reader.gamma_offset or divisor != 1 else gamma


def _eps(norm: Part) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


# ---------------------------------------------------------------------- weights


def _linear(
    join: Join, modules: Sequence[Part], norm: Part = None, gamma: Tensor | None = None, factor: float = 1.0
) -> LinearSpec:
    """The modules behind a norm of what is kept over `factor`."""
    for module in modules:
        if type(module) not in (nn.Linear, Conv1D):
            raise UnfitModelError(
                f"a {type(module).__name__} stands where a plain Linear is needed: merge or unload it"
            )
    weight = join([_turned(m.weight) if type(m) is Conv1D else m.weight for m in modules])
    biases = [m.bias for m in modules]
    bias = None
    if any(b is not None for b in biases):
        parts = [m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias.detach() for m in modules]
        bias = torch.cat(parts)
    if norm is None:
        return LinearSpec(weight, bias)
    gamma = modules[0].weight.new_ones(weight.shape[1]) if gamma is None else gamma
    kind: Prologue = "layer_norm" if isinstance(norm, nn.LayerNorm) else "rms_norm"
    beta = getattr(norm, "bias", None)
    return LinearSpec(weight, bias, kind, gamma, None if beta is None else beta.detach(), _eps(norm) / factor**2)


def _turned(parameter: Tensor) -> Tensor:
    """An (out, in) tensor for a Conv1D's parameter, (in, out), which becomes a view of the tensor."""
    rows = parameter.detach().t()
    if not rows.is_contiguous():
        rows = huge_pages(rows.new_empty(rows.shape)).copy_(rows)
        parameter.data = rows.t()
    return rows


def _fused(parameters: list[Tensor]) -> Tensor:
    """One (sum of rows, columns) tensor; the parameters become views of it."""
    first = parameters[0]
    if len(parameters) == 1:
        first.data = first.data.contiguous()
        return first.detach()
    rows = [p.shape[0] for p in parameters]
    adjacent = all(p.is_contiguous() for p in parameters) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in pairwise(parameters)
    )
    if adjacent:
        return first.detach().as_strided((sum(rows), first.shape[1]), (first.shape[1], 1))
    fused = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, torch.split(fused, rows), strict=True):
        parameter.data = part
    return fused
