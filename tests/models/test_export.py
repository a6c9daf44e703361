"""Exported checkpoints: plain transformers gives the text that the schedule gave, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import skipdecode
from checkpoints import CHAT_TEMPLATE, byte_tokenizer, edit_json, save_adapter, save_tokenizer
from every import EVERY, GREEDY, suited
from fits import random_fit
from skipdecode import Schedule, attach
from skipdecode.cli import main
from skipdecode.errors import OptionError, OutputError, UsageError
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.families import FAMILIES
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.export import check_exportable, cut_model
from skipdecode.models.loading.saving import with_old_names
from tiny import LATER, LAYERS, ragged_prompts, tiny_model

NEW = 8
SCATTERED = Schedule(LAYERS, (5, 2, 4, 3, 1), (5,), prompt="max_exit")
# Leaves families with layers of two kinds few of one kind or none, and names the layers of prompts.
ONE_KIND = Schedule(LAYERS, (5, 3, 1), (5,), prompt=(0, 2, 4, 6, 7))
# Families whose config has an entry for each layer.
LISTED = ["cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_neo", "ministral", "olmo3", "qwen2", "qwen2_moe"]
# Entries of a config that depend on a layer's number, and tied weights.
UNUSUAL: list[tuple[str, dict[str, Any], Schedule]] = [
    *((family, {}, ONE_KIND) for family in LISTED),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, SCATTERED),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, SCATTERED),
    ("smollm3", {"no_rope_layers": [1, 0, 0, 1, 1, 0, 1, 1]}, SCATTERED),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4}, SCATTERED),
    ("llama", {"tie_word_embeddings": True}, SCATTERED),
]


def greedy(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = ragged_prompts()
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, **GREEDY)
    return out.sequences, torch.stack(out.logits)


def check_exported(model: Any, schedule: Schedule, folder: Path) -> None:
    with attach(model, schedule):
        text, logits = greedy(model)
    cut_model(model, schedule.layers(0))
    model.save_pretrained(folder)
    small = AutoModelForCausalLM.from_pretrained(folder)
    assert type(small) is type(model)
    assert small.config.num_hidden_layers == len(schedule.layers(0))
    again, same = greedy(small)
    assert again.tolist() == text.tolist()
    assert (same - logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", EVERY)
def test_plain_transformers_gives_the_text_of_the_schedule(family: str, tmp_path: Path):
    if FAMILIES[family].numbered or family == "jamba":
        with pytest.raises(UsageError, match="number"):
            cut_model(tiny_model(family), SCATTERED.layers(0))
        return
    check_exported(tiny_model(family), suited(family, SCATTERED), tmp_path)


@pytest.mark.parametrize("family", [each for each in ("beam", "gemma4_text", "lfm3") if each in LATER])
def test_names_for_transformers_4_change_nothing_for_transformers_5(family: str):
    config = tiny_model(family).config
    assert AutoConfig.for_model(**with_old_names(config.to_dict())).rope_parameters == config.rope_parameters


@pytest.mark.parametrize(("family", "changes", "schedule"), UNUSUAL)
def test_configs_of_the_layers_that_remain(family: str, changes: dict[str, Any], schedule: Schedule, tmp_path: Path):
    check_exported(tiny_model(family, **changes), schedule, tmp_path)


# ---------------------------------------------------------------------- the command

PROMPTS = ["the eagle", "a pub"]


def word_tokenizer() -> Any:
    """Byte-level BPE with words, an added token and a chat template."""
    fast = byte_tokenizer()
    fast = fast.train_new_from_iterator(["the eagle is a pub in the city"] * 9, 290, show_progress=False)
    fast.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    return fast


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """An adapter with a flat schedule and a recipe, on a base model beside it."""
    base, adapter = tmp_path / "base", tmp_path / "tuned"
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model = tiny_model("llama", vocab_size=len(tokenizer) + 3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    save_adapter(adapter, str(base))
    SCATTERED.save(adapter / "skipdecode.json")
    prompt = {"template": "{mr}:", "responses": ["ref"], "chat": False}
    recipe = {"kind": "recipe", "format": 1, "options": {"curriculum": "sampled", "sampled_speedups": [2.0]}}
    recipe |= {"prompt": prompt, "schedule": SCATTERED.to_dict()}
    (adapter / "recipe.json").write_text(json.dumps(recipe))
    return adapter


def texts_of(capsys: Any, *arguments: str) -> str:
    assert main([*arguments, *PROMPTS, "--max-new-tokens", "12", "--dtype", "float32"]) == 0
    return capsys.readouterr().out


def test_the_export_is_an_ordinary_model_with_its_prompt(tuned: Path, capsys: Any):
    out = tuned.parent / "out"
    assert main(["export", str(tuned), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip().endswith("5 of 8 layers: 0, 1, 3, 6, 7")
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], "skipdecode" in config) == (5, False)
    assert {each.name for each in out.iterdir()} >= {"recipe.json", "generation_config.json", "tokenizer.json"}
    made = open_checkpoint(out)
    assert made.schedule is None
    assert made.adapter is None
    assert made.recipe.template is not None
    assert made.recipe.template.text == "{mr}:"
    expected = texts_of(capsys, "generate", str(tuned))
    assert texts_of(capsys, "generate", str(out)) == expected
    assert texts_of(capsys, "generate", str(tuned), "--schedule", "1x") != expected


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=7, seq_len=9), "falls from 7 to 3"),
        (Schedule.constant(LAYERS, 5), "8 layers on prompts and 5"),
    ],
)
def test_tokens_of_different_depths_are_refused(tuned: Path, schedule: Schedule, told: str, capsys: Any):
    (tuned.parent / "base" / "model.safetensors").unlink()
    schedule.save(tuned.parent / "other.json")
    out = tuned.parent / "out"
    command = ["export", str(tuned), "--schedule", str(tuned.parent / "other.json"), "--out", str(out)]
    assert main(command) == 2
    line = capsys.readouterr().err
    assert told in line
    assert "nearest flat schedule runs 5 of 8 layers" in line
    assert not out.exists()


def test_the_nearest_flat_schedule_is_a_flag_away(tuned: Path, capsys: Any):
    falling = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=7, seq_len=9)
    falling.save(tuned.parent / "falling.json")
    out = tuned.parent / "out"
    flat = ["--schedule", f"{tuned.parent / 'falling.json'}:flat:pmax_exit"]
    assert main(["export", str(tuned), *flat, "--out", str(out)]) == 0
    capsys.readouterr()
    assert open_checkpoint(str(out)).num_layers == 5
    assert texts_of(capsys, "generate", str(out)) == texts_of(capsys, "generate", str(tuned), *flat)


def test_a_loaded_model_is_exported_and_stays_as_it_is(tuned: Path, capsys: Any):
    llm = skipdecode.LLM(tuned)
    before = [each.tokens for each in llm.generate(PROMPTS, 8)]
    done = skipdecode.export(llm, tuned.parent / "out")
    assert str(done).endswith("5 of 8 layers: 0, 1, 3, 6, 7")
    assert [each.tokens for each in llm.generate(PROMPTS, 8)] == before
    assert main(["export", str(tuned), "--out", str(tuned.parent / "verb")]) == 0
    weights = ((tuned.parent / name / "model.safetensors").read_bytes() for name in ("out", "verb"))
    assert next(weights) == next(weights)
    with pytest.raises(OutputError, match="holds a model"):
        skipdecode.export(llm, done.path, overwrite=True)
    with pytest.raises(OptionError, match="format='onnx' is not accepted"):
        skipdecode.export(llm, tuned.parent / "new", format="onnx")
    assert skipdecode.export(llm, tuned.parent / "new", "2x:flat:pmax_exit").layers == (0, 1, 6, 7)


def test_bridges_are_refused_by_name(tuned: Path):
    random_fit(tiny_model("llama")).save(tuned / FIT_FILE)
    with pytest.raises(UsageError, match=FIT_FILE):
        check_exportable(SCATTERED, open_checkpoint(str(tuned)))
    assert len(check_exportable(Schedule.full(LAYERS), open_checkpoint(str(tuned)))) == LAYERS


# ---------------------------------------------------------------------- GGUF


@pytest.fixture
def exported(tuned: Path) -> Any:
    """The smaller model as a transformers checkpoint, and its tokenizer."""
    out = tuned.parent / "hf"
    assert main(["export", str(tuned), "--out", str(out)]) == 0
    return AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)


def whole_characters(text: str) -> str:
    """Without the marks of broken bytes: llama.cpp's binding decodes token by token, transformers the whole text."""
    return text.replace("\ufffd", "")


