"""The metadata of a GGUF file as a config of transformers, with the meaning and the defaults that llama.cpp has.

Every key of the model and of its tokenizer is read, is without effect, or is refused by name. Other keys (general.*
but for general.sampling.*, split.*, quantize.*, those of a program) say something about the file and nothing about what
the model computes.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from torch import Tensor

from skipdecode.common.jsonl import Json
from skipdecode.errors import ModelLoadError

_Keys = dict[str, tuple[object, ...] | None]


def names(text: str) -> list[str]:
    """Split the names of a table, which need no quotes then."""
    return text.split()


def _table(*rows: tuple[tuple[object, ...] | None, str]) -> _Keys:
    return {name: values for values, text in rows for name in names(text)}


# The values with which keys are accepted, and the keys. None: any, because they are read below, or llama.cpp does not
# read them for these models. Listed values leave the computation as it is without the key.
_MODEL_KEYS = _table(
    (None, "context_length embedding_length block_count feed_forward_length vocab_size tensor_data_layout"),
    (None, "attention.head_count attention.head_count_kv attention.key_length attention.value_length pooling_type"),
    (None, "attention.layer_norm_rms_epsilon attention.layer_norm_epsilon rope.dimension_count rope.freq_base"),
    (None, "rope.freq_base_swa rope.scale_linear rope.scaling.type rope.scaling.factor rope.scaling.finetuned"),
    (None, "rope.scaling.original_context_length"),
    ((0,), "expert_count expert_used_count nextn_predict_layers use_parallel_residual attention.sliding_window"),
    ((0,), "attention.clamp_kqv attention.max_alibi_bias attention.scale rope.scaling.yarn_log_multiplier"),
    ((0,), "attn_logit_softcapping final_logit_softcapping"),
    ((0, 1), "logit_scale embedding_scale residual_scale"),
    ((1,), "attention.causal rope.scaling.attn_factor rope.scaling.yarn_attn_factor rope.scaling.yarn_ext_factor"),
    ((1,), "rope.scaling.yarn_beta_slow"),
    ((32,), "rope.scaling.yarn_beta_fast"),
)
_GEMMA_KEYS = _table((None, "attention.sliding_window attention.sliding_window_pattern final_logit_softcapping"))
_TOKENIZER_KEYS = _table(
    (None, "model pre tokens token_type token_type_count scores merges precompiled_charsmap remove_extra_whitespaces"),
    (None, "add_bos_token add_eos_token add_space_prefix add_padding_token add_unknown_token eos_token_ids"),
    (None, "bos_token_id eos_token_id eot_token_id eom_token_id unknown_token_id padding_token_id cls_token_id"),
    (None, "seperator_token_id mask_token_id prefix_token_id suffix_token_id middle_token_id fim_pre_token_id"),
    (None, "fim_suf_token_id fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id"),
    ((False,), "add_sep_token"),
    (([],), "suppress_tokens"),
)
# GGUF's architecture -> transformers' model type, and its class.
_MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# general.sampling.*, llama.cpp's defaults of decoding -> transformers' names.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_ATTENTION, _FEED_FORWARD = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
_GEMMA_PERIOD = 6  # of layers, the last of which has full attention
_FP32_ROUNDING = 1e-5  # relative, of a few steps in fp32


class GgufFile:
    """Metadata and tensors of a GGUF file.

    Raises ModelLoadError: the file is cut, foreign or one of several parts, has another model, or a key that is not
    read.
    """

    def __init__(self, path: Path) -> None:
        reader = _reader(path)
        self.path = path
        self.values: Json = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.name = str(self.values.get("general.architecture"))
        if self.name not in _MODELS:
            raise ModelLoadError(f"{path} has a model of type {self.name!r}: accepted are {', '.join(_MODELS)}")
        if int(self.values.get("split.count") or 1) > 1:
            raise ModelLoadError(f"{path} is one of {self.values['split.count']} parts: join them (llama-gguf-split)")
        if self._get("expert_count"):
            raise ModelLoadError(f"{path} has a mixture of experts, which is not read here: give its safetensors")
        last = self.size("block_count") - 1
        if f"blk.{last}.attn_q.weight" not in self.tensors or "token_embd.weight" not in self.tensors:
            raise ModelLoadError(f"{path} has no weights of attention: a whole language model is needed")
        self._check_keys("tokenizer.ggml.", _TOKENIZER_KEYS)
        self._check_keys(f"{self.name}.", _MODEL_KEYS | (_GEMMA_KEYS if self.name == "gemma3" else {}))

    def _check_keys(self, prefix: str, accepted: _Keys) -> None:
        for key in self.values:
            if not key.startswith(prefix):
                continue
            name, value = key.removeprefix(prefix), self.values[key]
            if name not in accepted:
                raise ModelLoadError(f"{self.path}: its key {key} is not known: give its safetensors")
            if (known := accepted[name]) is not None and value not in known:
                words = " or ".join(map(str, known))
                raise ModelLoadError(
                    f"{self.path}: its key {key} is {value}, of which {words} is read: give safetensors"
                )

    def _get(self, name: str, default: object = None) -> Any:
        """A value of the model; an array of one repeated value is that value."""
        value = self.values.get(f"{self.name}.{name}", default)
        return value[0] if isinstance(value, list) and len(set(value)) == 1 else value

    def size(self, name: str, default: int | None = None) -> int:
        """A size; raises ModelLoadError if it is missing or differs by layer."""
        value = self._get(name, default)
        if isinstance(value, int) and value > 0:
            return value
        raise ModelLoadError(f"{self.path}: {self.name}.{name} is {value!r}: one number above 0 is needed")

    def _number(self, name: str, default: float | None = None) -> float:
        """A number of 32 bits as its shortest decimal; raises ModelLoadError if it is missing."""
        value = self._get(name, default)
        if isinstance(value, int | float):
            return _shortest(value)
        raise ModelLoadError(f"{self.path}: {self.name}.{name} is {value!r}: a number is needed")

    @property
    def kind(self) -> str:
        """The types of the matrices, the most frequent first."""
        counts = Counter(t.tensor_type.name for t in self.tensors.values() if len(t.shape) > 1)
        return ", ".join(name for name, _ in counts.most_common())

    @property
    def heads(self) -> dict[str, int]:
        """Number of heads of queries and keys, by their projections."""
        count = self.size("attention.head_count")
        return {"q_proj": count, "k_proj": self.size("attention.head_count_kv", count)}

    def is_tied(self) -> bool:
        """Whether the file has no head, or the bits of the embedding as its head."""
        head, embedding = self.tensors.get("output.weight"), self.tensors["token_embd.weight"]
        return head is None or (head.tensor_type == embedding.tensor_type and np.array_equal(head.data, embedding.data))

    def _has_biases(self, parts: tuple[str, ...]) -> bool:
        """Whether some of these matrices have biases."""
        return any(f"blk.0.{part}.bias" in self.tensors for part in parts)

    def config(self, dtype: torch.dtype) -> Json:
        """The config of transformers but for tokens, JSON-ready; raises ModelLoadError for what transformers lacks."""
        model_type, class_name = _MODELS[self.name]
        heads, width = self.heads, self.size("embedding_length")
        head_dim = self.size("attention.key_length", width // heads["q_proj"])
        if self.size("attention.value_length", width // heads["q_proj"]) != head_dim:
            raise ModelLoadError(f"{self.path}: attention.value_length is not key_length: give its safetensors")
        if self.size("rope.dimension_count", head_dim) != head_dim:
            raise ModelLoadError(f"{self.path}: rope.dimension_count is a part of a head: give its safetensors")
        return {
            "architectures": [class_name],
            "model_type": model_type,
            "hidden_size": width,
            "intermediate_size": self.size("feed_forward_length"),
            "num_hidden_layers": self.size("block_count"),
            "num_attention_heads": heads["q_proj"],
            "num_key_value_heads": heads["k_proj"],
            "head_dim": head_dim,
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "max_position_embeddings": self.size("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(head_dim),
            "tie_word_embeddings": self.is_tied(),
            "dtype": str(dtype).removeprefix("torch."),
            **self._of_type(head_dim),
        }

    def sampling(self) -> Json:
        """What the file says about decoding, as transformers' generation config has it; empty if it says nothing."""
        keys = {f"general.sampling.{key}": name for key, name in _SAMPLING.items()}
        found = {name: self.values[key] for key, name in keys.items() if key in self.values}
        found = {name: _shortest(value) if isinstance(value, float) else value for name, value in found.items()}
        samples = found.keys() - {"repetition_penalty"} and found.get("temperature") != 0
        return found | ({"do_sample": True} if samples else {})

    def _of_type(self, head_dim: int) -> Json:
        """Entries of one model type."""
        if self.name == "llama":
            return {"attention_bias": self._has_biases(_ATTENTION), "mlp_bias": self._has_biases(_FEED_FORWARD)}
        if self.name != "gemma3":
            return {}
        layers, window = self.size("block_count"), self._get("attention.sliding_window", 0)
        period = self.size("attention.sliding_window_pattern", _GEMMA_PERIOD) if window else 1
        # As llama.cpp has it: of all sizes the 27B model alone scales by the share of a head.
        scaled = self.size("embedding_length") // self.heads["q_proj"] if layers == 62 else head_dim
        return {
            "sliding_window": window or self.size("context_length"),
            "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)],
            "query_pre_attn_scalar": scaled,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": self._number("final_logit_softcapping", 0) or None,
        }

    def _rope(self, head_dim: int) -> Json:
        kind = self._get("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn"):
            raise ModelLoadError(f"{self.path}: rotary positions of type {kind!r}: give its safetensors")
        rope: Json = {"rope_type": "default", "rope_theta": self._number("rope.freq_base", 10000.0)}
        if rope["rope_theta"] <= 0:
            raise ModelLoadError(
                f"{self.path}: {self.name}.rope.freq_base is {rope['rope_theta']:g}: more than 0 is needed"
            )
        factor = self._number("rope.scaling.factor", self._get("rope.scale_linear", 0)) or 1.0
        if kind != "none" and factor != 1:
            rope |= {"rope_type": kind, "factor": factor}
        if rope["rope_type"] == "yarn":
            length = self.size("context_length")
            rope["original_max_position_embeddings"] = self._get("rope.scaling.original_context_length", 0) or length
        if self.name == "llama" and (factors := self.tensors.get("rope_freqs.weight")) is not None:
            rope = self._llama3(rope, dequantized(factors).flatten(), head_dim)
        if self.name == "gemma3":
            local = {"rope_type": "default", "rope_theta": self._number("rope.freq_base_swa", 10000.0)}
            return {"full_attention": rope, "sliding_attention": local}
        return rope

    def _llama3(self, rope: Json, factors: Tensor, head_dim: int) -> Json:
        """Llama 3's scaling, of which the file has only the divisors of the frequencies, (head_dim / 2,)."""
        base, low, high, factor = rope["rope_theta"], 1.0, 4.0, float(factors.max())
        plain = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        waves, length = 2 * math.pi / plain, 8192.0
        between = (factors > 1.001) & (factors < 0.999 * factor)
        if between.any():  # the share of the plain frequency says where between both ends the wave lies
            smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
            length = float((waves * (low + smooth * (high - low)))[between].median().round())
        smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
        same = torch.allclose(1 / ((1 - smooth) / factor + smooth), factors.double(), rtol=_FP32_ROUNDING, atol=0)
        if not same or "factor" in rope:
            raise ModelLoadError(f"{self.path}: its rope_freqs are not Llama 3's alone: give its safetensors")
        lengths = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": int(length)}
        return {"rope_type": "llama3", "rope_theta": base, "factor": factor, **lengths}


def _shortest(value: float) -> float:
    """A number of 32 bits as the shortest decimal that is the same in 32 bits."""
    return float(str(np.float32(value)))


def dequantized(tensor: ReaderTensor, rows: slice = slice(None)) -> Tensor:
    """Rows of a tensor of a GGUF file in fp32."""
    return torch.from_numpy(dequantize(tensor.data[rows], tensor.tensor_type).copy())


def _reader(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except Exception as e:  # ValueError, IndexError, KeyError, of numpy too: by where the file ends
        raise ModelLoadError(f"{path} is no whole GGUF file ({' '.join(str(e).split())[:120]}): fetch it again") from e
