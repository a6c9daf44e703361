"""Every causal LM type of the installed transformers, tiny: does it decode under schedules as the oracle says?

``python tests/helpers/survey.py [TYPE …]`` prints a line a type: its row in the table of families or the reason for
which it has none. Types without a row are tried with the row that their model suggests.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import oracle
from every import suited
from oracle import active_tokens, oracle_logits
from skipdecode import Schedule, attach
from skipdecode.models.families import _REFUSED, FAMILIES, Family
from tiny import LAYERS, SCHEDULES, ragged_prompts, tiny_model

NEW = 10
_PARTS = ("text_config", "vision_config", "audio_config", "decoder_config", "audio_encoder_config")


def main(types: list[str]) -> None:
    """Try each type and print its line."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for model_type in types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        row = "in the table" if model_type in FAMILIES else "no row"
        try:
            found = survey(model_type)
        except Exception as e:  # the reason is what the survey is for
            found = f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"
        print(f"{model_type:26} {row:13} {found}", flush=True)


def survey(model_type: str) -> str:
    """Largest difference from the oracle by prompt depth, over schedules, in a ragged batch."""
    if model_type in _REFUSED:
        return f"refused: {_REFUSED[model_type]}"
    config = AutoConfig.for_model(model_type)
    if config.is_encoder_decoder:
        return "refused: an encoder-decoder"
    parts = [name for name in _PARTS if hasattr(getattr(config, name, None), "model_type")]
    if parts:
        return f"a composite of {', '.join(parts)}"
    model = tiny_model(model_type)
    layers, path = layer_path(model)
    oracle.LAYER_LISTS = (path,)
    seen: list[Any] = []
    handle = layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.tensor([[5, 6, 7]]), use_cache=False)
    handle.remove()
    returns = len(seen[0]) if isinstance(seen[0], tuple) else 0
    known = FAMILIES.get(model_type)
    rows = [known] if known else [Family(path, returns, each) for each in ("types", "all", "none")]
    rows += [] if known else [Family(path, returns, "cache", recurrent=True)]
    results = []
    for row in rows:
        FAMILIES[model_type] = row
        try:
            prompts = PROMPTS[:2] if row.recurrent else PROMPTS
            worst = [differences(model, prompt) for prompt in prompts]
            if max(worst) < 1e-4:
                return f"ok {row}"
            results.append(f"{row.windows}: " + ", ".join(f"{w:.1e}" for w in worst))
        except Exception as e:
            results.append(f"{row.windows}: {type(e).__name__} {' '.join(str(e).split())[:110]}")
        finally:
            if not known:
                del FAMILIES[model_type]
    return f"{path} {type(seen[0]).__name__} | " + " | ".join(results)


PROMPTS: list[Any] = ["full", "max_exit", (0, 1, 3, 6)]


@torch.no_grad()
def differences(model: Any, prompt: Any) -> float:
    """Largest difference of logits over the schedules, with prompts of this depth."""
    (ids, mask), worst = ragged_prompts(), 0.0
    for schedule in (Schedule.full(LAYERS), *SCHEDULES.values()):
        schedule = suited(model.config.model_type, replace(schedule, prompt=prompt if not schedule.is_full else "full"))
        if schedule is None:
            continue
        options = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True}
        with attach(model, schedule):
            out = model.generate(input_ids=ids, attention_mask=mask, return_dict_in_generate=True, **options)
        whole = torch.cat([mask, mask.new_ones(len(ids), NEW)], 1)
        active = active_tokens(schedule, ids.shape[1], out.sequences.shape[1])
        expected = oracle_logits(model, out.sequences, whole, active)[:, ids.shape[1] - 1 : -1]
        worst = max(worst, float((torch.stack(out.logits, 1) - expected).abs().max()))
    return worst


def layer_path(model: Any) -> tuple[Any, str]:
    """The list of decoder layers and its path, found by its length."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == LAYERS:
            return module, path
    raise ValueError("no list of as many modules as layers")


if __name__ == "__main__":
    main(sys.argv[1:])
