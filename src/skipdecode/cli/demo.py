"""Compare schedules with full depth on the embedded model: texts, layers and speed-ups.

The demo generates text for a few built-in prompts at full depth and under several schedules, with the same number of
tokens. It shows the texts, the layers that ran, and three speed-ups: request (time of prompts and steps), decode (time
of the steps after the prompts) and nominal (layers). Restaurant records and chats run on bundled adapters, which were
tuned under the schedules. The first run downloads the model (about 100 MB) into the user's cache.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import dataclass, replace
from typing import Any

from skipdecode.cli.options import MODEL, EngineOptions
from skipdecode.common.environment import environment
from skipdecode.common.options import Reads, option
from skipdecode.common.tables import figures
from skipdecode.data.prompts import context_length, prompt_room
from skipdecode.models.loading.ref import model_files

_COLUMNS = {
    "schedule": "{name}",
    "layers": "{speed[layers_per_token]:.1f}",
    "request": "{request_speedup:.2f}x",
    "decode": "{decode_speedup:.2f}x",
    "nominal": "{nominal_speedup:.2f}x",
    "tokens/s": "{speed[tokens_per_s]:.0f}",
}
_NEXT = """
Times are measured, full depth / schedule, medians of three rounds. Next:
  skipdecode chat chat-smollm2-135m
      chat, and change the depth between turns (/1.5x, /full)
  skipdecode prepare MODEL --target-speedup 1.5 --self --out ready
      make another model fast: find a schedule, tune the model under it and measure it, in minutes"""


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions):
    """Options of `skipdecode demo`."""

    model: str = option(f"{MODEL} (default: the adapters)", default="", path=Reads(model_files))
    max_new_tokens: int = option("new tokens of each prompt", default=32, least=2)
    json: bool = option("print one JSON document", default=False)


def run(config: Config) -> int:
    """Run the demo; returns 0."""
    from skipdecode.evaluation.speed import demo, demo_models
    from skipdecode.generation.llm import LLM

    parts = []
    for one in [replace(config, model=name) for name in ([config.model] if config.model else demo_models())]:
        prompt_room(context_length(one.ref.config), config.max_new_tokens)
        llm = LLM(one.load(), engine=config.engine, quantization=config.quantization)
        parts.append(demo(llm, config.max_new_tokens))
    if config.json:
        print(json.dumps({"parts": parts, "environment": environment()}, indent=2))
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 160)
        print(*(line for part in parts for line in _lines(part, width)), _NEXT, sep="\n")
    return 0


def _lines(part: dict[str, Any], width: int) -> list[str]:
    """The texts below each other, and a table of figures."""
    lines = ["", f"== {part['model']}, {part['engine']} engine"]
    for i, prompt in enumerate(part["prompts"]):
        lines += ["", *textwrap.wrap(f"> {prompt}", width)]
        for row in part["rows"]:
            lines += textwrap.wrap(f"{row['name']}: {row['texts'][i] or '(no text)'}", width, subsequent_indent="  ")
    return [*lines, "", *figures(_COLUMNS, part["rows"]), "", *textwrap.wrap(part["remark"], width)]
