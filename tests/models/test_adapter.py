"""PEFT adapters: merged into the weights, on other bases, with tokens that their base has not."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import byte_tokenizer, logits
from engine_tools import decode
from kernel_reference import kernels_or_skip
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.engine.opening import open_engines
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.hub import load_model
from tiny import LAYERS, tiny_model

EXACT: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
# What an adapter changes -> whether a head that shared the embedding's tensor needs a tensor of its own.
SPLITS: list[tuple[dict[str, Any], bool]] = [
    ({"target_modules": ["lm_head"]}, True),
    ({"target_modules": ["embed_tokens", "q_proj"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
    ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True),
    ({"target_modules": ["lm_head"], "use_dora": True}, True),
    ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, False),
    ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}, False),
    ({"target_modules": ["q_proj"]}, False),
]


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT warns of shared tensors, and of embeddings that it saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def adapted(family: str = "llama", *, tied: bool, **lora: Any) -> Any:
    """A PeftModel in which every number of the adapter is random."""
    return wrapped(tiny_model(family, tie_word_embeddings=tied), **lora)


def wrapped(model: Any, **lora: Any) -> Any:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **lora)
    with quiet():
        model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("lora", "splits"), SPLITS, ids=str)
def test_a_merge_changes_no_logit_and_unties_only_what_differs(
    lora: dict[str, Any], splits: bool, tied: bool, tmp_path: Path
) -> None:
    if lora.get("ensure_weight_tying") and not tied:
        pytest.skip("needs tied weights")
    model = adapted(tied=tied, **lora)
    want = logits(model)
    merged = merge_adapter(model)
    torch.testing.assert_close(logits(merged), want, **EXACT)
    shared = merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert shared == merged.config.tie_word_embeddings == (tied and not splits)
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), want, **EXACT)


def test_a_plain_model_has_nothing_to_merge() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    assert merge_adapter(model) is model
    assert model.config.tie_word_embeddings


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt"])
def test_both_engines_run_an_adapter_on_a_shared_head(family: str) -> None:
    kernels_or_skip()
    model = adapted(family, tied=True, target_modules=["lm_head"])
    notes: list[str] = []
    sources = [open_engines(model, engine, notes.append) for engine in ("fast", "transformers")]
    fast, slow = (decode(one.engine(Schedule.constant(LAYERS, 5)), [[5, 6, 7], [9]], 8) for one in sources)
    assert fast == slow
    assert not notes


def test_exports_of_an_adapter_on_a_shared_head_have_a_head_of_their_own(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    base, out = tmp_path / "base", tmp_path / "out"
    tokenizer = byte_tokenizer()
    tiny_model("llama", tie_word_embeddings=True, vocab_size=259).save_pretrained(base)
    tokenizer.save_pretrained(base)
    model = wrapped(AutoModelForCausalLM.from_pretrained(base), target_modules=["lm_head"])
    with quiet():
        model.save_pretrained(tmp_path / "adapter")
    for kind in ("hf", "gguf"):
        assert main(["export", str(tmp_path / "adapter"), "--format", kind, "--out", str(out / kind)]) == 0
    torch.testing.assert_close(logits(load_model(str(out / "hf"), device="cpu").model), logits(model), **EXACT)
    assert json.loads((out / "hf" / "config.json").read_text())["tie_word_embeddings"] is False
    (file,) = (out / "gguf").iterdir()
    stored = {tensor.name: torch.tensor(tensor.data).float() for tensor in gguf.GGUFReader(file).tensors}
    head = merge_adapter(copy.deepcopy(model)).lm_head.weight
    torch.testing.assert_close(stored["output.weight"], head, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(stored["token_embd.weight"], model.model.model.embed_tokens.weight, atol=1e-3, rtol=1e-3)
