"""Every causal LM type of the installed transformers, tiny: does it decode under schedules as the oracle says?

``python tests/helpers/survey.py [TYPE …]`` prints a line a type: its row in the table of families or the reason for
which it has none. Types without a row are tried with the row that their model suggests. With ``--out FILE`` it measures
the types in the table alone, for docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import oracle
from every import decoded, suited
from oracle import active_tokens, oracle_logits
from skipdecode import Schedule, attach
from skipdecode.common.environment import environment
from skipdecode.common.jsonl import heading
from skipdecode.engine.model_reader import READERS
from skipdecode.errors import UsageError
from skipdecode.models.families import _REFUSED, FAMILIES, Family, keys_and_values, lenders, lent_last
from skipdecode.models.loading.export import cut_model
from skipdecode.models.loading.gguf_file import _ARCHITECTURES
from skipdecode.models.release import model_cache_name
from skipdecode.vllm.gates import PROJECTS
from tiny import LATER, LAYERS, OPTIONS, SCHEDULES, ragged_prompts, tiny_model

NEW = 10
_PARTS = ("text_config", "vision_config", "audio_config", "decoder_config", "audio_encoder_config")


def main() -> None:
    """Try each type and print its line, or measure each and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if asked.out:
        rows = [{**measured(each), **known(each)} for each in asked.types or sorted([*OPTIONS, *LATER])]
        document = heading("benchmark", "families") | {"environment": environment(), "rows": rows, "faults": faults()}
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
        return
    for model_type in asked.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        row = "in the table" if model_type in FAMILIES else "no row"
        try:
            found = survey(model_type)
        except Exception as e:  # the reason is what the survey is for
            found = f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"
        print(f"{model_type:26} {row:13} {found}", flush=True)


def measured(model_type: str) -> dict[str, Any]:
    """A line of docs/models.md: what the tiny model of a type shows."""
    model, exported = tiny_model(model_type), 0
    layers, names = layer_path(model)[0], " ".join(name for name, _ in model.named_parameters())
    attention = any(re.search("attn|attention", str(layer).lower()) for layer in layers)
    kinds = {"shared KV": lenders(model.config), "latent": "kv_b_proj" in names, "sinks": "sink" in names}
    kinds |= {"mixture": re.search(r"experts|moe\.", names)}
    if FAMILIES[model_type].recurrent:
        kinds = {"hybrid" if attention else "recurrent": True} | kinds
    prompts = ["full", "max_exit", "sets"][: 2 if kinds["shared KV"] or FAMILIES[model_type].recurrent else 3]
    for schedule in (Schedule.even(LAYERS, (4,)), SCHEDULES["constant"]):
        with suppress(UsageError):
            cut_model(deepcopy(model), lent_last(model.config, schedule).layers(0))
            exported += 1
    maps = "sets" in prompts and all(map(keys_and_values, layers))
    halved = lent_last(model.config, Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=5, seq_len=32))
    ids, mask = ragged_prompts()
    with attach(model, halved) as attachment:
        named = {model_cache_name(model): (cache := attachment.new_cache()), "use_cache": True, "do_sample": False}
        model.generate(ids, attention_mask=mask, max_new_tokens=32, **named)
    return {
        "type": model_type,
        "kind": ", ".join(kind for kind, there in kinds.items() if there) or "dense",
        "off by": float(f"{max(differences(model, each) for each in PROMPTS[: len(prompts)]):.0e}"),
        "prompts": ", ".join(prompts),
        "state, bytes": cache.kv_bytes_full(),
        "freed at 2x": cache.kv_bytes_full() - cache.kv_bytes(),
        "fit": "no" if kinds["shared KV"] else "bridges" + maps * ", maps",
        "export": ("no", "some layers", "yes")[exported],
    }


def known(model_type: str) -> dict[str, str]:
    """A line of docs/models.md: what the tables of the package say of a type."""
    family, fast = FAMILIES[model_type], "yes" if model_type in READERS else "no"
    vllm = PROJECTS.get(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ""))
    turn = "same mask" if family.resumes_cache else "own loop"
    return {
        "ragged batch": "in one piece" if family.recurrent else "yes",
        "second turn": turn if family.recurrent else "yes",
        "fast engine, drafts": fast,
        "vLLM": "no" if vllm is None else "yes" if vllm else "full, max_exit",
        "GGUF": "yes" if model_type in _ARCHITECTURES else "no",
    }


def faults() -> list[dict[str, str]]:
    """The second table of docs/models.md: what transformers does wrong, with which types, and what ours does."""
    states = {name: family for name, family in sorted(FAMILIES.items()) if family.recurrent}
    found = {
        "a piece of one token takes padding for text; a later mask cannot hide what states have taken in; packed rows "
        "share states; crop leaves them": (states, "refused"),
        "several tokens on a filled cache begin states anew": (
            [name for name, family in states.items() if not family.continues],
            "right: fed one by one",
        ),
        "positions count from 0 without position_ids": (
            [name for name, family in states.items() if not family.counts_positions],
            "right: they are given",
        ),
        "dt is bounded in long forwards, not in steps (with a finite time_step_limit)": (
            ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"],
            "right: bounded in steps too",
        ),
        "a second turn of generate reads the whole text again": (
            [name for name in states if known(name)["second turn"] == "own loop"],
            "refused",
        ),
        **{reason: ([name], "the type is refused") for name, reason in _REFUSED.items()},
    }
    return [
        {"transformers 5.23": what, "types": ", ".join(names), "an attached model": ours}
        for what, (names, ours) in found.items()
    ]


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
    rows = [Family(path, returns, each, recurrent=each == "cache") for each in ("types", "all", "none", "cache")]
    results = []
    for row in [known] if known else rows:
        FAMILIES[model_type] = row
        try:
            worst = [differences(model, prompt) for prompt in PROMPTS[: 2 if row.recurrent else 3]]
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
        out = decoded(model, schedule, ids, mask, NEW)
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
    main()
