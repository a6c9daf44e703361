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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.options import MODEL, EngineOptions
from skipdecode.common.environment import environment
from skipdecode.common.options import Reads, option
from skipdecode.common.tables import figures
from skipdecode.data.chats import chat_fault
from skipdecode.data.forms import choose_form
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder, context_length, prompt_room
from skipdecode.errors import UsageError
from skipdecode.models.loading.ref import ModelRef, model_files
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.generation.llm import LLM

_COLUMNS = {
    "schedule": "{name}",
    "layers": "{speed[layers_per_token]:.1f}",
    "request": "{request_speedup:.2f}x",
    "decode": "{decode_speedup:.2f}x",
    "nominal": "{nominal_speedup:.2f}x",
    "tokens/s": "{speed[tokens_per_s]:.0f}",
}
_RECORDS, _CHAT = "e2e-smollm2-135m", "chat-smollm2-135m"
_INSTRUCTION = "Describe this place in one sentence, from these facts: "
_TUNED = "The weights were tuned under these schedules. Names that the training data did not have may be lost."
_UNTUNED = (
    "The weights were not tuned under these schedules, so the text degrades when layers are skipped: skipdecode "
    "prepare repairs it. Layers and speed are the same for tuned weights."
)
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
    from skipdecode.generation.llm import LLM

    parts = []
    for one in [replace(config, model=name) for name in ([config.model] if config.model else _models())]:
        prompt_room(context_length(one.ref.config), config.max_new_tokens)
        llm = LLM(one.load(), engine=config.engine, quantization=config.quantization)
        parts.append(_measured(llm, config.max_new_tokens))
    if config.json:
        print(json.dumps({"parts": parts, "environment": environment()}, indent=2))
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 160)
        print(*(line for part in parts for line in _lines(part, width)), _NEXT, sep="\n")
    return 0


def _models() -> list[str]:
    """The models that are shown by default: the bundled adapters that are there."""
    return [name for name in (_RECORDS, _CHAT) if ModelRef(name).adapter is not None]


def _measured(llm: LLM, max_new_tokens: int) -> dict[str, Any]:
    """The outputs and speeds of a model for the built-in prompts, `max_new_tokens` for each; JSON-ready.

    Full depth is the first schedule, then come those that the checkpoint was tuned under, else some of each kind.
    Raises UsageError if the prompts do not fit the model.
    """
    from skipdecode.engine.opening import end_tokens
    from skipdecode.evaluation.results import EvaluationSettings
    from skipdecode.evaluation.run import speed_entries
    from skipdecode.generation.speed import Method, time_equal_lengths

    loaded, layers = llm.loaded, llm.num_layers
    known = (*(() if loaded.recipe is None else loaded.recipe.tuned_under), loaded.schedule)
    schedules = sorted({s for s in known if s and not s.is_full}, key=lambda s: (s.nominal_speedup, s.name))
    if loaded.recipe is None:
        schedules.append(Schedule.even(layers, layers - max(1, layers // 10)))
        schedules += [Schedule.from_speedup(layers, speedup, max_new_tokens - 1) for speedup in (2, 3)]
    full, *others = [Method(llm.backend), *(Method(llm.backend, schedule) for schedule in schedules)]
    prompts = _prompts(llm, max_new_tokens)
    tokens, lengths = [prompt.token_ids for prompt in prompts], [max_new_tokens] * len(prompts)
    turns = time_equal_lengths([full, *others], tokens, lengths, batch_size=len(prompts))
    ends, rows = set(end_tokens(loaded.model, llm.tokenizer)), []
    for method in (full, *others):
        found = method.generate(tokens, max_new_tokens=max_new_tokens, eos=ends)
        texts = [text.strip() for text in llm.tokenizer.batch_decode(found.tokens, skip_special_tokens=True)]
        nominal = layers / method.schedule.mean_budget(max_new_tokens - 1)
        speeds = speed_entries(turns, method, full, EvaluationSettings(), {"batch_size": len(prompts)})
        rows.append({"name": method.name, "texts": texts, "nominal_speedup": nominal, **speeds})
    return {
        "model": loaded.name,
        "engine": llm.backend.name,
        "prompts": [str(p.record.prompt).removeprefix(_INSTRUCTION).strip() for p in prompts],
        "rows": rows,
        "remark": _UNTUNED if loaded.untuned_line(schedules) else _TUNED,
    }


def _prompts(llm: LLM, max_new_tokens: int) -> list[EncodedPrompt]:
    """The built-in prompts, records in the template that the checkpoint was tuned on, else as chats."""
    loaded = llm.loaded
    form = choose_form(loaded.recipe)
    chat = form.template is None and chat_fault(loaded.tokenizer) is None
    listed = json.loads(Path(__file__).with_name("demo_prompts.json").read_text(encoding="utf-8"))
    kind = {_RECORDS: "record", _CHAT: "chat"}.get(loaded.name, "record" if form.template else "")
    ask = {"record": _INSTRUCTION if chat else "", "chat": ""}
    wanted = [p for p in listed if p["kind"] == kind or not kind]
    records = [
        replace(form.record(ask[p["kind"]] + p["text"]), index=i, line=i + 1, id=p["id"]) for i, p in enumerate(wanted)
    ]
    context = context_length(loaded.model.config)
    prompts = PromptEncoder(loaded.tokenizer, context, template=form.template, chat=chat).encode(records)
    for prompt in prompts:
        if prompt.error is not None and form.template is not None:
            raise UsageError(f"{loaded.name} needs records, and the demo has texts: {prompt.error}")
        if prompt.error is not None or (prompt.room is not None and prompt.room < max_new_tokens):
            raise UsageError(f"max_new_tokens={max_new_tokens} is too many: {loaded.name} has a context of {context}")
    return prompts


def _lines(part: dict[str, Any], width: int) -> list[str]:
    """The texts below each other, and a table of figures."""
    lines = ["", f"== {part['model']}, {part['engine']} engine"]
    for i, prompt in enumerate(part["prompts"]):
        lines += ["", *textwrap.wrap(f"> {prompt}", width)]
        for row in part["rows"]:
            lines += textwrap.wrap(f"{row['name']}: {row['texts'][i] or '(no text)'}", width, subsequent_indent="  ")
    return [*lines, "", *figures(_COLUMNS, part["rows"]), "", *textwrap.wrap(part["remark"], width)]
