"""A GGUF file as a checkpoint in the usual form: config, safetensors and tokenizer.

transformers' own reader drops scaled rotary positions and biases, has one rotary base for both kinds of Gemma 3's
layers, ignores how words are split, and holds several copies of the weights. So metadata and tensors are read with the
`gguf` package, a part of a tensor at a time; what would be read wrongly is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf import ReaderTensor
from safetensors.torch import save_file
from torch import Tensor

from skipdecode.common.progress import progress_bar
from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.gguf_file import unpaired
from skipdecode.models.loading.gguf_metadata import ATTENTION, FEED_FORWARD, MODELS, GgufFile, dequantized
from skipdecode.models.loading.gguf_tokenizer import GgufTokenizer
from skipdecode.models.loading.saving import save_tokenizer, with_old_names

VERSION = 2
"""Of the conversion: checkpoints that another one made are made anew."""
_SHARD_BYTES = 2**28
_PART_VALUES = 2**22  # dequantized at once, in fp32
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(path: Path, target: Path, dtype: torch.dtype | None = None) -> str:
    """Fill a directory with the checkpoint of a GGUF file; returns the source in words.

    `dtype` is of the weights; default: fp32 or fp16 if the file has all matrices in it, else bf16.

    Raises ModelLoadError: the file is cut, foreign, one of several parts, or has a model, a key, a scaling or a
    tokenizer that is not read here.
    """
    file = GgufFile(path)
    stored = dtype or {"F32": torch.float32, "F16": torch.float16}.get(file.kind, torch.bfloat16)
    tokens = GgufTokenizer(file)
    config = file.config(stored) | tokens.special_ids()
    ids = tokens.special_ids() | {"eos_token_id": tokens.end_ids()}
    (target / "config.json").write_text(json.dumps(with_old_names(config), indent=2) + "\n", encoding="utf-8")
    (target / "generation_config.json").write_text(json.dumps(ids) + "\n", encoding="utf-8")
    save_tokenizer(tokens.tokenizer(), target, shown=target)
    _write_tensors(file, target, stored)
    return f"{path.name}, {file.kind}"


def _in_type(tensor: ReaderTensor, dtype: torch.dtype) -> Tensor:
    """A tensor in `dtype`, made in parts: fp32 takes twice the memory of the result."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    converted = torch.empty(shape, dtype=dtype)
    rows = max(1, _PART_VALUES // max(1, int(tensor.n_elements) // shape[0]))
    for start in range(0, shape[0], rows):
        part = slice(start, start + rows)
        converted[part] = dequantized(tensor, part).reshape(converted[part].shape).to(dtype)
    return converted


def _named(file: GgufFile) -> Iterator[tuple[str, ReaderTensor, str]]:
    """Names of transformers, the file's tensors, and GGUF's name without its layer."""
    _, _, names = MODELS[file.name]
    for name, tensor in file.tensors.items():
        *path, part, kind = name.split(".")
        if (name == "rope_freqs.weight" and file.name == "llama") or (name == "output.weight" and file.is_tied()):
            continue
        if kind in ("weight", "bias") and path[:1] == ["blk"] and part in names:
            yield f"model.layers.{path[1]}.{names[part]}.{kind}", tensor, part
        elif kind in ("weight", "bias") and not path and part in _OUTER:
            yield f"{_OUTER[part]}.{kind}", tensor, part
        else:
            raise ModelLoadError(f"{file.path} has a tensor {name}, which is not known: give its safetensors")


def _write_tensors(file: GgufFile, target: Path, dtype: torch.dtype) -> None:
    """The weights in shards of `_SHARD_BYTES`, so that only one is held at a time."""
    shard: dict[str, Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    total = 0

    def flush() -> None:
        shard_file = target / f"model-{len(files) + 1:05d}.safetensors"
        save_file(shard, shard_file, metadata={"format": "pt"})
        files.append((shard_file, list(shard)))
        shard.clear()

    with progress_bar(len(file.tensors), "tensor", name=file.path.name) as bar:
        for name, tensor, part in _named(file):
            converted = _in_type(tensor, dtype)
            if file.name == "llama" and part in file.heads:
                converted = unpaired(converted, file.heads[part])
            if file.name == "gemma3" and part.endswith("norm"):
                converted -= 1  # the file has the whole factor, transformers what is added to 1
            shard[name], total = converted, total + converted.nbytes
            bar.update()
            if sum(one.nbytes for one in shard.values()) >= _SHARD_BYTES:
                flush()
        for name, converted in _absent(file, dtype):
            shard[name], total = converted, total + converted.nbytes
        if shard:
            flush()
        bar.total = bar.n
    index = {"metadata": {"total_size": total}, "weight_map": {n: file.name for file, names in files for n in names}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")


def _absent(file: GgufFile, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Biases of transformers' Llama that the file does not have: they are 0."""
    biased = [part for group in (ATTENTION, FEED_FORWARD) if file.has_biases(group) for part in group]
    for layer in range(file.size("block_count") if file.name == "llama" else 0):
        for part in biased:
            name = f"blk.{layer}.{part}"
            if f"{name}.bias" not in file.tensors and f"{name}.weight" in file.tensors:
                rows = int(file.tensors[f"{name}.weight"].shape[1])
                yield f"model.layers.{layer}.{MODELS['llama'][2][part]}.bias", torch.zeros(rows, dtype=dtype)
