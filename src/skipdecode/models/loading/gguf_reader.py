"""A GGUF file as a checkpoint in the usual form: config, safetensors and tokenizer.

transformers' own reader drops scaled rotary positions and biases, has one rotary base for both kinds of Gemma 3's
layers, ignores how words are split, and holds several copies of the weights. So metadata and tensors are read with the
`gguf` package, a part of a tensor at a time; what would be read wrongly is refused by name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipdecode.common.progress import progress_bar
from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.gguf_file import SPLITS, unpaired
from skipdecode.models.loading.saving import save_tokenizer, with_old_names

_SHARD_BYTES = 2**28
_PART_VALUES = 2**22  # dequantized at once, in fp32
_SAME_HEAD = 0.99  # correlation of an embedding with a head that is the same, quantized otherwise
_CONTROL, _USER_DEFINED = 3, 4
# Tokens that end a turn in llama.cpp too, by their text: files name only one of them.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|return|>")
_QWEN = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _QWEN | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# GGUF's architecture -> transformers' model type, its class, and the names of a layer's tensors.
_MODELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "llama": ("llama", "LlamaForCausalLM", _LAYER),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", _LAYER),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", _LAYER | _QWEN),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", _LAYER | _GEMMA),
}
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(file: Path, target: Path, dtype: torch.dtype | None = None) -> str:
    """Fill a directory with the checkpoint of a GGUF file; returns the source in words.

    `dtype` is of the weights; default: fp32 or fp16 if the file has all matrices in it, else bf16.

    Raises ModelLoadError: the file is cut, foreign, one of several parts, or has a model, a scaling or a tokenizer that
    is not read here.
    """
    reader = _opened(file)
    found = _File(file, reader)
    stored = dtype or {"F32": torch.float32, "F16": torch.float16}.get(found.kind, torch.bfloat16)
    tied = found.is_tied()
    config = found.config(tied, stored)
    (target / "config.json").write_text(json.dumps(with_old_names(config), indent=2) + "\n", encoding="utf-8")
    tokenizer = _tokenizer(found)
    ends = found.end_tokens()
    ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config} | {"eos_token_id": ends}
    (target / "generation_config.json").write_text(json.dumps(ids) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, target, shown=target)
    _write_tensors(found, target, stored, tied)
    return f"{file.name}, {found.kind}"


def _opened(file: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except Exception as e:  # ValueError, IndexError, KeyError, of numpy too: by where the file ends
        raise ModelLoadError(f"{file} is no whole GGUF file ({' '.join(str(e).split())[:120]}): fetch it again") from e


class _File:
    """Metadata and tensors of a GGUF file."""

    def __init__(self, file: Path, reader: Any) -> None:
        self.path = file
        self.values: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.name = str(self.values.get("general.architecture"))
        if self.name not in _MODELS:
            raise ModelLoadError(f"{file} has a model of type {self.name!r}: accepted are {', '.join(_MODELS)}")
        if int(self.values.get("split.count") or 1) > 1:
            raise ModelLoadError(f"{file} is one of {self.values['split.count']} parts: join them (llama-gguf-split)")
        if self.get("expert_count"):
            raise ModelLoadError(f"{file} has a mixture of experts, which is not read here: give its safetensors")
        if "blk.0.attn_q.weight" not in self.tensors or "token_embd.weight" not in self.tensors:
            raise ModelLoadError(f"{file} has no weights of attention: a whole language model is needed")

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the architecture."""
        return self.values.get(f"{self.name}.{name}", default)

    def number(self, name: str) -> int:
        """A size; raises ModelLoadError if it is missing or differs by layer."""
        if isinstance(value := self.get(name), int):
            return value
        raise ModelLoadError(f"{self.path}: {self.name}.{name} is {value!r}: one number is needed")

    @property
    def kind(self) -> str:
        """The types of the matrices, the most frequent first."""
        counts = Counter(t.tensor_type.name for t in self.tensors.values() if len(t.shape) > 1)
        return ", ".join(name for name, _ in counts.most_common())

    def is_tied(self) -> bool:
        """Whether head and embedding are the same matrix: stored once, or twice in types of other precision."""
        head, embedding = self.tensors.get("output.weight"), self.tensors["token_embd.weight"]
        if head is None or tuple(head.shape) != tuple(embedding.shape):
            return head is None
        some = slice(0, len(head.data), max(1, len(head.data) // 64))
        one, other = (_values(tensor, some).flatten() for tensor in (head, embedding))
        return bool(torch.corrcoef(torch.stack((one, other)))[0, 1] > _SAME_HEAD)

    def end_tokens(self) -> list[int]:
        """Tokens that end a text or a turn."""
        named = [self.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        types, words = (self.values.get(f"tokenizer.ggml.{name}", []) for name in ("token_type", "tokens"))
        known = [i for i, word in enumerate(words) if word in _TURN_ENDS and types[i : i + 1] == [_CONTROL]]
        return list(dict.fromkeys([number for number in named if number is not None] + known))

    # ------------------------------------------------------------------ the config

    def config(self, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
        """The config of transformers, JSON-ready."""
        model_type, class_name, _ = _MODELS[self.name]
        heads, width = self.number("attention.head_count"), self.number("embedding_length")
        head_dim = int(self.get("attention.key_length", width // heads))
        if (
            self.get("attention.value_length", head_dim) != head_dim
            or self.get("rope.dimension_count", head_dim) != head_dim
        ):
            raise ModelLoadError(f"{self.path}: rotary positions on part of a head: give its safetensors")
        named = {name: self.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_IDS.items()}
        return {
            "architectures": [class_name],
            "model_type": model_type,
            "hidden_size": width,
            "intermediate_size": self.number("feed_forward_length"),
            "num_hidden_layers": self.number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "max_position_embeddings": self.number("context_length"),
            "rms_norm_eps": float(f"{self.get('attention.layer_norm_rms_epsilon', 1e-6):.6g}"),
            "rope_parameters": self._rope(head_dim),
            "tie_word_embeddings": tied,
            "dtype": str(dtype).removeprefix("torch."),
            **{name: number for name, number in named.items() if number is not None},
            **self._of_type(head_dim),
        }

    def _of_type(self, head_dim: int) -> dict[str, Any]:
        """Entries of one model type."""
        if self.name == "llama":
            return {
                "attention_bias": "blk.0.attn_q.bias" in self.tensors,
                "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            }
        if self.name != "gemma3":
            return {}
        layers, heads, width = (self.number(n) for n in ("block_count", "attention.head_count", "embedding_length"))
        # As llama.cpp has it: of all sizes the 27B model alone scales by the share of a head.
        return {
            "sliding_window": self.number("attention.sliding_window"),
            "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
            "query_pre_attn_scalar": width // heads if layers == 62 else head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
        }

    def _rope(self, head_dim: int) -> dict[str, Any]:
        base, scaling = float(self.get("rope.freq_base", 10000.0)), self.get("rope.scaling.type", "none")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
        if scaling in ("linear", "yarn"):
            rope |= {"rope_type": scaling, "factor": float(self.get("rope.scaling.factor"))}
        elif scaling != "none":
            raise ModelLoadError(f"{self.path}: rotary positions of type {scaling!r}: give its safetensors")
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = int(self.get("rope.scaling.original_context_length"))
        if (factors := self.tensors.get("rope_freqs.weight")) is not None:
            rope = self._llama3(_values(factors).flatten(), base, head_dim)
        if self.name == "gemma3":
            return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
        return rope

    def _llama3(self, factors: Tensor, base: float, head_dim: int) -> dict[str, Any]:
        """Llama 3's scaling, of which the file has only the divisors of the frequencies."""
        low, high, factor = 1.0, 4.0, float(factors.max())
        plain = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        waves, length = 2 * math.pi / plain, 8192.0
        between = (factors > 1.001) & (factors < 0.999 * factor)
        if between.any():  # the share of the plain frequency says where between both ends the wave lies
            smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
            length = float((waves * (low + smooth * (high - low)))[between].median().round())
        smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
        if not torch.allclose(1 / ((1 - smooth) / factor + smooth), factors.double(), rtol=1e-2):
            raise ModelLoadError(f"{self.path}: its rope_freqs are not Llama 3's: give its safetensors")
        lengths = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": int(length)}
        return {"rope_type": "llama3", "rope_theta": base, "factor": factor, **lengths}


# ---------------------------------------------------------------------- weights


def _values(tensor: Any, rows: slice = slice(None)) -> Tensor:
    """Rows of a tensor, dequantized to fp32."""
    from gguf import dequantize

    return torch.from_numpy(dequantize(tensor.data[rows], tensor.tensor_type).copy())


def _dequantized(tensor: Any, dtype: torch.dtype) -> Tensor:
    """A tensor in `dtype`, made in parts: fp32 takes twice the memory of the result."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    made = torch.empty(shape, dtype=dtype)
    rows = max(1, _PART_VALUES // max(1, int(tensor.n_elements) // shape[0]))
    for start in range(0, shape[0], rows):
        part = slice(start, start + rows)
        made[part] = _values(tensor, part).reshape(made[part].shape).to(dtype)
    return made


def _named(found: _File, tied: bool) -> Iterator[tuple[str, Any, str]]:
    """Names of transformers, the file's tensors, and GGUF's name without its layer."""
    _, _, names = _MODELS[found.name]
    for name, tensor in found.tensors.items():
        *place, part, kind = name.split(".")
        if name == "rope_freqs.weight" or (tied and name == _poorer_copy(found)):
            continue
        if place and place[0] == "blk" and part in names:
            yield f"model.layers.{place[1]}.{names[part]}.{kind}", tensor, part
        elif not place and part in _OUTER:
            outer = "token_embd" if tied and part == "output" else part
            yield f"{_OUTER[outer]}.{kind}", tensor, part
        else:
            raise ModelLoadError(f"{found.path} has a tensor {name}, which is not known: give its safetensors")


def _poorer_copy(found: _File) -> str | None:
    """Of embedding and head that are the same, the one with fewer bytes."""
    two = [name for name in ("token_embd.weight", "output.weight") if name in found.tensors]
    return min(two, key=lambda name: int(found.tensors[name].n_bytes)) if len(two) > 1 else None


def _write_tensors(found: _File, target: Path, dtype: torch.dtype, tied: bool) -> None:
    """The weights in shards of `_SHARD_BYTES`, so that only one is held at a time."""
    from safetensors.torch import save_file

    heads = {"attn_q": found.number("attention.head_count"), "attn_k": found.number("attention.head_count_kv")}
    shard: dict[str, Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    total = 0

    def flush() -> None:
        file = target / f"model-{len(files) + 1:05d}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        files.append((file, list(shard)))
        shard.clear()

    with progress_bar(len(found.tensors), "tensor", name=found.path.name) as bar:
        for name, tensor, part in _named(found, tied):
            made = _dequantized(tensor, dtype)
            if found.name == "llama" and part in heads:
                made = unpaired(made, heads[part])
            if found.name == "gemma3" and part.endswith("norm"):
                made -= 1  # the file has the whole factor, transformers what is added to 1
            shard[name], total = made, total + made.nbytes
            bar.update()
            if sum(one.nbytes for one in shard.values()) >= _SHARD_BYTES:
                flush()
        for name, made in _absent(found, dtype):
            shard[name], total = made, total + made.nbytes
        if shard:
            flush()
        bar.total = bar.n
    index = {"metadata": {"total_size": total}, "weight_map": {n: file.name for file, names in files for n in names}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")


def _absent(found: _File, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Biases that transformers' Llama has beside those of the file: they are 0."""
    if found.name == "llama" and "blk.0.attn_q.bias" in found.tensors and "blk.0.attn_output.bias" not in found.tensors:
        for layer in range(found.number("block_count")):
            yield (
                f"model.layers.{layer}.self_attn.o_proj.bias",
                torch.zeros(found.number("embedding_length"), dtype=dtype),
            )


# ---------------------------------------------------------------------- tokenizer


def _tokenizer(found: _File) -> Any:
    """The file's tokenizer with its special tokens and chat template."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model, values = found.values.get("tokenizer.ggml.model"), found.values
    words: list[str] = values.get("tokenizer.ggml.tokens", [])
    if model == "gpt2":
        given: Mapping[str, Any] = {
            key: words[number]
            for name, key in (
                ("bos", "bos_token"),
                ("eos", "eos_token"),
                ("unknown", "unk_token"),
                ("padding", "pad_token"),
            )
            if (number := values.get(f"tokenizer.ggml.{name}_token_id")) is not None
        }
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=_byte_level(found, words), **given)
    elif model == "llama":
        try:
            tokenizer = AutoTokenizer.from_pretrained(found.path.parent, gguf_file=found.path.name)
        except Exception as e:  # of many classes
            raise ModelLoadError(f"{found.path}: its tokenizer does not load: {' '.join(str(e).split())[:200]}") from e
    elif model in (None, "none"):
        raise ModelLoadError(f"{found.path} has no tokenizer: give the model's directory or hub id instead")
    else:
        raise ModelLoadError(f"{found.path}: a tokenizer of type {model!r} is not read here: give its safetensors")
    tokenizer.chat_template = values.get("tokenizer.chat_template")
    tokenizer.model_max_length = found.number("context_length")
    return tokenizer


def _byte_level(found: _File, words: list[str]) -> Any:
    """A byte-level BPE tokenizer that splits words as the file says."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    values, split = found.values, str(found.values.get("tokenizer.ggml.pre", "gpt-2"))
    if split not in SPLITS:
        raise ModelLoadError(f"{found.path}: words split as {split!r}: accepted are {', '.join(SPLITS)}")
    pairs = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges", [])]
    types: list[int] = values.get("tokenizer.ggml.token_type", [])
    added = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, pairs, ignore_merges=split == "llama-bpe")
    )
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    before: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if isinstance(part, dict)
        else pre_tokenizers.Split(Regex(part), "isolated")
        for part in SPLITS[split]
    ]
    alone = not any(isinstance(part, str) for part in SPLITS[split])  # the byte-level step then splits words itself
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=alone)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(words[i], normalized=False, special=types[i] == _CONTROL) for i in added])
    bos = values.get("tokenizer.ggml.bos_token_id")
    if values.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{words[bos]} $A", pair=f"{words[bos]} $A {words[bos]} $B", special_tokens=[(words[bos], bos)]
        )
    return tokenizer
