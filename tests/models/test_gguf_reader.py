"""A GGUF file as a model: the same weights, positions and tokens as in the checkpoint that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from checkpoints import byte_tokenizer, chatml_tokenizer
from llama_cpp import likeliest, llama_model
from skipdecode.cli import main
from skipdecode.engine.opening import load
from skipdecode.engine.rules import Rules, rules_of
from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.gguf_file import SPLITS, write_gguf
from skipdecode.models.loading.gguf_metadata import GgufFile, dequantized
from skipdecode.models.loading.gguf_tokenizer import _SPLIT_OF, GgufTokenizer
from skipdecode.models.loading.hub import configured_ends, load_model
from tiny import ROPES, tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")
GGUFValue = gguf.gguf_writer.GGUFValue
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "plain", {}),
    "llama, tied, scaled": ("llama", "llama3", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", "linear", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", "yarn", {"sliding_window": None}),
    "qwen2": ("qwen2", "yarn", {"use_sliding_window": False}),
    "qwen3": ("qwen3", "linear", {"head_dim": 64}),
}


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
    exact = load(file, dtype="float32").model.model.layers[0]
    assert torch.equal(exact.input_layernorm.weight, model.model.layers[0].input_layernorm.weight)
    stored = GgufFile(file).tensors["blk.0.ffn_up.weight"]
    assert torch.equal(exact.mlp.up_proj.weight, dequantized(stored))
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
    assert "model_type      llama" in capsys.readouterr().out
    assert main(["export", str(file), "--out", str(tmp_path / "out")]) == 0
    assert main(["generate", str(tmp_path / "out"), *command]) == 0
    assert capsys.readouterr().out.endswith(first)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_broken_file_is_one_line(foreign: bool, tmp_path: Path, capsys: Any) -> None:
    _, file = written(tmp_path)
    file.write_bytes(b"not a model" * 1000 if foreign else file.read_bytes()[:5000])
    assert main(["generate", str(file), "x"]) != 0
    message = capsys.readouterr().err.strip()
    assert "no whole GGUF file" in message
    assert "Traceback" not in message
    assert not list((tmp_path / "cache" / "models").glob("[!.]*"))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("general.architecture", "rwkv7", "model of type 'rwkv7'"),
        ("split.count", 3, "one of 3 parts"),
        ("llama.expert_count", 8, "mixture of experts"),
        ("llama.rope.scaling.type", "longrope", "'longrope'"),
        ("llama.rope.freq_base", 0.0, "freq_base is 0: more than 0"),
        ("llama.rope.scaling.alpha", 2.0, "key llama.rope.scaling.alpha is not known"),
        ("llama.rope.scaling.yarn_beta_fast", 8.0, "yarn_beta_fast is 8.0, of which 32 is read"),
        ("llama.attention.scale", 0.5, "attention.scale is 0.5"),
        ("llama.attention.sliding_window", 16, "sliding_window is 16"),
        ("llama.attention.value_length", 8, "value_length is not key_length"),
        ("tokenizer.ggml.add_sep_token", True, "add_sep_token is True"),
        ("tokenizer.ggml.normalizer.lowercase", True, "normalizer.lowercase is not known"),
        ("llama.rope.dimension_count", 8, "part of a head"),
        ("tokenizer.ggml.pre", "unknown-split", "'unknown-split'"),
        ("tokenizer.ggml.model", "none", "has no tokenizer"),
        ("tokenizer.ggml.model", "rwkv", "'rwkv'"),
        ("tokenizer.ggml.merges", ["zz yy"], "not read here, give its safetensors: "),
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


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_the_head_is_as_stored(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", tie_word_embeddings=True, vocab_size=320, hidden_size=64)
    stored = gguf.GGMLQuantizationType[kind]
    head = gguf.quantize(model.lm_head.weight.detach().numpy(), stored)
    before_header(monkeypatch, lambda writer: writer.add_tensor("output.weight", head, raw_dtype=stored))
    write_gguf(model, tmp_path / "model.gguf", "q4_0", byte_tokenizer())
    read = load(tmp_path / "model.gguf", dtype="float32").model
    assert read.config.tie_word_embeddings is (kind == "Q8_0")  # of the embedding: then the bits are the same
    assert torch.equal(read.lm_head.weight, torch.from_numpy(gguf.dequantize(head, stored)))


def test_rules_of_a_file_are_followed_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "penalty_repeat": 1.05}
    file = changed_file(tmp_path, {f"general.sampling.{key}": value for key, value in sampling.items()})
    assert rules_of(load_model(file).model.generation_config) == Rules(repetition_penalty=1.05)
    assert main(["generate", str(file), "--no-template", "red", "--max-new-tokens", "1"]) == 0
    said = capsys.readouterr().err
    assert "follows repetition_penalty=1.05" in said
    assert "leaves out do_sample=True, temperature=0.7, top_k=20, top_p=0.8" in said
    model = tiny_model("llama", vocab_size=320)
    model.generation_config.repetition_penalty = 1.3
    write_gguf(model, tmp_path / "own.gguf", "f16", byte_tokenizer())
    assert rules_of(load_model(tmp_path / "own.gguf").model.generation_config) == Rules(repetition_penalty=1.3)


def before_header(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have the writer's values or tensors changed before a file is written."""
    write = gguf.GGUFWriter.write_header_to_file

    def changed(writer: Any, path: Any = None) -> None:
        change(writer)
        write(writer, path)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", changed)


