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
from transformers import AutoConfig

from skipdecode.common.jsonl import Json
from skipdecode.common.progress import progress_bar
from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.gguf_file import tensor_names, unpaired
from skipdecode.models.loading.gguf_metadata import GgufFile, dequantized
from skipdecode.models.loading.gguf_tokenizer import GgufTokenizer
from skipdecode.models.loading.saving import save_tokenizer, with_old_names
from skipdecode.models.loading.stored import without_numbers

VERSION = 3
"""Of the conversion: checkpoints that another one made are made anew."""
_SHARD_BYTES = 2**28
_PART_VALUES = 2**22  # dequantized at once, in fp32


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
    decoding = file.sampling() | tokens.special_ids() | {"eos_token_id": tokens.end_ids()}
    (target / "config.json").write_text(json.dumps(with_old_names(config), indent=2) + "\n", encoding="utf-8")
    (target / "generation_config.json").write_text(json.dumps(decoding) + "\n", encoding="utf-8")
    save_tokenizer(tokens.tokenizer(), target, shown=target)
    _write_tensors(file, config, target, stored)
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


def _weights(file: GgufFile, config: Json, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Names of transformers, and the weights; biases of a Llama that the file does not have are 0."""
    expected = without_numbers(AutoConfig.for_model(**config)).state_dict()
    names, known = tensor_names(file.name, config["num_hidden_layers"]), set[str]()
    if config["tie_word_embeddings"]:
        expected.pop("lm_head.weight", None)
        known.add("output.weight")
    if file.name == "llama":
        known.add("rope_freqs.weight")
    stored = {name: names.get_name(name, (".weight", ".bias")) for name in expected}
    if unknown := sorted(file.tensors.keys() - known - {*stored.values()}):
        raise ModelLoadError(f"{file.path} has a tensor {unknown[0]}, which is not known: give its safetensors")
    for name, shaped in expected.items():
        *_, part, kind = name.split(".")
        if (tensor := file.tensors.get(stored[name])) is not None:
            weight = _in_type(tensor, dtype)
            if file.name == "llama" and part in file.heads:
                weight = unpaired(weight, file.heads[part])
            if file.name == "gemma3" and part.endswith("norm"):
                weight -= 1  # the file has the whole factor, transformers what is added to 1
            yield name, weight
        elif kind == "bias" and file.name == "llama":
            yield name, torch.zeros(shaped.shape, dtype=dtype)


def _write_tensors(file: GgufFile, config: Json, target: Path, dtype: torch.dtype) -> None:
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
        for name, weight in _weights(file, config, dtype):
            shard[name], total = weight, total + weight.nbytes
            bar.update()
            if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
                flush()
        if shard:
            flush()
        bar.total = bar.n
    index = {"metadata": {"total_size": total}, "weight_map": {n: file.name for file, names in files for n in names}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")