def gguf_of(tuned: Path, kind: str) -> Path:
    out = tuned.parent / "gguf"
    assert main(["export", str(tuned), "--format", "gguf", "--gguf-type", kind, "--out", str(out)]) == 0
    return out / f"tuned-{kind}.gguf"


def test_a_gguf_file_has_the_model_and_its_tokenizer(tuned: Path, exported: Any):
    file = gguf_of(tuned, "f16")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    model, tokenizer = exported
    assert fields["llama.block_count"] == 5
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    words, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert words[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert types[words.index("<|end|>")] == gguf.TokenType.CONTROL
    assert types[-3:] == [gguf.TokenType.UNUSED] * 3
    back = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ids = torch.tensor([tokenizer("the eagle").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, atol=0.05, rtol=0)


def test_a_gguf_file_has_all_chat_templates_of_a_tokenizer(tuned: Path):
    (tuned.parent / "base" / "chat_template.jinja").unlink(missing_ok=True)
    templates = [{"name": name, "template": name + CHAT_TEMPLATE} for name in ("default", "tool_use")]
    edit_json(tuned.parent / "base" / "tokenizer_config.json", chat_template=templates)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(gguf_of(tuned, "f16")).fields.items()}
    assert fields["tokenizer.chat_template"].startswith("default")
    assert fields["tokenizer.chat_template.tool_use"].startswith("tool_use")


def test_llama_cpp_gives_the_text_of_the_schedule(tuned: Path, exported: Any):
    cyllama = pytest.importorskip("cyllama")
    model, tokenizer = exported
    greedy = cyllama.GenerationConfig(temperature=0.0, repeat_penalty=1.0, max_tokens=12, n_gpu_layers=0)
    with cyllama.LLM(str(gguf_of(tuned, "f16")), config=greedy) as llm:
        for prompt in [*PROMPTS, "in the<|end|>city"]:
            ids = tokenizer(prompt).input_ids
            assert llm.vocab.tokenize(prompt, add_special=True, parse_special=True) == ids
            text = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
            expected = tokenizer.decode(text).removesuffix(tokenizer.eos_token)
            assert whole_characters(str(llm(prompt))) == whole_characters(expected)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_llama_cpp_loads_quantized_files(tuned: Path, kind: str):
    cyllama = pytest.importorskip("cyllama")
    greedy = cyllama.GenerationConfig(temperature=0.0, max_tokens=4, n_gpu_layers=0)
    with cyllama.LLM(str(gguf_of(tuned, kind)), config=greedy) as llm:
        assert str(llm("the eagle"))


def test_a_tokenizer_that_llama_cpp_lacks_is_refused(tuned: Path):
    save_tokenizer(tuned.parent / "base")
    with pytest.raises(UsageError, match="byte-level"):
        skipdecode.export(tuned, tuned.parent / "out", format="gguf")
