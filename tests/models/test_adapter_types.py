"""Every type of adapter of the installed PEFT, and variants of LoRA: PEFT's own logits, or a refusal by name."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM

import skipdecode
from checkpoints import logits
from skipdecode.engine.opening import open_engines
from skipdecode.errors import SkipDecodeError
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.hub import load_model
from tuning_data import save_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TYPES = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
RANK = {"r": 4}
VIRTUAL = {"num_virtual_tokens": 3}
# Small sizes; a type that is not here, such as one of a newer release, is tried with its own.
SIZES: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 9, "init_r": 4, "target_r": 2},
    "ADAMSS": {"r": 8, "num_subspaces": 2},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 2},
    "BEFT": {"target_modules": ["v_proj"]},
    "C3A": {"block_size": 8},
    "CPT": VIRTUAL | {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "OFT": {"oft_block_size": 4},
    "ROAD": {"group_size": 8},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [5, 6, 7]},
    "VBLORA": {"num_vectors": 8, "vector_length": 8},
    "WAVEFT": {"n_frequency": 20},
    **dict.fromkeys(("GRALORA", "HIRA", "LILY", "LORA", "MISS", "PEANUT", "PSOFT", "PVERA", "SHIRA", "VERA"), RANK),
    **dict.fromkeys(("CARTRIDGE", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING"), VIRTUAL),
}
REFUSED = {kind for kind, config in TYPES.items() if issubclass(config, peft.PromptLearningConfig)}
REFUSED |= {"ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "XLORA"}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("LORA", {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    ("LORA", {"bias": "all", "lora_bias": True, "exclude_modules": ["layers.1.self_attn.v_proj"]}),
    ("LORA", {"modules_to_save": ["norm"], "trainable_token_indices": [5, 6]}),
    ("LORA", {"init_lora_weights": "pissa", "bias": "lora_only"}),
    ("LORA", {"target_modules": [], "target_parameters": ["mlp.gate_proj.weight"]}),
    ("VBLORA", {"save_only_topk_weights": True}),
    ("UNILORA", {"save_indices": True}),
]
REFUSED_VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    ("LORA", {"layer_replication": [[0, 5], [3, 8]]}, "layer_replication"),
    ("LORA", {"alora_invocation_tokens": [5]}, "alora"),
    ("LORA", {"lora_bias": True, "target_modules": ["gate_proj"]}, "LORA.*lora_bias"),
    ("LORA", {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    ("LORA", {"init_lora_weights": "corda"}, "corda"),
    ("LORA", {"lora_alpha": math.nan}, "lora_alpha is nan"),
    ("BEFT", {"target_modules": ["gate_proj"]}, "BEFT"),
    ("PVERA", {"sample_at_inference": True}, "PVERA"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2, which has biases in q_proj, k_proj and v_proj alone."""
    return save_model(tmp_path_factory.mktemp("base"), model_type="qwen2")


def settings(kind: str, base: Path, options: dict[str, Any]) -> Any:
    config, options = TYPES[kind], SIZES.get(kind, {}) | options
    if "target_modules" in {field.name for field in fields(config)} and kind != "LN_TUNING":
        options = {"target_modules": ["q_proj", "v_proj"]} | options
    return config(task_type="CAUSAL_LM", base_model_name_or_path=str(base), **options)


def save_with_noise(base: Path, folder: Path, config: Any) -> torch.Tensor:
    """Save an adapter whose numbers are random; returns the logits of what PEFT itself reads."""
    torch.manual_seed(1)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    want = logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval())
    assert not torch.allclose(want, plain, atol=1e-2), "the adapter does nothing"
    return want


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in TYPES if kind not in REFUSED), *VARIANTS], ids=str
)
def test_a_merged_adapter_is_that_of_peft(kind: str, options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    want, close = save_with_noise(base, tmp_path / "a", settings(kind, base, options)), {"atol": 1e-3, "rtol": 1e-3}
    loaded = load_model(str(tmp_path / "a"), device="cpu").model
    torch.testing.assert_close(logits(loaded), want, **close)
    open_engines(loaded, "auto", lambda line: None)  # merges a copy
    torch.testing.assert_close(logits(loaded), want, **close)
    torch.testing.assert_close(logits(merge_adapter(loaded)), want, **close)
    skipdecode.export(tmp_path / "a", tmp_path / "merged", "full", format="merged")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), want, **close)


@pytest.mark.parametrize(
    ("kind", "options", "named"), [*((kind, {}, kind) for kind in sorted(REFUSED)), *REFUSED_VARIANTS], ids=str
)
def test_other_adapters_are_refused(kind: str, options: dict[str, Any], named: str, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    settings(kind, tmp_path / "base", options).save_pretrained(tmp_path / "a")
    with pytest.raises(SkipDecodeError, match=named) as caught:
        load_model(str(tmp_path / "a"), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LORA", {"init_lora_weights": "pissa"}),
        ("LORA", {"init_lora_weights": "olora", "use_dora": True}),
        ("LORA", {"bias": "all"}),
        ("ADALORA", {}),
        ("VBLORA", {}),
    ],
    ids=str,
)
def test_what_tune_makes_of_an_adapter_loads(kind: str, options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    want = save_with_noise(base, tmp_path / "a", settings(kind, base, options))
    rows = [{"prompt": f"say {i}", "response": f"xyz {i}"} for i in range(8)]
    run: dict[str, Any] = {"dev": rows[:2], "schedule": "1x", "steps": 1, "learning_rate": 1e-9, "out": tmp_path / "t"}
    if kind != "LORA" or "bias" in options:
        with pytest.raises(SkipDecodeError, match="merge"):
            skipdecode.tune(tmp_path / "a", rows, **run)
        assert not (tmp_path / "t").exists()
    else:
        skipdecode.tune(tmp_path / "a", rows, **run)
        loaded = load_model(str(tmp_path / "t"), device="cpu").model
        torch.testing.assert_close(logits(loaded), want, atol=1e-3, rtol=1e-3)


def test_a_package_that_a_type_needs_is_named(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings("ADAMSS", base, {}).save_pretrained(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SkipDecodeError, match="pip install scikit-learn") as caught:
        load_model(str(tmp_path / "a"), device="cpu")
    assert "\n" not in str(caught.value)
