"""A transformers model read as the fast path's data: fused weights, norms, positions. One reader per architecture.

Weights are fused by making one tensor and pointing the model's own parameters into it, so the model stays usable and
nothing is held twice. A model that a reader does not fit in every detail is refused with the reason, not approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.engine.kernels.spec import Activation, AttentionSpec, LayerSpec, LinearSpec, ModelSpec, Prologue
from skipdecode.errors import UnfitModelError

__all__ = ["READERS", "read_model", "weights_of"]


def read_model(model: Any, positions: int) -> ModelSpec:
    """Read a transformers causal LM, with rotary tables for `positions` positions.

    Raises
    ------
    UnfitModelError
        If the architecture, or a detail of this model, is not covered.
    """
    kind = model.config.model_type
    if kind not in READERS:
        raise UnfitModelError(f"no fast path for model type {kind!r} (there is one for {', '.join(sorted(READERS))})")
    if len({(p.device, p.dtype) for p in model.parameters()}) != 1:
        raise UnfitModelError("its parameters are on several devices or of several types")
    return READERS[kind](model, positions)


def weights_of(spec: ModelSpec) -> list[Any]:
    """The matrices of all layers and the output embedding, in the order in which a step reads them."""
    layers = [(layer.qkv, layer.out, layer.mlp_in, layer.mlp_out) for layer in spec.layers]
    return [linear.weight for layer in layers for linear in layer] + [spec.head.weight]


# ---------------------------------------------------------------------- Llama and its like


def _read_llama(model: Any, positions: int) -> ModelSpec:
    config, body = model.config, model.model
    activation = getattr(config, "hidden_act", "silu")
    gates: dict[str, Prologue] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
    if activation not in gates:
        raise UnfitModelError(f"its activation {activation!r} has no fast path")
    cos, sin = _rotary_tables(model, positions)
    layers = [_read_llama_layer(layer, config, i, cos, sin, gates[activation]) for i, layer in enumerate(body.layers)]
    head = _linear([model.lm_head], "rms_norm", body.norm)
    return ModelSpec(layers, head, body.embed_tokens.weight.detach())


def _read_llama_layer(layer: Any, config: Any, index: int, cos: Tensor, sin: Tensor, gate: Prologue) -> LayerSpec:
    attention = layer.self_attn
    dim = attention.head_dim
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    types = getattr(config, "layer_types", None)
    slides = types[index] == "sliding_attention" if types else config.model_type == "mistral"
    window = (getattr(config, "sliding_window", None) or 0) if slides else 0
    spec = AttentionSpec(
        heads=attention.q_proj.out_features // dim,
        kv_heads=attention.k_proj.out_features // dim,
        head_dim=dim,
        scale=attention.scaling,
        window=window,
        cos=cos,
        sin=sin,
        q_gamma=None if q_norm is None else q_norm.weight.detach(),
        k_gamma=None if k_norm is None else k_norm.weight.detach(),
        eps=0.0 if q_norm is None else q_norm.variance_epsilon,
    )
    return LayerSpec(
        qkv=_linear([attention.q_proj, attention.k_proj, attention.v_proj], "rms_norm", layer.input_layernorm),
        attention=spec,
        out=_linear([attention.o_proj]),
        mlp_in=_linear([layer.mlp.gate_proj, layer.mlp.up_proj], "rms_norm", layer.post_attention_layernorm),
        mlp_out=_linear([layer.mlp.down_proj], gate),
    )


def _rotary_tables(model: Any, positions: int) -> tuple[Tensor, Tensor]:
    rotary = model.model.rotary_emb
    kind = getattr(rotary, "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise UnfitModelError(f"its rotary positions ({kind}) depend on the length of the text")
    device = model.model.embed_tokens.weight.device
    with torch.no_grad():
        probe = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = rotary(probe, torch.arange(positions, device=device).unsqueeze(0))
    half = cos.shape[-1] // 2
    if cos.shape[-1] != model.model.layers[0].self_attn.head_dim:
        raise UnfitModelError("it rotates only a part of each head")
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


# ---------------------------------------------------------------------- OPT


def _read_opt(model: Any, positions: int) -> ModelSpec:
    config, body = model.config, model.model.decoder
    if not config.do_layer_norm_before or body.final_layer_norm is None or body.project_in is not None:
        raise UnfitModelError("an OPT with norms after its sublayers or with projected embeddings has no fast path")
    activations: dict[str, Activation] = {"relu": "relu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    if config.activation_function not in activations:
        raise UnfitModelError(f"its activation {config.activation_function!r} has no fast path")
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    spec = AttentionSpec(heads, heads, dim, dim**-0.5)
    layers = [_read_opt_layer(layer, spec, activations[config.activation_function]) for layer in body.layers]
    table = body.embed_positions
    return ModelSpec(
        layers,
        _linear([model.lm_head], "layer_norm", body.final_layer_norm),
        body.embed_tokens.weight.detach(),
        position_embedding=table.weight.detach(),
        position_offset=table.offset,
        max_positions=table.weight.shape[0] - table.offset,
    )


def _read_opt_layer(layer: Any, spec: AttentionSpec, activation: Activation) -> LayerSpec:
    attention = layer.self_attn
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return LayerSpec(
        qkv=_linear(qkv, "layer_norm", layer.self_attn_layer_norm),
        attention=spec,
        out=_linear([attention.out_proj]),
        mlp_in=_linear([layer.fc1], "layer_norm", layer.final_layer_norm, activation),
        mlp_out=_linear([layer.fc2]),
    )


READERS: dict[str, Callable[[Any, int], ModelSpec]] = {
    "llama": _read_llama,
    "mistral": _read_llama,
    "opt": _read_opt,
    "qwen2": _read_llama,
    "qwen3": _read_llama,
}


# ---------------------------------------------------------------------- weights


def _linear(
    modules: Sequence[Any], prologue: Prologue = "none", norm: Any = None, activation: Activation = "none"
) -> LinearSpec:
    for module in modules:
        if type(module) is not nn.Linear:
            raise UnfitModelError(
                f"a {type(module).__name__} stands where a plain Linear is needed: merge or unload it"
            )
    weight = _fused([m.weight for m in modules])
    biases = [m.bias for m in modules]
    bias = None
    if any(b is not None for b in biases):
        parts = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in modules]
        bias = torch.cat(parts)
    if norm is None:
        return LinearSpec(weight, bias, prologue, activation=activation)
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    beta = getattr(norm, "bias", None)
    gamma = weight.new_ones(weight.shape[1]) if norm.weight is None else norm.weight.detach()
    return LinearSpec(weight, bias, prologue, gamma, None if beta is None else beta.detach(), eps, activation)


def _fused(parameters: list[Tensor]) -> Tensor:
    """One (sum of rows, columns) tensor of which the parameters are views from here on."""
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
