"""Compare schedules with full depth on the embedded model: texts side by side, layers and speed-ups.

The demo generates text for a few built-in prompts at full depth and under several schedules, with the same number of
tokens. It shows the texts, the layers that ran, and three speed-ups: request (time of prompts and steps), decode (time
of the steps after the prompts) and nominal (layers). Restaurant records and chats run on bundled adapters, which were
tuned under the schedules; for chats, the base model is shown too. The first run downloads the model (about 100 MB) into
the user's cache.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipdecode.cli.options import MODEL, EngineOptions
from skipdecode.common.columns import SPEEDUPS, figures, side_by_side
from skipdecode.common.environment import environment
from skipdecode.common.options import Reads, option
from skipdecode.data.prompts import context_length, prompt_room
from skipdecode.models.loading.ref import ModelRef, model_files

if TYPE_CHECKING:
    from skipdecode.evaluation.demo import Setting
    from skipdecode.generation.llm import LLM


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions):
    """Options of `skipdecode demo`."""

    model: str = option(MODEL, default="smollm2-135m", path=Reads(model_files))
    max_new_tokens: int = option("new tokens of each prompt", default=32, least=2)
    rounds: int = option("runs of each schedule, in turn; results are medians", default=3, least=1)
    json: bool = option("print one JSON document", default=False)


def run(config: Config) -> int:
    """Run the demo; returns 0."""
    from skipdecode.evaluation.demo import demo_results, demo_settings
    from skipdecode.generation.llm import LLM

    def opened(name: str) -> LLM:
        loaded = dataclasses.replace(config, model=name).load()
        return LLM(loaded, engine=config.engine, quantization=config.quantization)

    prompt_room(context_length(config.ref.config), config.max_new_tokens)
    settings = demo_settings(opened, config.model, config.max_new_tokens)
    parts = [demo_results(setting, config.max_new_tokens, config.rounds) for setting in settings]
    if config.json:
        document = {"config": dataclasses.asdict(config), "parts": parts, "environment": environment()}
        print(json.dumps(document, indent=2))
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 160)
        for part, setting in zip(parts, settings, strict=True):
            print("\n".join(_lines(part, setting, width)))
        speeds = "; ".join(f"{name}: {counts}" for name, counts in SPEEDUPS.items())
        speeds += f". Times are measured, full depth / schedule, medians of --rounds {config.rounds}."
        print("\n".join(["", *textwrap.wrap(speeds, width), "", *_next_steps(config)]))
    return 0


def _lines(part: dict[str, Any], setting: Setting, width: int) -> list[str]:
    """The texts side by side, and a table of figures."""
    shown = [found for found, run in zip(part["runs"], setting.runs, strict=True) if run.shown]
    lines = ["", *textwrap.wrap(f"== {part['title']}", width)]
    for i, prompt in enumerate(part["prompts"]):
        lines += ["", *textwrap.wrap(prompt["prompt"], width, initial_indent="> ", subsequent_indent="  "), ""]
        lines += side_by_side([run["name"] for run in shown], [run["texts"][i] for run in shown], width)
    columns = {
        f"{len(part['prompts'])} prompts, {part['engine']} engine": "{name}",
        "layers": "{layers_per_token:.1f}",
        "request": "{request_speedup:.2f}x",
        "decode": "{decode_speedup:.2f}x",
        "nominal": "{nominal_speedup:.2f}x",
        "decode s": "{decode_s:.2f}",
        "request s": "{request_s:.2f}",
        "tokens/s": "{decode_tokens_per_s:.0f}",
        "KV saved": "{kv_saved_share:.0%}",
    }
    return [*lines, "", *figures(columns, part["runs"]), "", *textwrap.wrap(setting.remark, width)]


def _next_steps(config: Config) -> list[str]:
    """Commands to try next."""
    from skipdecode.evaluation.demo import DEMO_CHAT, DEMO_MODEL

    has_chat = config.model == DEMO_MODEL and ModelRef(DEMO_CHAT).adapter is not None
    # A depth that the weights were tuned for.
    chat, depth = (DEMO_CHAT, "/1.5x") if has_chat else (shlex.join(config.words), "/2x")
    model = shlex.join(config.words)
    return [
        "Next:",
        f"  skipdecode chat {chat}",
        f"      chat with the model, and change the depth between turns ({depth}, /full)",
        f"  skipdecode plan {model} --target-speedup 1.5",
        "      find the schedule for a speed-up on this machine",
        f"  skipdecode prepare {model} --target-speedup 1.5 --train train.jsonl --dev dev.jsonl \\",
        "      --prompt-field prompt --response-field response --out ready",
        "      find a schedule, tune the model under it and measure it, on your records, in minutes",
    ]
