"""A transformers model of Llama's kind as a GGUF file for llama.cpp.

Four-bit files keep embeddings and head in Q8_0, and all files keep norms in fp32, as llama.cpp's own tool does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from skipdecode.common.jsonl import Json
from skipdecode.common.types import PretrainedConfig, PreTrainedModel, Tensor, Tokenizer
from skipdecode.errors import UsageError

if TYPE_CHECKING:
    from gguf import GGUFWriter, TensorNameMap

KINDS = ("bf16", "f16", "q8_0", "q4_0", "q4_1")
# transformers' model type -> GGUF's architecture, and whether its rotary pairs are neighbours instead of halves.
_ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
# Types of rotary positions that llama.cpp scales in the same way, and the entries that it reads.
_ROPE_ENTRIES = {
    "default": set[str](),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_BLOCK = 32
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GGUF's name of a split into words -> the split that a tokenizer makes before the byte-level one.
SPLITS: dict[str, list[str | Json]] = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "llama-bpe": [_WORDS.replace("DIGITS", "{1,3}")],
    "qwen2": [_WORDS.replace("DIGITS", "")],
    "default": [
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ],
}


def write_gguf(model: PreTrainedModel, path: Path, kind: str, tokenizer: Tokenizer | None = None) -> None:
    """Write the weights of `model` (of type llama, mistral, qwen2 or qwen3) and its tokenizer to `path`.

    `kind` is the type of the matrices. A matrix whose rows are no multiple of 32 stays f16 in a quantized file. Without
    tokenizer llama.cpp takes token ids alone.

    Raises UsageError if llama.cpp has no match for the model or its tokenizer, or `kind` is unknown.
    """
    import gguf

    if kind not in KINDS:
        raise UsageError(f"GGUF type {kind!r} is not known: accepted are {', '.join(KINDS)}")
    config = model.config
    architecture = check_architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        _write_tokenizer(writer, tokenizer, config.vocab_size)
    matrix = gguf.GGMLQuantizationType[kind.upper()]
    outer = gguf.GGMLQuantizationType.Q8_0 if kind.startswith("q4") else matrix
    if (penalty := model.generation_config.repetition_penalty) not in (None, 1):
        writer.add_float32("general.sampling.penalty_repeat", penalty)
        writer.add_int32("general.sampling.penalty_last_n", -1)  # of the whole text
    if _rope(config)["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(model).numpy())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, tensor in _tensors(model, tensor_names(architecture, config.num_hidden_layers), tied):
        kind_of = outer if name.startswith(("token_embd.", "output.")) else matrix
        if tensor.dim() < 2:
            kind_of = gguf.GGMLQuantizationType.F32
        elif kind.startswith("q") and tensor.shape[1] % _BLOCK:
            kind_of = gguf.GGMLQuantizationType.F16
        data = gguf.quants.quantize(tensor.float().numpy(), kind_of)
        writer.add_tensor(name, data, raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_names(architecture: str, layers: int) -> TensorNameMap:
    """Map transformers' names of modules to GGUF's names of tensors, for an architecture of GGUF."""
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, layers)


def check_architecture(config: PretrainedConfig) -> str:
    """GGUF's architecture for a transformers config; raises UsageError if llama.cpp has no match for the model."""
    scaling = _rope(config)["rope_type"]
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        config.model_type == "mistral" and getattr(config, "sliding_window", None)
    )
    if config.model_type not in _ARCHITECTURES:
        reason = f"a model of type {config.model_type!r}"
    elif not _is_scaled_alike(config):
        reason = f"a model of type {config.model_type!r} with rotary positions of type {scaling!r} and these settings"
    elif sliding:
        reason = "a model with sliding-window attention"
    else:
        return _ARCHITECTURES[config.model_type][0]
    raise UsageError(
        f"{reason} cannot be written for llama.cpp here: accepted are models of type "
        f"{', '.join(sorted(_ARCHITECTURES))} with full attention, and rotary positions of type default, linear, yarn "
        "or (llama and mistral) llama3; take the format hf, and convert that with llama.cpp's convert_hf_to_gguf.py"
    )


def _rope(config: PretrainedConfig) -> Json:
    """The settings of rotary positions."""
    return {"rope_type": "default"} | (getattr(config, "rope_parameters", None) or {})


def _is_scaled_alike(config: PretrainedConfig) -> bool:
    """Whether llama.cpp scales rotary positions as the model does."""
    rope = _rope(config)
    known = _ROPE_ENTRIES.get(rope["rope_type"], set()) | {"rope_type", "type", "rope_theta"}
    has_factors = _ARCHITECTURES[config.model_type][0] == "llama"
    return known.issuperset(rope) and None not in rope.values() and (rope["rope_type"] != "llama3" or has_factors)


def _frequency_factors(model: PreTrainedModel) -> Tensor:
    """Divisors of the rotary frequencies of each head in llama.cpp, (pairs,) in fp32."""
    import torch

    scaled = type(model.model.rotary_emb)(model.config).inv_freq  # of a loaded model it may be of another type
    steps = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
    factors: Tensor = model.config.rope_parameters["rope_theta"] ** -steps / scaled
    return factors


def _write_sizes(writer: GGUFWriter, config: PretrainedConfig) -> None:
    from gguf import RopeScalingType

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
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, size: int) -> None:
    """Vocabulary, merges, special tokens and chat template; `size` is the number of rows of the embedding."""
    from gguf import TokenType

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    if (last := max(words)) >= size:
        raise UsageError(
            f"token {last} ({words[last]!r}) of the tokenizer is outside the model's vocabulary of {size} tokens, "
            "which llama.cpp refuses: take the token out of the tokenizer's files, or give the model a row for it"
        )
    types = [TokenType.NORMAL if number in words else TokenType.UNUSED for number in range(size)]
    for number, token in tokenizer.added_tokens_decoder.items():
        types[number] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(backend))
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in backend["model"]["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    text = tokenizer("a").input_ids
    writer.add_add_bos_token(text[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(text[-1] == tokenizer.eos_token_id)
    if (chat := tokenizer.chat_template) is not None:
        named = isinstance(chat, dict)
        writer.add_chat_template([{"name": n, "template": text} for n, text in chat.items()] if named else chat)


def _split_name(backend: Json) -> str:
    """GGUF's name of the split into words of a byte-level BPE tokenizer, given as the JSON of `tokenizers`."""
    split = backend["pre_tokenizer"] or {"type": "none"}
    *before, last = split.get("pretokenizers", [split])
    patterns = [step["pattern"].get("Regex") if step["type"] == "Split" else step for step in before]
    if backend["model"]["type"] == "BPE" and last["type"] == "ByteLevel":
        for name, parts in SPLITS.items():
            if patterns == parts:
                return name
    raise UsageError(
        "this tokenizer cannot be written for llama.cpp here: accepted are byte-level BPE tokenizers that split words "
        f"as {', '.join(SPLITS)} do; take the format hf"
    )


def _tensors(model: PreTrainedModel, names: TensorNameMap, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """GGUF's names and the tensors under them. A tied output embedding is stored once."""
    config = model.config
    pairs = _ARCHITECTURES[config.model_type][1]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        count = heads.get(name.split(".")[-2])
        held = tensor.detach().cpu()
        yield names.get_name(name, (".weight", ".bias")), _paired(held, count) if pairs and count else held


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order in which rotary pairs are neighbours."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def unpaired(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `_paired`."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
