"""A transformers model of Llama's kind as a GGUF file, so that llama.cpp runs the very weights that the others run.

No tokenizer goes into it: a benchmark feeds tokens. Four-bit files keep embeddings and head in Q8_0, and every file its
norms in fp32, as llama.cpp's own tool does for such models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skipdecode.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KINDS", "GgufSizes", "write_gguf"]

KINDS = ("bf16", "f16", "q8_0", "q4_0", "q4_1")
# transformers' model type -> GGUF's architecture, and whether its rotary pairs are neighbours instead of halves.
_ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
_BLOCK = 32


class GgufSizes(NamedTuple):
    """Bytes of a file's tensors that a decode step reads: of a layer, the mean, and of output embedding and norm."""

    layer: float
    head: int


def write_gguf(model: Any, path: Path, kind: str) -> GgufSizes:
    """Write the weights of `model` (of type llama, mistral, qwen2 or qwen3) to `path`.

    `kind` is the type of the matrices. A matrix whose rows are no multiple of 32 stays f16 in a quantized file.

    Raises
    ------
    UsageError
        If llama.cpp has no match for the model, or `kind` is unknown.
    MissingExtraError
        If gguf is absent.
    """
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("writing a GGUF file", "llama-cpp") from None
    if kind not in KINDS:
        raise UsageError(f"GGUF type {kind!r} is not known: accepted are {', '.join(KINDS)}")
    config = model.config
    architecture = _architecture(config)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config)
    matrix = gguf.GGMLQuantizationType[kind.upper()]
    outer = gguf.GGMLQuantizationType.Q8_0 if kind.startswith("q4") else matrix
    layers = head = 0
    for name, tensor in _tensors(model, gguf.get_tensor_name_map(number, config.num_hidden_layers)):
        kind_of = outer if name.startswith(("token_embd.", "output.")) else matrix
        if tensor.dim() < 2:
            kind_of = gguf.GGMLQuantizationType.F32
        elif kind.startswith("q") and tensor.shape[1] % _BLOCK:
            kind_of = gguf.GGMLQuantizationType.F16
        data = gguf.quants.quantize(tensor.float().numpy(), kind_of)
        writer.add_tensor(name, data, raw_dtype=kind_of)
        layers += data.nbytes if name.startswith("blk.") else 0
        outputs = ("output_norm.", "token_embd." if config.tie_word_embeddings else "output.")
        head += data.nbytes if name.startswith(outputs) else 0
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufSizes(layers / config.num_hidden_layers, head)


def _architecture(config: Any) -> str:
    if config.model_type not in _ARCHITECTURES:
        raise UsageError(
            f"a model of type {config.model_type!r} cannot be written for llama.cpp here (accepted are "
            f"{', '.join(sorted(_ARCHITECTURES))}): leave its engines out of --engines"
        )
    rope = config.rope_parameters
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        config.model_type == "mistral" and getattr(config, "sliding_window", None)
    )
    if rope.get("rope_type", "default") != "default" or sliding:
        raise UsageError(
            "a model with scaled rotary positions or sliding-window attention cannot be written for llama.cpp here: "
            "leave its engines out of --engines"
        )
    return _ARCHITECTURES[config.model_type][0]


def _write_sizes(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _tensors(model: Any, names: Any) -> Iterator[tuple[str, Tensor]]:
    """GGUF's names and the tensors under them."""
    config = model.config
    pairs = _ARCHITECTURES[config.model_type][1]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = name.split(".")
        count = heads.get(parts[-2])
        held = tensor.detach().cpu()
        yield (
            f"{names.get_name(name.removesuffix('.' + parts[-1]))}.{parts[-1]}",
            _paired(held, count) if pairs and count else held,
        )


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order in which rotary pairs are neighbours."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
