"""The main job on the embedded default model: full depth and schedules, side by side.

Generates text for a few built-in prompts at full depth and under several schedules, for the same number of tokens, and
shows the texts, the layers that ran, and three speed-ups: request (time of prompts and steps), decode (of the steps
after the prompts) and nominal (layers). Restaurant records and chats run on bundled adapters that were tuned under the
schedules; the model as published stands beside the chats, to show what tuning is for. The first run fetches the model
(about 100 MB) into the user's cache.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from skipdecode.cli.columns import SPEEDUPS, figures, side_by_side
from skipdecode.cli.options import MODEL, EngineOptions
from skipdecode.common.environment import environment
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note, progress_bar
from skipdecode.data.forms import choose_form
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder, context_length, prompt_room
from skipdecode.engine.base import EngineStats
from skipdecode.engine.requests import Request
from skipdecode.errors import UsageError
from skipdecode.models.loading.hub import LoadedModel
from skipdecode.models.loading.ref import ModelRef, model_files
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.common.stopwatch import Stopwatch

__all__ = ["Config", "run"]

_DEFAULT = "smollm2-135m"
_RECORDS = "e2e-smollm2-135m"
_CHAT = "chat-smollm2-135m"

_INSTRUCTION = "Describe this place in one sentence, from these facts: "
_UNTUNED = (
    "This model was not tuned under any schedule, so its text breaks when layers are left out; tuning under the "
    "schedule is what repairs it: skipdecode tune --help. Layers, speed and memory are the same for a tuned model."
)
_BUNDLED = (
    "The bundled adapter was tuned for full depth and these schedules, on the answers of a tuned model at full depth "
    "to such records, so its text holds when new tokens leave layers out (p30: prompts run all 30). Where prompts "
    "leave layers out too, a name that it never met may be lost (docs/results.md counts them)."
)
_READY = (
    '"Tuned" is the bundled adapter, made ready for these schedules; "as published" is the same model untouched, '
    "whose text breaks when layers are left out. It was tuned for 25 minutes on 534 answers of its own (docs/chat.md): "
    "sentences hold, facts do not. Layers, speed and memory are the same for both."
)
_TUNED = (
    "This checkpoint was tuned under its own schedule; under the other ones its text breaks. Layers, speed and memory "
    "are the same for any weights."
)


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions):
    """Options of `skipdecode demo`."""

    model: str = option(MODEL, default=_DEFAULT, path=Reads(model_files))
    max_new_tokens: int = option("new tokens of every prompt", default=32, least=2)
    rounds: int = option("times that every schedule runs, in turn; medians count", default=3, least=1)
    json: bool = option("print one JSON document instead", default=False)


def run(config: Config) -> int:
    """Show the demo; returns 0."""
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
    """A model under a schedule; `shown`: its texts too, not its figures alone."""

    name: str
    loaded: LoadedModel
    schedule: Schedule
    shown: bool = True


class _Lap(NamedTuple):
    """What decoding of all prompts under a schedule took, and the new tokens of each."""

    stats: EngineStats
    tokens: list[list[int]]


@dataclass(frozen=True)
class _Setting:
    """Prompts with what runs on them, full depth first."""

    title: str
    prompts: list[EncodedPrompt]
    runs: list[_Run]
    remark: str


def _settings(config: Config) -> list[_Setting]:
    tokens = config.max_new_tokens - 1  # the last token is not fed back
    if config.model == _DEFAULT:
        plain, records = _load(config, _DEFAULT), _load(config, _RECORDS)
        title = f"Records: {_DEFAULT} with the bundled adapter {_RECORDS}"
        asked = _prompts(config, records, ["record"])
        return [_Setting(title, asked, _tuned_runs(records), _BUNDLED), _chat(config, plain, tokens)]
    loaded = config.load()
    remark = _UNTUNED if loaded.schedule is None else _TUNED
    return [_Setting(loaded.name, _prompts(config, loaded, ["record", "chat"]), _any_runs(loaded, tokens), remark)]


def _chat(config: Config, plain: LoadedModel, tokens: int) -> _Setting:
    """Chats on the model as published, beside the adapter that was made ready for skipping, where there is one."""
    prompts = _prompts(config, plain, ["chat"])
    if ModelRef(_CHAT).adapter is None:
        return _Setting(f"Chat: {_DEFAULT} as published", prompts, _any_runs(plain, tokens), _UNTUNED)
    ready = _tuned_runs(_load(config, _CHAT))
    steepest = ready[-1].schedule
    runs = [_Run("full depth", plain, ready[0].schedule)]
    for one in ready[1:]:
        last = one.schedule is steepest
        runs += [
            dataclasses.replace(one, name=f"{one.name}, tuned", shown=last),
            _Run(f"{one.name}, as published", plain, one.schedule, shown=last),
        ]
    return _Setting(f"Chat: {_DEFAULT} as published, and with the bundled adapter {_CHAT}", prompts, runs, _READY)


def _load(config: Config, name: str) -> LoadedModel:
    return dataclasses.replace(config, model=name).load()


def _prompts(config: Config, loaded: LoadedModel, kinds: list[str]) -> list[EncodedPrompt]:
    """The built-in prompts of these kinds, in the form that the checkpoint was tuned on, else as chats."""
    form = choose_form(loaded.recipe)
    chat = form.template is None and getattr(loaded.tokenizer, "chat_template", None) is not None
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
            raise UsageError(f"{config.model} is for records, and the demo has texts: {prompt.error}")
        if prompt.error is not None or (prompt.room is not None and prompt.room < config.max_new_tokens):
            raise UsageError(
                f"--max-new-tokens {config.max_new_tokens} is too many: {config.model} has a context of {context}"
            )
    return prompts


def _tuned_runs(loaded: LoadedModel) -> list[_Run]:
    """Full depth and the schedules that a checkpoint was tuned under, mildest first; texts at the carried depth."""
    under = () if loaded.recipe is None else loaded.recipe.tuned_under
    schedules = sorted((s for s in under if not s.is_full), key=lambda s: (s.nominal_speedup, -len(s.prompt_layers())))
    runs = [
        _Run(s.name.replace("skipdecode-", "SkipDecode "), loaded, s, s.budgets == under[0].budgets) for s in schedules
    ]
    return [_Run("full depth", loaded, Schedule.full(loaded.num_layers)), *runs]


def _any_runs(loaded: LoadedModel, tokens: int) -> list[_Run]:
    layers, own = loaded.num_layers, loaded.schedule
    tenth = max(1, layers // 10)
    half = max(2, layers // 2)
    return [
        _Run("full depth", loaded, Schedule.full(layers)),
        *([] if own is None else [_Run("its own schedule", loaded, own)]),
        _Run(f"even, {layers - tenth} layers", loaded, Schedule.even(layers, layers - tenth)),
        _Run("SkipDecode 2x", loaded, Schedule.from_speedup(layers, 2, tokens)),
        _Run("SkipDecode 3x", loaded, Schedule.from_speedup(layers, 3, tokens)),
        # There for its figures: its text says no more than that of the one with the same mean.
        _Run(f"constant, {half} layers", loaded, Schedule.constant(layers, half), shown=False),
    ]


@cache
def _once(line: str) -> None:
    """What is said of one part's engine is so of the other's."""
    note(line)


def _outcomes(config: Config, setting: _Setting) -> dict[str, Any]:
    """Every run on all prompts in one batch, in turn, for exactly as many tokens; JSON-ready, full depth first."""
    from skipdecode.common.stopwatch import Stopwatch
    from skipdecode.engine.opening import end_tokens

    sources = {
        key: config.engines(each, _once) for key, each in {id(run.loaded): run.loaded for run in setting.runs}.items()
    }

    def decode(run: _Run, rows: int, tokens: int) -> _Lap:
        engine = sources[id(run.loaded)].engine(run.schedule, max_rows=rows)
        decoded = engine.decode([Request(tuple(p.token_ids), tokens) for p in setting.prompts[:rows]])
        return _Lap(engine.stats, [row.tokens for row in decoded])

    for each in {id(run.loaded): run for run in setting.runs}.values():
        decode(each, 1, 2)
    watch = Stopwatch[int, _Lap](range(len(setting.runs)))
    with progress_bar(config.rounds * len(setting.runs), "run", leave=False) as bar:

        def lap(number: int) -> _Lap:
            bar.update()
            return decode(setting.runs[number], len(setting.prompts), config.max_new_tokens)

        for _ in range(config.rounds):
            watch.lap(lap)
    first = setting.runs[0].loaded
    ends = end_tokens(first.model, first.tokenizer)
    shown = [
        {
            "name": each.name,
            "schedule": each.schedule.to_dict(),
            **_figures(watch, number),
            "texts": [_text(first.tokenizer, tokens, ends) for tokens in watch.laps(number)[0].tokens],
        }
        for number, each in enumerate(setting.runs)
    ]
    asked = [
        {"id": str(p.record.id), "prompt": str(p.record.prompt).removeprefix(_INSTRUCTION).strip()}
        for p in setting.prompts
    ]
    return {"title": setting.title, "engine": sources[id(first)].name, "prompts": asked, "runs": shown}


_CLOCKS: dict[str, Callable[[_Lap], float]] = {
    "decode": lambda lap: lap.stats.after_prompts,
    "request": lambda lap: lap.stats.seconds,
}


def _figures(watch: Stopwatch[int, _Lap], number: int) -> dict[str, float | None]:
    """What the rounds of one schedule gave, next to those of full depth, the first."""
    one, full = watch.laps(number)[0].stats, watch.laps(0)[0].stats
    seconds = {name: watch.seconds(number, clock) for name, clock in _CLOCKS.items()}
    return {
        "layers_per_token": one.token_layers / one.fed_tokens,
        "nominal_speedup": full.token_layers / one.token_layers,
        **{f"measured_{name}_speedup": watch.ratio(0, number, clock) for name, clock in _CLOCKS.items()},
        **{f"{name}_s": value for name, value in seconds.items()},
        "decode_tokens_per_s": one.fed_tokens / seconds["decode"],
        "kv_bytes": one.kv_bytes_peak,
        "kv_saved_share": 1 - one.kv_bytes_peak / one.kv_bytes_full_peak,
    }


def _text(tokenizer: Any, tokens: list[int], end_tokens: frozenset[int]) -> str:
    end = next((i for i, token in enumerate(tokens) if token in end_tokens), len(tokens))
    return str(tokenizer.decode(tokens[:end], skip_special_tokens=True)).strip()


def _lines(part: dict[str, Any], setting: _Setting, width: int) -> list[str]:
    """A part for a terminal: texts side by side, and a table of figures."""
    shown = [found for found, run in zip(part["runs"], setting.runs, strict=True) if run.shown]
    lines = ["", *textwrap.wrap(f"== {part['title']}", width)]
    for i, prompt in enumerate(part["prompts"]):
        lines += ["", *textwrap.wrap(prompt["prompt"], width, initial_indent="> ", subsequent_indent="  "), ""]
        lines += side_by_side([run["name"] for run in shown], [run["texts"][i] for run in shown], width)
    rows = "1 row" if len(part["prompts"]) == 1 else f"{len(part['prompts'])} rows"
    columns = {
        f"{rows}, {part['engine']} engine": "{name}",
        "layers": "{layers_per_token:.1f}",
        "request": "{measured_request_speedup:.2f}x",
        "decode": "{measured_decode_speedup:.2f}x",
        "nominal": "{nominal_speedup:.2f}x",
        "decode s": "{decode_s:.2f}",
        "request s": "{request_s:.2f}",
        "tokens/s": "{decode_tokens_per_s:.0f}",
        "KV saved": "{kv_saved_share:.0%}",
    }
    return [*lines, "", *figures(columns, part["runs"]), "", *textwrap.wrap(setting.remark, width)]


def _next_steps(config: Config) -> list[str]:
    """What to do after the demo, by command."""
    chat = _CHAT if config.model == _DEFAULT and ModelRef(_CHAT).adapter is not None else config.model
    model, depth = shlex.quote(config.model), "/1.5x" if chat == _CHAT else "/2x"  # one that its weights bear
    return [
        "Next:",
        f"  skipdecode chat {shlex.quote(chat)}",
        f"      talk to it, and change the depth on the way ({depth}, /full)",
        f"  skipdecode plan {model} --target-speedup 1.5",
        "      the schedule for a speed-up on this machine",
        f"  skipdecode tune {model} --nominal-speedup 2 --train train.jsonl --dev dev.jsonl \\",
        "      --prompt-field prompt --response-field response --out tuned",
        "      make it ready for that schedule, on your records",
    ]
