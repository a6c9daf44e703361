"""A GGUF file as a model: the same weights, positions and tokens as in the checkpoint that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, pre_tokenizers

from checkpoints import byte_tokenizer, chatml_tokenizer
from skipdecode.cli import main
from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.gguf_file import SPLITS, write_gguf
from skipdecode.models.loading.hub import configured_ends, load_model
from tiny import tiny_model

gguf = pytest.importorskip("gguf")
GGUFValue = gguf.gguf_writer.GGUFValue
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "plain", {}),
    "llama, tied, scaled": ("llama", "llama3", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", "linear", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", "yarn", {"sliding_window": None}),
    "qwen2": ("qwen2", "yarn", {"use_sliding_window": False}),
    "qwen3": ("qwen3", "linear", {"head_dim": 64}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))


def written(tmp_path: Path, name: str = "llama", kind: str = "bf16", tokenizer: Any = None) -> tuple[Any, Path]:
    family, rope, changes = MODELS[name]
    rope_parameters = ROPES[rope] | {"rope_theta": 5000.0}
    model = tiny_model(family, rope_parameters=rope_parameters, vocab_size=320, **{"hidden_size": 64} | changes)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("bias"):
                weight.normal_()
            weight.copy_(weight.bfloat16())
    write_gguf(model, tmp_path / "model.gguf", kind, tokenizer or byte_tokenizer())
    return model, tmp_path / "model.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same(name: str, tmp_path: Path) -> None:
    model, file = written(tmp_path, name)
    read = load_model(file, dtype="float32").model
    ids = torch.arange(3, 120).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-3)
    assert read.config.tie_word_embeddings is model.config.tie_word_embeddings
    assert read.config.max_position_embeddings == model.config.max_position_embeddings


@pytest.mark.parametrize(("kind", "most"), [("f16", 0.02), ("q8_0", 0.1), ("q4_1", 1.5)])
def test_quantized_weights_are_near(kind: str, most: float, tmp_path: Path) -> None:
    model, file = written(tmp_path, kind=kind)
    read = load_model(file).model
    assert read.dtype == (torch.float16 if kind == "f16" else torch.bfloat16)
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        difference = (read.float()(ids).logits - model.float()(ids).logits).abs().mean()
    assert difference < most * model(ids).logits.std()


@pytest.mark.parametrize("split", SPLITS)
def test_words_are_split_as_the_file_says(split: str, tmp_path: Path) -> None:
    tokenizer = chatml_tokenizer()
    parts: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if isinstance(part, dict)
        else pre_tokenizers.Split(Regex(part), "isolated")
        for part in SPLITS[split]
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt-2", "smollm"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, last])
    _, file = written(tmp_path, tokenizer=tokenizer)
    loaded = load_model(file)
    read: Any = loaded.tokenizer
    for text in ("It's 12345 units,\n\n  or 6? Café <|im_end|> x", "  two  spaces", "<|im_start|>user\nhi<|im_end|>"):
        assert read(text).input_ids == tokenizer(text).input_ids
        assert read.decode(read(text).input_ids) == text
    chat = [{"role": "user", "content": "hi 12"}]
    assert read.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    # The end of a turn ends a text too, although the file names the end of a text alone.
    assert set(configured_ends(loaded.model)) == {2, tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_every_verb_takes_a_file(tmp_path: Path, capsys: Any) -> None:
    _, file = written(tmp_path)
    command = ["--no-template", "red hat", "--max-new-tokens", "4"]
    assert main(["generate", str(file), *command]) == 0
    first = capsys.readouterr().out
    assert main(["generate", str(file), *command, "--schedule", "2x"]) == 0
    assert main(["info", str(file)]) == 0
    assert '"model_type": "llama"' in capsys.readouterr().out
    assert main(["export", str(file), "--out", str(tmp_path / "out")]) == 0
    assert main(["generate", str(tmp_path / "out"), *command]) == 0
    assert capsys.readouterr().out.endswith(first)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def _foreign(file: Path) -> None:
    file.write_bytes(b"not a model" * 1000)


@pytest.mark.parametrize(("change", "reason"), [(_cut, "no whole GGUF file"), (_foreign, "no whole GGUF file")])
def test_a_broken_file_is_one_line(change: Any, reason: str, tmp_path: Path, capsys: Any) -> None:
    _, file = written(tmp_path)
    change(file)
    assert main(["generate", str(file), "x"]) != 0
    told = capsys.readouterr().err.strip()
    assert reason in told
    assert "Traceback" not in told
    assert not list((tmp_path / "cache" / "models").glob("[!.]*"))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("general.architecture", "rwkv7", "model of type 'rwkv7'"),
        ("split.count", 3, "one of 3 parts"),
        ("llama.expert_count", 8, "mixture of experts"),
        ("llama.rope.scaling.type", "longrope", "'longrope'"),
        ("llama.rope.dimension_count", 8, "part of a head"),
        ("tokenizer.ggml.pre", "unknown-split", "'unknown-split'"),
        ("tokenizer.ggml.model", "none", "has no tokenizer"),
        ("tokenizer.ggml.model", "rwkv", "'rwkv'"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(
    key: str, value: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = gguf.GGUFValueType.get_type(value)
    before_header(monkeypatch, lambda writer: writer.kv_data[0].__setitem__(key, GGUFValue(value, kind)))
    _, file = written(tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(file)


def test_a_head_that_is_stored_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_head(writer: Any) -> None:
        (model,) = kept
        head = model.lm_head.weight.detach().float().numpy()
        writer.add_tensor(
            "output.weight",
            gguf.quantize(head, gguf.GGMLQuantizationType.Q8_0),
            raw_dtype=gguf.GGMLQuantizationType.Q8_0,
        )

    kept = [tiny_model("llama", tie_word_embeddings=True, vocab_size=320, hidden_size=64)]
    before_header(monkeypatch, add_head)
    write_gguf(kept[0], tmp_path / "model.gguf", "q4_0", byte_tokenizer())
    read = load_model(tmp_path / "model.gguf").model
    assert read.config.tie_word_embeddings
    assert read.lm_head.weight is read.model.embed_tokens.weight


def before_header(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have the writer's values or tensors changed before a file is written."""
    write = gguf.GGUFWriter.write_header_to_file

    def changed(writer: Any, path: Any = None) -> None:
        change(writer)
        write(writer, path)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", changed)


def test_a_directory_with_a_file_names_the_file(tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"give the file .*model\.gguf"):
        load_model(str(tmp_path))