# ---------------------------------------------------------------------- as llama.cpp

IDS = [i % 250 + 3 for i in range(0, 1200, 11)]
PAIRS = [a + b for a in ("Ġ", "Ċ", "a", "S", "'", "1", "!", "$") for b in ("Ġ", "Ċ", "a", "s", "1", "!", "$")]
SPM = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "<sep>"]
TOKENS: dict[str, dict[str, Any]] = {
    "llama": {
        "tokens": SPM + [f"[PAD{i}]" for i in range(320 - len(SPM))],
        "scores": [0.0] * 259 + [-20.0, -21.0, -22.0, -3.0, -4.0, -2.0, -1.0] + [-99.0] * 54,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 7 + [4] + [5] * 53,
    },
    "gpt2": {
        "tokens": ["<a>", "<s>", "</s>", *byte_tokenizer().convert_ids_to_tokens(list(range(3, 259))), *PAIRS, "<end>"]
        + [f"[PAD{i}]" for i in range(320 - 260 - len(PAIRS))],
        "merges": [f"{pair[0]} {pair[1]}" for pair in PAIRS],
        "token_type": [1, 3, 3] + [1] * (256 + len(PAIRS)) + [4] + [5] * (320 - 260 - len(PAIRS)),
    },
}
OPTIONAL_KEYS: dict[str, list[Any]] = {
    "rope.scaling.type": ["none", "linear", "yarn"],
    "rope.scaling.factor": [4.0, 1.0, 0.0],
    "rope.scale_linear": [2.0],
    "rope.scaling.original_context_length": [32],
    "attention.head_count_kv": [[2] * 8],
    "attention.layer_norm_rms_epsilon": [0.5],
    "rope.freq_base": [500.0],
    "logit_scale": [1.0],
}


def changed_file(tmp_path: Path, keys: dict[str, Any], family: str = "llama", drop: tuple[str, ...] = ()) -> Path:
    """A file with some values changed."""

    def change(writer: Any) -> None:
        for key in drop:
            writer.kv_data[0].pop(key, None)
        for key, value in keys.items():
            # llama.cpp refuses signed numbers here.
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.kv_data[0][key] = GGUFValue(value, kind)

    model = tiny_model(family, vocab_size=320, hidden_size=128, head_dim=32, num_hidden_layers=8)
    with pytest.MonkeyPatch.context() as patch:
        before_header(patch, change)
        write_gguf(model, tmp_path / "model.gguf", "f16", byte_tokenizer())
    return tmp_path / "model.gguf"


@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from(["llama", "qwen3"]),
    chosen=st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in OPTIONAL_KEYS.items()}),
)
def test_keys_as_llama_cpp(family: str, chosen: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    tokens = {f"tokenizer.ggml.{name}": value for name, value in TOKENS["gpt2"].items()}  # llama.cpp needs merges
    file = changed_file(
        tmp_path_factory.mktemp("keys"), {f"{family}.{key}": v for key, v in chosen.items()} | tokens, family
    )
    found = torch.tensor(likeliest(file, IDS))[:, None]
    with torch.no_grad():
        expected = load_model(file, dtype="float32").model(torch.tensor([IDS])).logits[0]
    assert (expected.amax(-1) - expected.gather(1, found)[:, 0]).max() < 0.5


SWITCHES = {name: st.booleans() for name in ("add_bos_token", "add_eos_token", "add_space_prefix")}


@settings(max_examples=30, deadline=None)
@given(
    model=st.sampled_from(["llama", "gpt2"]),
    pre=st.sampled_from([*_SPLIT_OF]),
    chosen=st.fixed_dictionaries({}, optional=SWITCHES | {"bos_token_id": st.just(5), "eos_token_id": st.just(2)}),
    texts=st.lists(st.text("ab1S's!$ \n", max_size=20), min_size=5, max_size=5),
)
def test_texts_are_the_tokens_of_llama_cpp(
    model: str, pre: str, chosen: dict[str, Any], texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = {"model": model, "pre": pre} | TOKENS[model] | chosen
    unnamed = tuple(
        f"tokenizer.ggml.{name}" for name in ("add_bos_token", "add_eos_token", "bos_token_id", "eos_token_id")
    )
    file = changed_file(
        tmp_path_factory.mktemp("tokens"),
        {f"tokenizer.ggml.{name}": value for name, value in keys.items()},
        drop=unnamed,
    )
    model_there = llama_model(file)
    right, read = model_there.get_vocab(), GgufTokenizer(GgufFile(file))
    tokenizer = read.tokenizer()
    for text in [*texts, "a<sep> b</s>a", "1234 a's"]:
        assert tokenizer(text).input_ids == right.tokenize(text, add_special=True, parse_special=True)
    assert set(read.end_ids()) == {i for i in range(320) if right.is_eog(i)}
