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
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from skipdecode.cli.options import MODEL, EngineOptions
from skipdecode.common.columns import SPEEDUPS, figures, side_by_side
from skipdecode.common.environment import environment
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note, progress_bar
from skipdecode.data.chats import chat_fault
from skipdecode.data.forms import choose_form
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder, context_length, prompt_room
from skipdecode.engine.base import EngineStats
from skipdecode.engine.requests import Request
from skipdecode.errors import UsageError
from skipdecode.models.loading.hub import LoadedModel
from skipdecode.models.loading.ref import ModelRef, model_files
from skipdecode.schedule import Schedule

_DEFAULT = "smollm2-135m"
_RECORDS = "e2e-smollm2-135m"
_CHAT = "chat-smollm2-135m"

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


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions):
    """Options of `skipdecode demo`."""

    model: str = option(MODEL, default=_DEFAULT, path=Reads(model_files))
    max_new_tokens: int = option("new tokens of each prompt", default=32, least=2)
    rounds: int = option("runs of each schedule, in turn; results are medians", default=3, least=1)
    json: bool = option("print one JSON document", default=False)


def run(config: Config) -> int:
    """Run the demo; returns 0."""
    prompt_room(context_length(config.ref.config), config.max_new_tokens)
    settings = _settings(config)
    parts = [_outcomes(config, setting) for setting in settings]
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


@dataclass(frozen=True)
class _Run:
    """A model with a schedule; `shown`: whether its texts are printed, not only its figures."""

    name: str
    loaded: LoadedModel
    schedule: Schedule
    shown: bool = True


class _Lap(NamedTuple):
    """The statistics of decoding all prompts once, and the new tokens of each prompt."""

    stats: EngineStats
    tokens: list[list[int]]


@dataclass(frozen=True)
class _Setting:
    """Prompts, and the models and schedules that run on them; full depth is the first."""

    title: str
    prompts: list[EncodedPrompt]
    runs: list[_Run]
    remark: str


def _settings(config: Config) -> list[_Setting]:
    tokens = config.max_new_tokens - 1  # the last token is not fed back
    loaded = config.load()
    if config.model != _DEFAULT:
        remark = _UNTUNED if loaded.schedule is None else _TUNED
        return [_Setting(loaded.name, _prompts(config, loaded, "record", "chat"), _any_runs(loaded, tokens), remark)]
    tuned = dataclasses.replace(config, model=_RECORDS).load()
    title = f"Records: {_DEFAULT} with the bundled adapter {_RECORDS}"
    records = _Setting(title, _prompts(config, tuned, "record"), _tuned_runs(tuned), _BUNDLED)
    prompts = _prompts(config, loaded, "chat")
    if ModelRef(_CHAT).adapter is None:
        return [records, _Setting(f"Chat: {_DEFAULT}", prompts, _any_runs(loaded, tokens), _UNTUNED)]
    full, *ready = _tuned_runs(dataclasses.replace(config, model=_CHAT).load())
    runs = [dataclasses.replace(full, loaded=loaded)]
    for one in ready:
        runs.append(dataclasses.replace(one, name=f"{one.name}, tuned"))
        runs.append(dataclasses.replace(one, name=f"{one.name}, base", loaded=loaded))
    return [records, _Setting(f"Chat: {_DEFAULT}, and with the bundled adapter {_CHAT}", prompts, runs, _READY)]


def _prompts(config: Config, loaded: LoadedModel, *kinds: str) -> list[EncodedPrompt]:
    """The built-in prompts of these kinds, in the template that the checkpoint was tuned on, else as chats."""
    form = choose_form(loaded.recipe)
    chat = form.template is None and chat_fault(loaded.tokenizer) is None
    listed = json.loads(resources.files("skipdecode.cli").joinpath("demo_prompts.json").read_text(encoding="utf-8"))
    wanted = [p for p in listed if p["kind"] in kinds]
    ask = {"record": _INSTRUCTION if chat else "", "chat": ""}
    records = [
        dataclasses.replace(form.record(ask[p["kind"]] + p["text"]), index=i, line=i + 1, id=p["id"])
        for i, p in enumerate(wanted)
    ]
    context = context_length(loaded.model.config)
    prompts = PromptEncoder(loaded.tokenizer, context, template=form.template, chat=chat).encode(records)
    for prompt in prompts:
        if prompt.error is not None and form.template is not None:
            raise UsageError(f"{config.model} needs records, and the demo has texts: {prompt.error}")
        if prompt.error is not None or (prompt.room is not None and prompt.room < config.max_new_tokens):
            raise UsageError(
                f"--max-new-tokens {config.max_new_tokens} is too many: {config.model} has a context of {context}"
            )
    return prompts


