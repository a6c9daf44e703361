"""PEFT adapters: merged into the weights, on other bases, with tokens that their base has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import skipdecode
from checkpoints import edit_json, logits
from engine_tools import decode
from kernel_reference import kernels_or_skip
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.engine.opening import open_engines
from skipdecode.errors import ModelLoadError, UsageError
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.hub import load_model
from tiny import LAYERS, tiny_model
from tuning_data import save_model

# PEFT warns of shared tensors, and of embeddings that it saves.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EXACT: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
# What an adapter changes -> whether a head that shared the embedding's tensor needs a tensor of its own.
SPLITS: list[tuple[dict[str, Any], bool]] = [
    ({"target_modules": ["lm_head"]}, True),
    ({"target_modules": ["embed_tokens", "q_proj"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True),
    ({"target_modules": ["lm_head"], "use_dora": True}, True),
    ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}, False),
    ({"target_modules": ["q_proj"]}, False),
]


def adapted(family: str = "llama", *, tied: bool, **lora: Any) -> Any:
    """A PeftModel in which every number of the adapter is random."""
    return wrapped(tiny_model(family, tie_word_embeddings=tied), **lora)


def wrapped(model: Any, **lora: Any) -> Any:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **lora)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize(
    ("lora", "splits", "tied"),
    [(*case, tied) for case in SPLITS for tied in (True, False)]
    + [({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, False, True)],
    ids=str,
)
def test_a_merge_unties_only_what_differs(lora: dict[str, Any], splits: bool, tied: bool, tmp_path: Path) -> None:
    model = adapted(tied=tied, **lora)
    want = logits(model)
    merged = merge_adapter(model)
    torch.testing.assert_close(logits(merged), want, **EXACT)
    shared = merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert shared == merged.config.tie_word_embeddings == (tied and not splits)
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), want, **EXACT)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt"])
def test_both_engines_run_an_adapter_on_a_shared_head(family: str) -> None:
    kernels_or_skip()
    model = adapted(family, tied=True, target_modules=["lm_head"])
    notes: list[str] = []
    sources = [open_engines(model, engine, notes.append) for engine in ("fast", "transformers")]
    fast, slow = (decode(one.engine(Schedule.constant(LAYERS, 5)), [[5, 6, 7], [9]], 8) for one in sources)
    assert fast == slow
    assert not notes


# ---------------------------------------------------------------------- on which base


def save(model: Any, folder: Path, base: Path, **options: Any) -> None:
    model.save_pretrained(folder, **options)
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(base))


def grown(tmp_path: Path, *, tied: bool = False, **lora: Any) -> Any:
    """A PeftModel of the base in tmp_path/base, and two tokens more."""
    save_model(tmp_path / "base", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(261, mean_resizing=False)
    return wrapped(model, **lora)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=str,
)
def test_an_adapter_with_added_tokens_brings_their_rows(tmp_path: Path, lora: dict[str, Any], tied: bool) -> None:
    model = grown(tmp_path, tied=tied, **lora)
    model.active_peft_config.base_model_name_or_path = str(tmp_path / "base")  # by which PEFT sees that it has grown
    save(model, tmp_path / "adapter", tmp_path / "base")
    loaded = load_model(str(tmp_path / "adapter"), device="cpu").model
    ids = torch.tensor([[5, 259, 6, 260]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, **EXACT)
        torch.testing.assert_close(merge_adapter(loaded)(ids).logits, model(ids).logits, **EXACT)


def test_added_tokens_without_rows_are_refused_with_both_sizes(tmp_path: Path) -> None:
    model = grown(tmp_path, target_modules=["embed_tokens"])
    save(model, tmp_path / "adapter", tmp_path / "base", save_embedding_layers=False)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(tmp_path / "adapter"))
    assert {"261", "259"} <= set(str(caught.value).replace(",", "").split())
    assert "\n" not in str(caught.value)


def test_an_adapter_with_added_tokens_is_tuned_on_only_when_merged(tmp_path: Path, capsys: Any) -> None:
    model = grown(tmp_path, target_modules=["q_proj"])
    model.active_peft_config.base_model_name_or_path = str(tmp_path / "base")
    save(model, tmp_path / "adapter", tmp_path / "base")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"prompt": f"say {c}", "response": c}) + "\n" for c in "abcd"))
    records = ["--train", str(tmp_path / "x.jsonl"), "--dev", str(tmp_path / "x.jsonl"), "--prompt-field", "prompt"]
    pace = ["--response-field", "response", "--steps", "1", "--schedule", "2x"]
    command = ["tune", str(tmp_path / "adapter"), *records, *pace, "--batch-size", "2", "--out"]
    assert main([*command, str(tmp_path / "on")]) == 2
    assert "--merge" in capsys.readouterr().err.splitlines()[-1]
    assert main([*command, str(tmp_path / "merged"), "--merge"]) == 0
    assert load_model(str(tmp_path / "merged")).model.config.vocab_size == 261


def test_an_adapter_takes_another_directory_of_its_base(tmp_path: Path, capsys: Any) -> None:
    adapter, here = str(tmp_path / "adapter"), str(save_model(tmp_path / "here"))
    model = wrapped(tiny_model("llama", vocab_size=259), target_modules=["q_proj"])
    save(model, tmp_path / "adapter", tmp_path / "gone", save_embedding_layers=False)
    prompt = ["a", "--max-new-tokens", "4", "--output-format", "jsonl"]
    assert main(["generate", adapter, *prompt]) == 2
    assert "give another as base" in capsys.readouterr().err
    assert main(["generate", adapter, "--base", here, *prompt]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert skipdecode.LLM(adapter, base=here).generate(["a"], max_new_tokens=4)[0].text == text
    torch.testing.assert_close(logits(skipdecode.load(adapter, base=here, device="cpu").model), logits(model), **EXACT)
    assert main(["export", adapter, "--base", here, "--out", str(tmp_path / "out")]) == 0
    torch.testing.assert_close(logits(load_model(str(tmp_path / "out"), device="cpu").model), logits(model), **EXACT)
    assert [main(["info", *more]) for more in ([adapter], [adapter, "--base", here], ["--base", here])] == [2, 0, 2]


def test_another_base_is_refused_where_it_means_nothing(tmp_path: Path, capsys: Any) -> None:
    here, adapter = str(save_model(tmp_path / "here")), str(tmp_path / "adapter")
    save(wrapped(tiny_model("llama"), target_modules=["q_proj"]), tmp_path / "adapter", tmp_path / "here")
    with pytest.raises(UsageError, match="no adapter"):
        skipdecode.load(here, base=here)
    with pytest.raises(ModelLoadError, match="an adapter itself"):
        skipdecode.load(adapter, base=adapter)
    with pytest.raises(UsageError, match=r"skipdecode\.load"):
        skipdecode.LLM(skipdecode.load(here), base=here)
    assert main(["export", here, "--base", here, "--out", str(tmp_path / "out")]) == 2
    assert "no adapter" in capsys.readouterr().err
