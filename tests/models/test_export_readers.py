"""What other programs read in files that this package writes: transformers 4, llama.cpp."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import byte_tokenizer, edit_json, save_adapter
from llama_cpp import likeliest
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.errors import UsageError
from skipdecode.models.loading.gguf_file import write_gguf
from skipdecode.models.loading.saving import save_model, save_tokenizer, save_tuned
from tiny import LAYERS, OPTIONS, ROPES, tiny_model
from tuning_data import save_model as save_tiny

IDS = torch.tensor([[3 + i * 7 % 90 for i in range(100)]])
DEFAULT, LINEAR, DYNAMIC, YARN, LLAMA3 = ROPES.values()
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.3, 2.6, 2.9]}
LONG |= {"rope_type": "longrope", "original_max_position_embeddings": 32}


def by_layer(full: dict[str, Any]) -> dict[str, Any]:
    local = DEFAULT | {"rope_theta": 777.0}
    return {"full_attention": full | {"rope_theta": 500000.0}, "sliding_attention": local}


# Family, its rotary positions with a base that is no default, and the old names of these settings.
THETA = {"rope_theta": 500000.0}
OLD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "base": ("llama", DEFAULT | THETA, THETA),
    "llama3": ("llama", LLAMA3 | THETA, THETA | {"rope_scaling": LLAMA3}),
    "linear": ("qwen2", LINEAR | THETA, THETA | {"rope_scaling": LINEAR}),
    "yarn": ("qwen3", YARN | THETA, THETA | {"rope_scaling": YARN}),
    "long": (
        "phi3",
        LONG | THETA,
        THETA | {"rope_scaling": {"type": "longrope"} | {name: LONG[name] for name in ("short_factor", "long_factor")}},
    ),
    "long, with a factor": ("llama", LONG | THETA | {"factor": 3.0}, THETA | {"original_max_position_embeddings": 32}),
    "part of a head": ("phi", DEFAULT | THETA | {"partial_rotary_factor": 0.5}, THETA | {"partial_rotary_factor": 0.5}),
    "names of GPT-NeoX": (
        "gpt_neox",
        LINEAR | THETA | {"partial_rotary_factor": 0.5},
        {"rotary_emb_base": 500000.0, "rotary_pct": 0.5, "rope_scaling": LINEAR},
    ),
    "two bases": ("gemma3_text", by_layer(LINEAR), THETA | {"rope_local_base_freq": 777.0, "rope_scaling": LINEAR}),
}


def entries(folder: Path, file: str = "config.json") -> dict[str, Any]:
    return dict(json.loads((folder / file).read_text()))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def positions(case: str) -> Any:
    family, rope, _ = OLD[case]
    length = {"original_max_position_embeddings": 32} if family == "phi3" else {}
    return tiny_model(family, rope_parameters=json.loads(json.dumps(rope)), **length)


@pytest.mark.parametrize("case", OLD)
def test_rotary_positions_stand_under_their_old_names_too(case: str, tmp_path: Path):
    model = positions(case)
    save_model(model, None, tmp_path, shown=tmp_path)
    written = entries(tmp_path)
    assert written | OLD[case][2] == written
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_old_names_without_equivalent_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rope = {"full_attention": DEFAULT | THETA, "sliding_attention": LINEAR | THETA}
    save_model(tiny_model("gemma3_text", rope_parameters=rope), None, tmp_path, shown=tmp_path)
    assert "transformers 4" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["export", "tune", "tokenizer of an adapter"])
def test_every_saved_directory_is_for_older_readers(path: str, tmp_path: Path):
    base, out = tmp_path / "base", tmp_path / "out"
    tokenizer, model = byte_tokenizer(), positions("llama3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    if path == "export":
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
        assert main(["export", str(base), "--out", str(out)]) == 0
    else:
        adapted = save_adapter(tmp_path / "adapter", "base") if path != "tune" else model
        save_tuned(adapted, tokenizer, Schedule.full(LAYERS), out)
    named = entries(out, "tokenizer_config.json")
    assert named["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert named["additional_special_tokens"] == ["<|end|>"]
    assert "extra_special_tokens" not in named
    assert AutoTokenizer.from_pretrained(out)("a<|end|>").input_ids == tokenizer("a<|end|>").input_ids
    if "adapter" not in path:
        assert entries(out)["rope_scaling"] == LLAMA3


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_weights_have_the_permissions_of_other_files(mask: int, tmp_path: Path):
    before = os.umask(mask)
    try:
        save_tuned(tiny_model("llama"), None, Schedule.full(LAYERS), tmp_path / "all")
        save_tuned(save_adapter(tmp_path / "x", "base"), byte_tokenizer(), Schedule.full(LAYERS), tmp_path / "lora")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for folder in ("all", "lora") for file in (tmp_path / folder).iterdir()}
    assert modes == {0o666 & ~mask}


# ---------------------------------------------------------------------- transformers 4

READER = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
transformers.logging.set_verbosity_error()
assert transformers.__version__.startswith("4.57."), transformers.__version__
for folder in sys.argv[1:]:
    if folder.endswith("tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for text, ids in json.load(open(folder + "/expected.json")):
            assert tokenizer(text).input_ids == ids, (folder, text)
        continue
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.load(folder + "/ids.pt")).logits
    away = (found - torch.load(folder + "/logits.pt")).abs().max().item()
    assert away < 1e-3, (folder, away)
print("read", len(sys.argv) - 1)
"""