def _tuned_runs(loaded: LoadedModel) -> list[_Run]:
    """Full depth and the schedules that a checkpoint was tuned under, by speed-up; shows texts at the carried depth."""
    under = () if loaded.recipe is None else loaded.recipe.tuned_under
    schedules = sorted((s for s in under if not s.is_full), key=lambda s: (s.nominal_speedup, -len(s.prompt_layers())))
    runs = [
        _Run(s.name.replace("skipdecode-", "SkipDecode "), loaded, s, s.budgets == under[0].budgets) for s in schedules
    ]
    return [_Run("full depth", loaded, Schedule.full(loaded.num_layers)), *runs]


def _any_runs(loaded: LoadedModel, tokens: int) -> list[_Run]:
    layers, own = loaded.num_layers, loaded.schedule
    most, half = layers - max(1, layers // 10), max(2, layers // 2)
    return [
        _Run("full depth", loaded, Schedule.full(layers)),
        *([] if own is None else [_Run("its own schedule", loaded, own)]),
        _Run(f"even, {most} layers", loaded, Schedule.even(layers, most)),
        _Run("SkipDecode 2x", loaded, Schedule.from_speedup(layers, 2, tokens)),
        _Run("SkipDecode 3x", loaded, Schedule.from_speedup(layers, 3, tokens)),
        _Run(f"constant, {half} layers", loaded, Schedule.constant(layers, half), shown=False),
    ]


@cache
def _once(line: str) -> None:
    """Print a line about the engine once, not for each model."""
    note(line)


def _outcomes(config: Config, setting: _Setting) -> dict[str, Any]:
    """The results of all runs, each with all prompts in one batch and the same number of tokens; JSON-ready."""
    from skipdecode.common.stopwatch import Stopwatch
    from skipdecode.engine.opening import end_tokens

    models = {id(run.loaded): run for run in setting.runs}
    sources = {key: config.engines(run.loaded, _once) for key, run in models.items()}

    def decode(run: _Run, rows: int, tokens: int) -> _Lap:
        engine = sources[id(run.loaded)].engine(run.schedule, max_rows=rows)
        decoded = engine.decode([Request(tuple(p.token_ids), tokens) for p in setting.prompts[:rows]])
        return _Lap(engine.stats, [row.tokens for row in decoded])

    for run in models.values():
        decode(run, 1, 2)
    watch = Stopwatch[int, _Lap](range(len(setting.runs)))
    with progress_bar(config.rounds * len(setting.runs), "run", leave=False) as bar:

        def lap(number: int) -> _Lap:
            bar.update()
            return decode(setting.runs[number], len(setting.prompts), config.max_new_tokens)

        for _ in range(config.rounds):
            watch.lap(lap)
    first = setting.runs[0].loaded
    ends, tokenizer = end_tokens(first.model, first.tokenizer), first.tokenizer
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
    return {"title": setting.title, "engine": sources[id(first)].name, "prompts": asked, "runs": shown}


def _decode_seconds(lap: _Lap) -> float:
    return lap.stats.decode_seconds


def _request_seconds(lap: _Lap) -> float:
    return lap.stats.step_seconds


def _text(tokenizer: Any, tokens: list[int], end_tokens: frozenset[int]) -> str:
    end = next((i for i, token in enumerate(tokens) if token in end_tokens), len(tokens))
    return str(tokenizer.decode(tokens[:end], skip_special_tokens=True)).strip()


def _lines(part: dict[str, Any], setting: _Setting, width: int) -> list[str]:
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
    has_chat = config.model == _DEFAULT and ModelRef(_CHAT).adapter is not None
    # A depth that the weights were tuned for.
    chat, depth = (_CHAT, "/1.5x") if has_chat else (shlex.join(config.words), "/2x")
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
