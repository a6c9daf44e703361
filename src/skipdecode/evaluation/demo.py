"""What `skipdecode demo` shows: built-in prompts under several schedules, their texts, layers and speed-ups."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NamedTuple

from skipdecode.common.progress import progress_bar
from skipdecode.common.stopwatch import Stopwatch
from skipdecode.data.chats import chat_fault
from skipdecode.data.forms import choose_form
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder, context_length
from skipdecode.engine.base import EngineStats
from skipdecode.engine.opening import end_tokens
from skipdecode.engine.requests import Request
from skipdecode.errors import UsageError
from skipdecode.generation.llm import LLM
from skipdecode.models.loading.ref import ModelRef
from skipdecode.schedule import Schedule

DEMO_MODEL = "smollm2-135m"
_RECORDS = "e2e-smollm2-135m"
DEMO_CHAT = "chat-smollm2-135m"

_INSTRUCTION = "Describe this place in one sentence, from these facts: "
_UNTUNED = (
    "This model was not tuned under a schedule, so its text degrades when layers are skipped; tuning under the "
    "schedule repairs it: skipdecode tune --help. Layers, speed and memory are the same for a tuned model."
)
_BUNDLED = (
    "The bundled adapter was tuned for full depth and these schedules, on the outputs of a tuned model at full depth "
    "for such records. Its text therefore holds when new tokens skip layers (p30: prompts run all 30). If prompts skip "
    "layers too, names that were not in the training data may be lost (docs/results.md counts them)."
)
_READY = (
    '"Tuned" is the bundled adapter, which was tuned with a fit for these schedules, on 805 answers of the base model '
    '(docs/chat.md): sentences hold, facts do not. "Base" is the model without the adapter, whose text degrades when '
    "layers are skipped. Both run the same layers; the linear maps of the fit take a little time."
)
_TUNED = (
    "This checkpoint was tuned under its own schedule; under the other schedules its text degrades. Layers, speed and "
    "memory are the same for any weights."
)


@dataclass(frozen=True)
class Run:
    """A model with a schedule; `shown`: whether its texts are printed, not only its figures."""

    name: str
    llm: LLM
    schedule: Schedule
    shown: bool = True


class _Lap(NamedTuple):
    """The statistics of decoding all prompts once, and the new tokens of each prompt."""

    stats: EngineStats
    tokens: list[list[int]]


@dataclass(frozen=True)
class Setting:
    """Prompts, and the models and schedules that run on them; full depth is the first."""

    title: str
    prompts: list[EncodedPrompt]
    runs: list[Run]
    remark: str


def demo_settings(opened: Callable[[str], LLM], model: str, max_new_tokens: int) -> list[Setting]:
    """What is shown of a model; `opened` loads one by its name. Raises UsageError for a model that is not for it."""
    tokens, llm = max_new_tokens - 1, opened(model)  # the last token is not fed back
    if model != DEMO_MODEL:
        remark = _UNTUNED if llm.loaded.schedule is None else _TUNED
        prompts = _prompts(llm, max_new_tokens, "record", "chat")
        return [Setting(llm.loaded.name, prompts, _any_runs(llm, tokens), remark)]
    tuned = opened(_RECORDS)
    title = f"Records: {model} with the bundled adapter {_RECORDS}"
    records = Setting(title, _prompts(tuned, max_new_tokens, "record"), _tuned_runs(tuned), _BUNDLED)
    prompts = _prompts(llm, max_new_tokens, "chat")
    if ModelRef(DEMO_CHAT).adapter is None:
        return [records, Setting(f"Chat: {model}", prompts, _any_runs(llm, tokens), _UNTUNED)]
    full, *ready = _tuned_runs(opened(DEMO_CHAT))
    runs = [replace(full, llm=llm)]
    for one in ready:
        runs.append(replace(one, name=f"{one.name}, tuned"))
        runs.append(replace(one, name=f"{one.name}, base", llm=llm))
    return [records, Setting(f"Chat: {model}, and with the bundled adapter {DEMO_CHAT}", prompts, runs, _READY)]


def _prompts(llm: LLM, max_new_tokens: int, *kinds: str) -> list[EncodedPrompt]:
    """The built-in prompts of these kinds, in the template that the checkpoint was tuned on, else as chats."""
    loaded = llm.loaded
    form = choose_form(loaded.recipe)
    chat = form.template is None and chat_fault(loaded.tokenizer) is None
    listed = json.loads(
        resources.files("skipdecode.evaluation").joinpath("demo_prompts.json").read_text(encoding="utf-8")
    )
    wanted = [p for p in listed if p["kind"] in kinds]
    ask = {"record": _INSTRUCTION if chat else "", "chat": ""}
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


def _tuned_runs(llm: LLM) -> list[Run]:
    """Full depth and the schedules that a checkpoint was tuned under, by speed-up; shows texts at the carried depth."""
    recipe = llm.loaded.recipe
    under = () if recipe is None else recipe.tuned_under
    schedules = sorted((s for s in under if not s.is_full), key=lambda s: (s.nominal_speedup, -len(s.prompt_layers())))
    runs = [Run(s.name.replace("skipdecode-", "SkipDecode "), llm, s, s.budgets == under[0].budgets) for s in schedules]
    return [Run("full depth", llm, Schedule.full(llm.num_layers)), *runs]


def _any_runs(llm: LLM, tokens: int) -> list[Run]:
    layers, own = llm.num_layers, llm.loaded.schedule
    most, half = layers - max(1, layers // 10), max(2, layers // 2)
    return [
        Run("full depth", llm, Schedule.full(layers)),
        *([] if own is None else [Run("its own schedule", llm, own)]),
        Run(f"even, {most} layers", llm, Schedule.even(layers, most)),
        Run("SkipDecode 2x", llm, Schedule.from_speedup(layers, 2, tokens)),
        Run("SkipDecode 3x", llm, Schedule.from_speedup(layers, 3, tokens)),
        Run(f"constant, {half} layers", llm, Schedule.constant(layers, half), shown=False),
    ]


def demo_results(setting: Setting, max_new_tokens: int, rounds: int) -> dict[str, Any]:
    """The results of all runs, each with all prompts in one batch and the same number of tokens; JSON-ready."""

    def decode(run: Run, rows: int, tokens: int) -> _Lap:
        engine = run.llm.backend.engine(run.schedule, max_rows=rows)
        decoded = engine.decode([Request(tuple(p.token_ids), tokens) for p in setting.prompts[:rows]])
        return _Lap(engine.stats, [row.tokens for row in decoded])

    for run in {id(run.llm): run for run in setting.runs}.values():
        decode(run, 1, 2)
    watch = Stopwatch[int, _Lap](range(len(setting.runs)))
    with progress_bar(rounds * len(setting.runs), "run", leave=False) as bar:

        def lap(number: int) -> _Lap:
            bar.update()
            return decode(setting.runs[number], len(setting.prompts), max_new_tokens)

        for _ in range(rounds):
            watch.lap(lap)
    first = setting.runs[0].llm
    ends, tokenizer = end_tokens(first.loaded.model, first.tokenizer), first.tokenizer
    full, shown = watch.laps(0)[0].stats, []
    for number, run in enumerate(setting.runs):
        one, tokens = watch.laps(number)[0]
        shown.append(
            {
                "name": run.name,
                "schedule": run.schedule.to_dict(),
                "layers_per_token": one.token_layers / one.fed_tokens,
                "nominal_speedup": full.token_layers / one.token_layers,
                "decode_speedup": watch.ratio(0, number, _decode_seconds),
                "request_speedup": watch.ratio(0, number, _request_seconds),
                "decode_s": watch.seconds(number, _decode_seconds),
                "request_s": watch.seconds(number, _request_seconds),
                "decode_tokens_per_s": one.fed_tokens / watch.seconds(number, _decode_seconds),
                "kv_bytes": one.kv_bytes_peak,
                "kv_saved_share": 1 - one.kv_bytes_peak / one.kv_bytes_full_peak,
                "texts": [_text(tokenizer, each, ends) for each in tokens],
            }
        )
    asked = [
        {"id": str(p.record.id), "prompt": str(p.record.prompt).removeprefix(_INSTRUCTION).strip()}
        for p in setting.prompts
    ]
    return {"title": setting.title, "engine": first.backend.name, "prompts": asked, "runs": shown}


def _decode_seconds(lap: _Lap) -> float:
    return lap.stats.decode_seconds


def _request_seconds(lap: _Lap) -> float:
    return lap.stats.step_seconds


def _text(tokenizer: Any, tokens: list[int], end_tokens: frozenset[int]) -> str:
    end = next((i for i, token in enumerate(tokens) if token in end_tokens), len(tokens))
    return str(tokenizer.decode(tokens[:end], skip_special_tokens=True)).strip()