@pytest.mark.slow
def test_transformers_4_57_reads_the_same_models_and_tokens(tmp_path: Path):
    package, texts = tmp_path / "package", ["the eagle 12", " a  b\n<|end|>c", "<s>x</s>"]
    install = ["install", "-q", "--no-deps", "--target", str(package)]
    wanted = ["transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.0"]
    done = subprocess.run([sys.executable, "-m", "pip", *install, *wanted], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the older release cannot be fetched: {done.stderr[-200:]}")
    models = {name.replace(" ", "-"): positions(name) for name in OLD}
    models |= {family: tiny_model(family) for family in OPTIONS}
    for name, model in models.items():
        save_model(model, None, tmp_path / name, shown=tmp_path)
        torch.save(IDS, tmp_path / name / "ids.pt")
        torch.save(logits(model), tmp_path / name / "logits.pt")
    for starts in (True, False):
        tokenizer = AutoTokenizer.from_pretrained(sentencepiece_like(tmp_path / f"source-{starts}", starts))
        assert (tokenizer("a").input_ids[0] == tokenizer.bos_token_id) == starts
        folder = tmp_path / f"{starts}-tokenizer"
        save_tokenizer(tokenizer, folder, shown=folder)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "expected.json").write_text(json.dumps([(text, tokenizer(text).input_ids) for text in texts]))
        models[folder.name] = tokenizer
    command = [sys.executable, "-c", READER, *(str(tmp_path / name) for name in models)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    )
    assert done.stdout.strip() == f"read {len(models)}", done.stderr[-2000:]


def sentencepiece_like(folder: Path, starts: bool) -> Path:
    """A Llama tokenizer with or without start token; older releases take the class's default, with one."""
    from transformers import LlamaTokenizer

    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *"abcdeglhtx12"]
    tokenizer = LlamaTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], add_bos_token=starts)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


# ---------------------------------------------------------------------- heads


@pytest.fixture
def other_head(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint whose config says that the head is the embedding, and whose file has another head."""
    model, folder = tiny_model("llama", vocab_size=259), tmp_path / "other"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    edit_json(folder / "config.json", tie_word_embeddings=True)
    return folder, model


def test_a_head_of_its_own_is_written_whatever_the_config_says(other_head: tuple[Path, Any], tmp_path: Path):
    folder, model = other_head
    assert main(["export", str(folder), "--format", "gguf", "--out", str(tmp_path / "gguf")]) == 0
    tensors = gguf.GGUFReader(tmp_path / "gguf" / "other-f16.gguf").tensors
    (head,) = [each for each in tensors if each.name == "output.weight"]
    torch.testing.assert_close(torch.tensor(head.data).float(), model.lm_head.weight.detach(), atol=1e-3, rtol=0)
    assert main(["export", str(folder), "--out", str(tmp_path / "hf")]) == 0
    assert entries(tmp_path / "hf")["tie_word_embeddings"] is False
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"], model.lm_head.weight)


def test_a_tied_head_is_written_once(tmp_path: Path):
    save_tiny(tmp_path / "tied", tie_word_embeddings=True)
    assert main(["export", str(tmp_path / "tied"), "--format", "gguf", "--out", str(tmp_path / "gguf")]) == 0
    names = [each.name for each in gguf.GGUFReader(tmp_path / "gguf" / "tied-f16.gguf").tensors]
    assert "output.weight" not in names
    assert main(["export", str(tmp_path / "tied"), "--out", str(tmp_path / "hf")]) == 0
    assert entries(tmp_path / "hf")["tie_word_embeddings"] is True


# ---------------------------------------------------------------------- llama.cpp


def scaled(family: str, rope: dict[str, Any]) -> Any:
    window = {"mistral": {"sliding_window": None}, "qwen2": {"use_sliding_window": False}}.get(family, {})
    return tiny_model(family, rope_parameters=rope | {"rope_theta": 5000.0}, hidden_size=128, head_dim=32, **window)


@pytest.mark.parametrize(
    ("family", "rope"),
    [("llama", LLAMA3), ("mistral", LLAMA3), ("llama", LINEAR), ("qwen3", LINEAR), ("llama", YARN), ("qwen2", YARN)],
)
def test_llama_cpp_scales_rotary_positions_as_the_model_does(family: str, rope: dict[str, Any], tmp_path: Path):
    model = scaled(family, rope)
    write_gguf(model, tmp_path / "x.gguf", "f16")
    found = torch.tensor(likeliest(tmp_path / "x.gguf", IDS[0].tolist()))[:, None]

    def lost(model: Any) -> float:
        """By how much the logits of these tokens are below the highest ones, at most."""
        expected = logits(model)[0]
        return float((expected.amax(-1) - expected.gather(1, found)[:, 0]).max())

    assert lost(model) < 0.5 < 5 < lost(scaled(family, DEFAULT))


@pytest.mark.parametrize(
    ("family", "rope"),
    [("qwen2", LLAMA3), ("llama", YARN | {"attention_factor": 1.3}), ("llama", LONG), ("llama", DYNAMIC)],
)
def test_rotary_positions_that_llama_cpp_lacks_are_refused(family: str, rope: dict[str, Any], tmp_path: Path):
    for unlike in (tiny_model("opt"), tiny_model("mistral")):  # another kind of model; windows
        with pytest.raises(UsageError, match=r"cannot be written for llama\.cpp here"):
            write_gguf(unlike, tmp_path, "f16")
    with pytest.raises(UsageError, match="format hf"):
        write_gguf(scaled(family, rope | {k: v * 4 for k, v in rope.items() if isinstance(v, list)}), tmp_path, "f16")
