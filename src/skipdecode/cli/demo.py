"""The main job on the embedded default model: full depth and schedules, side by side.

Generates text for a few built-in prompts at full depth and under several schedules, for the same number of tokens, and
shows the texts, the layers that ran, and the speed that was measured next to the nominal one. Restaurant records run on
a bundled adapter that was tuned under the schedules, chat prompts on the model as published, to show what tuning is
for. The first run fetches the model (about 100 MB) into the user's cache.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from skipdecode.cli.columns import figures, side_by_side
from skipdecode.cli.options import EngineOptions, ModelOptions, ThreadOptions, check_room
from skipdecode.common.environment import environment
from skipdecode.common.options import option
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.data.prompts import EncodedPrompt
    from skipdecode.engine.base import Engine, EngineStats
    from skipdecode.models.loading.hub import LoadedModel

__all__ = ["Config", "run"]

_DEFAULT = "smollm2-135m"
_ADAPTER = "models/adapters/e2e-smollm2-135m"

_QUICK_PROMPTS = ("record-1", "record-2", "chat-1")
_QUICK_TOKENS = 16
_INSTRUCTION = "Describe this place in one sentence, from these facts: "
_UNTUNED = (
    "This model was not tuned under any schedule, so its text breaks when layers are left out; tuning under the "
    "schedule is what repairs it: skipdecode tune --help. Layers, speed and memory are the same for a tuned model."
)
_BUNDLED = (
    "The bundled adapter (presets/e2e-smollm2-135m.json) was tuned on the E2E data under 1x, 2x and 3x for 300 steps, "
    "so its text holds when layers are left out. How well it holds is measured by skipdecode eval."
)
_TUNED = (
    "This checkpoint was tuned under its own schedule; under the other ones its text breaks. Layers, speed and memory "
    "are the same for any weights."
)


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions, ModelOptions, ThreadOptions):
    """Options of `skipdecode demo`."""

    model: str = option("a local directory, a hub id, or smollm2-135m", default=_DEFAULT)
    max_new_tokens: int = option("new tokens of every prompt", default=32, least=2)
    rounds: int = option("times that every schedule runs, in turn; the fastest counts", default=2, least=1)
    quick: bool = option(f"only {len(_QUICK_PROMPTS)} prompts, {_QUICK_TOKENS} tokens and one round", default=False)
    dtype: str = option("of the weights", default="float32", choices=("auto", "float32", "bfloat16", "float16"))
    json: bool = option("print one JSON document instead", default=False)


def run(config: Config) -> int:
    """Show the demo; returns 0."""
    if config.quick:
        config = dataclasses.replace(config, max_new_tokens=_QUICK_TOKENS, rounds=1)
    check_room(config.model, config.max_new_tokens)
    settings = _settings(config)
    parts = [_outcomes(config, setting) for setting in settings]
    if config.json:
        document = {"config": dataclasses.asdict(config), "parts": parts, "environment": environment()}
        print(json.dumps(document, indent=2))
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 160)
        for part, setting in zip(parts, settings, strict=True):
            print("\n".join(_lines(part, setting.remark, width)))
    return 0


@dataclass(frozen=True)
class _Setting:
    """A model with the prompts and schedules it runs."""

    title: str
    loaded: LoadedModel
    prompts: list[EncodedPrompt]
    schedules: list[tuple[str, Schedule]]
    remark: str


def _settings(config: Config) -> list[_Setting]:
    tokens = config.max_new_tokens - 1  # the last token is not fed back
    if config.model == _DEFAULT:
        tuned = _load(config, str(resources.files("skipdecode") / _ADAPTER))
        plain = _load(config, _DEFAULT)
        # As in tuning: the record and a line break, no chat template.
        records = _prompts(config, tuned, ["record"], "{}\n", chat=False)
        chats = _prompts(config, plain, ["chat"], "{}", chat=True)
        return [
            _Setting(
                f"Records: {_DEFAULT} with the bundled adapter", tuned, records, _tuned_schedules(tuned), _BUNDLED
            ),
            _Setting(f"Chat: {_DEFAULT} as published", plain, chats, _schedules(plain, tokens), _UNTUNED),
        ]
    loaded = _load(config, config.model)
    chat = getattr(loaded.tokenizer, "chat_template", None) is not None
    prompts = _prompts(config, loaded, ["record", "chat"], "{}", chat=chat)
    remark = _UNTUNED if loaded.schedule is None else _TUNED
    return [_Setting(loaded.name, loaded, prompts, _schedules(loaded, tokens), remark)]


def _load(config: Config, name: str) -> LoadedModel:
    from skipdecode.models.loading.hub import load_model

    config.use_threads()
    return load_model(name, dtype=config.dtype, device=config.device)


def _prompts(config: Config, loaded: LoadedModel, kinds: list[str], form: str, *, chat: bool) -> list[EncodedPrompt]:
    from skipdecode.data.prompts import PromptEncoder, context_length
    from skipdecode.data.records import Record

    listed = json.loads(resources.files("skipdecode.cli").joinpath("demo_prompts.json").read_text(encoding="utf-8"))
    wanted = [p for p in listed if p["kind"] in kinds and (not config.quick or p["id"] in _QUICK_PROMPTS)]
    ask = {"record": _INSTRUCTION if chat else "", "chat": ""}
    records = [Record(i, i + 1, p["id"], form.format(ask[p["kind"]] + p["text"])) for i, p in enumerate(wanted)]
    context = context_length(loaded.model)
    encoder = PromptEncoder(loaded.tokenizer, context, chat=chat)
    prompts = encoder.encode(records)
    for prompt in prompts:
        if prompt.error is not None or (prompt.room is not None and prompt.room < config.max_new_tokens):
            raise UsageError(
                f"--max-new-tokens {config.max_new_tokens} is too many: {config.model} has a context of {context}"
            )
    return prompts


def _tuned_schedules(loaded: LoadedModel) -> list[tuple[str, Schedule]]:
    """The schedules that the bundled adapter was tuned under."""
    layers = loaded.num_layers
    positions = layers if loaded.schedule is None else loaded.schedule.seq_len
    return [
        ("full depth", Schedule.full(layers)),
        *((f"SkipDecode {s}x", Schedule.from_speedup(layers, s, positions)) for s in (2, 3)),
    ]


def _schedules(loaded: LoadedModel, tokens: int) -> list[tuple[str, Schedule]]:
    layers, own = loaded.num_layers, loaded.schedule
    tenth = max(1, layers // 10)
    half = max(2, layers // 2)
    return [
        ("full depth", Schedule.full(layers)),
        *([] if own is None else [("its own schedule", own)]),
        (f"even, {layers - tenth} layers", Schedule.even(layers, layers - tenth)),
        ("SkipDecode 2x", Schedule.from_speedup(layers, 2, tokens)),
        ("SkipDecode 3x", Schedule.from_speedup(layers, 3, tokens)),
        (f"constant, {half} layers", Schedule.constant(layers, half)),
    ]


def _outcomes(config: Config, setting: _Setting) -> dict[str, Any]:
    """Every schedule on all prompts in one batch, in turn, for exactly as many tokens; JSON-ready, full depth first."""
    from skipdecode.common.progress import note, progress_bar
    from skipdecode.engine.opening import end_tokens, open_engines
    from skipdecode.engine.requests import Request

    loaded = setting.loaded
    source = open_engines(loaded.model, config.engine, note, config.weights)

    def decode(schedule: Schedule, rows: int, tokens: int) -> tuple[Engine, list[list[int]]]:
        engine = source.engine(schedule, max_rows=rows)
        decoded = engine.decode([Request(tuple(p.token_ids), tokens) for p in setting.prompts[:rows]])
        return engine, [row.tokens for row in decoded]

    decode(setting.schedules[0][1], 1, 2)
    runs: list[list[tuple[Engine, list[list[int]]]]] = [[] for _ in setting.schedules]
    with progress_bar(config.rounds * len(runs), "run", leave=False) as bar:
        for _ in range(config.rounds):
            for (_, schedule), results in zip(setting.schedules, runs, strict=True):
                results.append(decode(schedule, len(setting.prompts), config.max_new_tokens))
                bar.update()
    ends = end_tokens(loaded.model, loaded.tokenizer)
    shown = [
        {
            "name": name,
            "schedule": schedule.to_dict(),
            **_figures([engine.stats for engine, _ in results], [engine.stats for engine, _ in runs[0]]),
            "texts": [_text(loaded.tokenizer, tokens, ends) for tokens in results[0][1]],
        }
        for (name, schedule), results in zip(setting.schedules, runs, strict=True)
    ]
    asked = [
        {"id": str(p.record.id), "prompt": str(p.record.prompt).removeprefix(_INSTRUCTION).strip()}
        for p in setting.prompts
    ]
    return {"title": setting.title, "engine": source.name, "prompts": asked, "runs": shown}


def _figures(rounds: Sequence[EngineStats], full: Sequence[EngineStats]) -> dict[str, float]:
    """What the rounds of one schedule gave, next to those of full depth."""
    one = rounds[0]
    layers = one.layer_reads / one.steps
    # Whatever else the machine does can only slow a run down.
    seconds, full_seconds = (min(stats.after_prompts for stats in each) for each in (rounds, full))
    return {
        "layers_per_token": layers,
        "nominal_speedup": full[0].layer_reads / full[0].steps / layers,
        "measured_decode_speedup": full_seconds / seconds,
        "decode_tokens_per_s": one.fed_tokens / seconds,
        "kv_bytes": one.kv_bytes_peak,
        "kv_saved_share": 1 - one.kv_bytes_peak / one.kv_bytes_full_peak,
    }


def _text(tokenizer: Any, tokens: list[int], end_tokens: frozenset[int]) -> str:
    end = next((i for i, token in enumerate(tokens) if token in end_tokens), len(tokens))
    return str(tokenizer.decode(tokens[:end], skip_special_tokens=True)).strip()


def _lines(part: dict[str, Any], remark: str, width: int) -> list[str]:
    """A part for a terminal: texts side by side, and a table of figures."""
    # A constant schedule is there for its figures; its text says no more than that of the one with the same mean.
    shown = [run for run in part["runs"] if not run["name"].startswith("constant")]
    lines = ["", *textwrap.wrap(f"== {part['title']}", width)]
    for i, prompt in enumerate(part["prompts"]):
        lines += ["", f"> {prompt['prompt']}", ""]
        lines += side_by_side([run["name"] for run in shown], [run["texts"][i] for run in shown], width)
    columns = {
        f"{len(part['prompts'])} rows, {part['engine']} engine": "{name}",
        f"layers of {part['runs'][0]['schedule']['num_layers']}": "{layers_per_token:.1f}",
        "nominal": "{nominal_speedup:.2f}x",
        "measured": "{measured_decode_speedup:.2f}x",
        "tokens/s": "{decode_tokens_per_s:.0f}",
        "KV saved": "{kv_saved_share:.0%}",
    }
    return [*lines, "", *figures(columns, part["runs"]), "", *textwrap.wrap(remark, width)]
