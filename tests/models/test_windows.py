"""Windows and types of layers in a config: every engine computes what the model's class computes without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import skipdecode
from checkpoints import edit_json
from engine_tools import decode
from oracle import active_tokens, oracle_logits
from skipdecode import Schedule, attach
from skipdecode.engine import FastEngine, GatedEngine
from skipdecode.engine.model_reader import READERS
from skipdecode.errors import UnfitModelError, UnsupportedModelError
from skipdecode.models.families import lent_last
from tiny import LATER, LAYERS, OPTIONS, tiny_model
from tuning_data import save_model

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 6
SCHEDULE = Schedule.from_speedup(LAYERS, 2, 8)
PROMPT = tuple(3 + 7 * i % 90 for i in range(19))
NEW = 8
BOTH = {"layer_types": [SLIDING, FULL] * (LAYERS // 2), "sliding_window": WINDOW}
EDITS: dict[str, dict[str, Any]] = {
    "types alternate": {"layer_types": BOTH["layer_types"]},
    "window": {"sliding_window": WINDOW},
    "types full and window": {"layer_types": [FULL] * LAYERS, "sliding_window": WINDOW},
    "both": BOTH,
    "both, late": {"layer_types": [FULL] * 5 + [SLIDING] * 3, "sliding_window": WINDOW},
    "both, forbidden": BOTH | {"use_sliding_window": False},
    "window 1": {"sliding_window": 1},
    "both of 1": BOTH | {"sliding_window": 1},
    "window 0": {"sliding_window": 0},
    "window -1": {"sliding_window": -1},
    "no window": {"sliding_window": None},
    "window of 0 that no layer has": {"layer_types": [FULL] * LAYERS, "sliding_window": 0},
    "chunks": {"layer_types": ["chunked_attention", FULL] * (LAYERS // 2), "attention_chunk_size": WINDOW},
    "a chunk size": {"attention_chunk_size": WINDOW},
    "linear": {"layer_types": ["linear_attention", FULL] * (LAYERS // 2)},
}
QUICK = {
    "gemma3_text": ["both, late", "no window"],
    "llama": ["both", "types full and window", "window", "window 0"],
    "mistral": ["both of 1", "window 1", "window -1"],
    "phi3": ["both", "no window", "types full and window", "window 0"],
    "qwen2": ["both", "both, forbidden", "chunks", "types full and window", "window of 0 that no layer has"],
    "granite": ["both"],
    "falcon_mamba": ["a chunk size"],
    "mamba": ["a chunk size"],
}


def check(model: Any, tokens: list[int], schedule: Schedule) -> None:
    """The tokens are the most probable ones of the model's class, without a cache."""
    text = torch.tensor([[*PROMPT, *tokens]])
    active = active_tokens(schedule, len(PROMPT), text.shape[1])
    logits = oracle_logits(model, text, torch.ones_like(text), active)[0, len(PROMPT) - 1 : -1]
    picked = logits[torch.arange(len(tokens)), text[0, len(PROMPT) :]]
    torch.testing.assert_close(picked, logits.max(-1).values, rtol=0, atol=1e-4)


@torch.no_grad()
def generated(model: Any, schedule: Schedule) -> list[int]:
    with attach(model, schedule):
        text = model.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    return text[0, len(PROMPT) :].tolist()


REFUSED = {
    "mistral": ["window 0", "window -1"],
    "qwen2": ["both, forbidden", "chunks", "linear", "window 0"],
    "gemma3_text": ["no window", "window 0"],
}


@pytest.mark.parametrize("name", ["both", "types full and window", "window"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
@torch.no_grad()
def test_a_loaded_model_is_its_class_on_every_engine(family: str, name: str, tmp_path: Path) -> None:
    """Also transformers' own generate, whose cache follows the config."""
    saved(tmp_path, family, EDITS[name])
    loaded = skipdecode.load(tmp_path)
    rows = {
        engine: skipdecode.LLM(loaded, engine=engine)
        .generate(["ab" * 10], max_new_tokens=NEW, template=False)[0]
        .tokens
        for engine in ("transformers", "fast")
    }
    prompt = torch.tensor([loaded.tokenizer("ab" * 10).input_ids])
    text = prompt
    for _ in range(NEW):
        text = torch.cat([text, loaded.model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    theirs = loaded.model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    right = text[0, prompt.shape[1] :].tolist()
    assert rows == {"transformers": right, "fast": right}
    assert theirs[0, prompt.shape[1] :].tolist() == right


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in REFUSED.items() for name in names])
def test_a_config_that_the_class_cannot_compute_is_refused(family: str, name: str, tmp_path: Path) -> None:
    saved(tmp_path, family, EDITS[name])
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UnsupportedModelError, match=r"sliding_window|layer_types"):
        skipdecode.load(tmp_path)


def saved(folder: Path, family: str, edit: dict[str, Any]) -> None:
    """A checkpoint whose config.json is edited after it was written."""
    edit_json(save_model(folder, model_type=family) / "config.json", **edit)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=() if name in QUICK.get(family, ()) else pytest.mark.slow)
        for family in (*OPTIONS, *LATER)
        for name in EDITS
    ],
)
@torch.no_grad()
def test_engines_compute_what_the_class_computes_or_name_the_reason(family: str, name: str) -> None:
    try:
        model = tiny_model(family, **EDITS[name])
        if family in LATER:
            model(torch.tensor([PROMPT]), use_cache=False)
            model.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, StrictDataclassError):
        pytest.skip("the class cannot be made with this config")
    for schedule in (Schedule.full(LAYERS), lent_last(model.config, SCHEDULE)):
        try:
            tokens = generated(model, schedule)
        except UnsupportedModelError:
            # Every engine names the setting.
            with pytest.raises(UnsupportedModelError, match=r"sliding_window|layer_types"):
                decode(GatedEngine(model, schedule), [PROMPT], NEW)
            with pytest.raises((UnsupportedModelError, UnfitModelError)):
                FastEngine(model, schedule)
            return
        check(model, tokens, schedule)
        assert tokens == decode(GatedEngine(model, schedule), [PROMPT], NEW)[0][0]
        if family in READERS:
            check(model, decode(FastEngine(model, schedule), [PROMPT], NEW)[0][0], schedule)
