"""The main job on the embedded default model: full depth and schedules, side by side.

Generates text for a few built-in prompts at full depth and under several schedules, for the same number of tokens, and
shows the texts, the layers that ran, and the speed that was measured next to the nominal one. The first run fetches the
model (about 100 MB) into the user's cache.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from skipdecode.cli.columns import side_by_side, table
from skipdecode.cli.engine_options import EngineOptions
from skipdecode.cli.options import option
from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.models.hub import LoadedModel
    from skipdecode.textgen.backend import BatchResult
    from skipdecode.textgen.engines import BackendSource
    from skipdecode.textgen.prompts import EncodedPrompt

__all__ = ["Config", "run"]

_QUICK_PROMPTS = ("record-1", "record-2", "chat-1")
_QUICK_TOKENS = 16
_INSTRUCTION = "Describe this place in one sentence, from these facts: "
_UNTUNED = (
    "This model was not tuned under any schedule, so its text breaks when layers are left out; tuning under the "
    "schedule is what repairs it: skipdecode tune --help. Layers, speed and memory are the same for a tuned model."
)
_TUNED = (
    "This checkpoint was tuned under its own schedule; under the other ones its text breaks. Layers, speed and memory "
    "are the same for any weights."
)


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions):
    """Options of `skipdecode demo`."""

    model: str = option("a local directory, a hub id, or smollm2-135m", default="smollm2-135m")
    max_new_tokens: int = option("new tokens of every prompt", default=32)
    rounds: int = option("times that every schedule runs, in turn; the fastest counts", default=2)
    quick: bool = option(f"only {len(_QUICK_PROMPTS)} prompts, {_QUICK_TOKENS} tokens and one round", default=False)
    dtype: str = option(
        "of the weights; float32 is the fastest on most CPUs",
        default="float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str | None = option("torch device (default: the first GPU if there is one, else cpu)", default=None)
    threads: int | None = option("CPU threads (default: torch's choice)", default=None)
    json: bool = option("print one JSON document instead", default=False)


@dataclass(frozen=True)
class _Outcome:
    """What one schedule gave: the texts of all prompts, the figures of one round, the seconds of its fastest."""

    name: str
    schedule: Schedule
    texts: list[str]
    result: BatchResult
    decode_s: float

    @property
    def layers(self) -> float:
        return self.result.step_layers / self.result.steps

    def figures(self, full: _Outcome) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.name,
            "schedule": self.schedule.to_dict(),
            "layers_per_token": self.layers,
            "nominal_speedup": full.layers / self.layers,
            "measured_decode_speedup": full.decode_s / self.decode_s,
            "decode_tokens_per_s": len(self.texts) * self.result.steps / self.decode_s,
            "kv_bytes": self.result.kv_bytes,
            "kv_saved_share": 1 - self.result.kv_bytes / self.result.kv_bytes_full,
            "texts": self.texts,
        }


def run(config: Config) -> int:
    """Show the demo; returns 0."""
    if config.quick:
        config = dataclasses.replace(config, max_new_tokens=_QUICK_TOKENS, rounds=1)
    for name, value, least in (("max-new-tokens", config.max_new_tokens, 2), ("rounds", config.rounds, 1)):
        if value < least:
            raise UsageError(f"--{name} {value} is not accepted: give {least} or more")
    loaded = _load(config)
    prompts = _prompts(config, loaded)
    backends = _backends(config, loaded)
    outcomes = _outcomes(config, loaded, prompts, backends)
    figures = [o.figures(outcomes[0]) for o in outcomes]
    if config.json:
        print(json.dumps(_document(config, backends, prompts, figures), indent=2))
    else:
        print("\n".join(_page(loaded, backends, prompts, outcomes, figures)))
    return 0


def _load(config: Config) -> LoadedModel:
    import torch

    from skipdecode.models.hub import load_model

    if config.threads is not None:
        if config.threads < 1:
            raise UsageError(f"--threads {config.threads} is not accepted: give 1 or more")
        torch.set_num_threads(config.threads)
    return load_model(config.model, dtype=config.dtype, device=config.device)


def _backends(config: Config, loaded: LoadedModel) -> BackendSource:
    from skipdecode.textgen.engines import open_backends
    from skipdecode.textgen.report import note

    return open_backends(loaded.model, loaded.tokenizer, config.engine, note)


def _prompts(config: Config, loaded: LoadedModel) -> list[EncodedPrompt]:
    from skipdecode.textgen.prompts import PromptEncoder, context_length
    from skipdecode.textgen.records import Record

    listed = json.loads(resources.files("skipdecode").joinpath("demo_prompts.json").read_text(encoding="utf-8"))
    wanted = [p for p in listed if not config.quick or p["id"] in _QUICK_PROMPTS]
    records = [
        Record(i, i + 1, p["id"], _INSTRUCTION + p["text"] if p["kind"] == "record" else p["text"])
        for i, p in enumerate(wanted)
    ]
    has_template = getattr(loaded.tokenizer, "chat_template", None) is not None
    context = context_length(loaded.model)
    encoder = PromptEncoder(loaded.tokenizer, context, chat=has_template)
    prompts = encoder.encode(records)
    for prompt in prompts:
        if prompt.error is not None or (prompt.room is not None and prompt.room < config.max_new_tokens):
            raise UsageError(
                f"--max-new-tokens {config.max_new_tokens} is too many: {config.model} has a context of {context}"
            )
    return prompts


def _schedules(num_layers: int, tokens: int, own: Schedule | None) -> list[tuple[str, Schedule]]:
    tenth = max(1, num_layers // 10)
    half = max(2, num_layers // 2)
    return [
        ("full depth", Schedule.full(num_layers)),
        *([] if own is None else [("its own schedule", own)]),
        (f"even, {num_layers - tenth} layers", Schedule.even(num_layers, num_layers - tenth)),
        ("SkipDecode 2x", Schedule.from_speedup(num_layers, 2, tokens)),
        ("SkipDecode 3x", Schedule.from_speedup(num_layers, 3, tokens)),
        (f"constant, {half} layers", Schedule.constant(num_layers, half)),
    ]


def _outcomes(
    config: Config, loaded: LoadedModel, prompts: Sequence[EncodedPrompt], source: BackendSource
) -> list[_Outcome]:
    """Every schedule on all prompts in one batch, in turn, for exactly as many tokens."""
    from tqdm import tqdm

    from skipdecode.models.families import decoder_layers, unwrap
    from skipdecode.textgen.backend import GenerationSettings

    # The last token is not fed back: one position fewer than tokens.
    schedules = _schedules(len(decoder_layers(unwrap(loaded.model))), config.max_new_tokens - 1, loaded.schedule)
    backends = [source.backend(s) for _, s in schedules]
    ids = [p.token_ids for p in prompts]
    settings = GenerationSettings(config.max_new_tokens, ignore_eos=True)
    backends[0].generate(ids[:1], GenerationSettings(2, ignore_eos=True), [0])
    runs: list[list[BatchResult]] = [[] for _ in schedules]
    with tqdm(total=config.rounds * len(schedules), unit="run", file=sys.stderr, leave=False) as bar:
        for _ in range(config.rounds):
            for backend, results in zip(backends, runs, strict=True):
                results.append(backend.generate(ids, settings, range(len(ids))))
                bar.update()
    return [
        _Outcome(
            name,
            schedule,
            [_text(loaded.tokenizer, tokens, backends[0].end_tokens) for tokens in results[0].tokens],
            results[0],
            # Whatever else the machine does can only slow a run down.
            min(r.decode_s for r in results),
        )
        for (name, schedule), results in zip(schedules, runs, strict=True)
    ]


def _text(tokenizer: Any, tokens: list[int], end_tokens: Sequence[int]) -> str:
    end = next((i for i, token in enumerate(tokens) if token in end_tokens), len(tokens))
    return str(tokenizer.decode(tokens[:end], skip_special_tokens=True)).strip()


# ---------------------------------------------------------------------- what is shown


def _document(
    config: Config, source: BackendSource, prompts: Sequence[EncodedPrompt], figures: list[dict[str, Any]]
) -> dict[str, Any]:
    from skipdecode.environment import environment

    return {
        "model": config.model,
        "dtype": config.dtype,
        "engine": source.engine,
        "max_new_tokens": config.max_new_tokens,
        "rounds": config.rounds,
        "prompts": [{"id": p.record.id, "prompt": p.record.prompt} for p in prompts],
        "runs": figures,
        "environment": environment(),
    }


def _page(
    loaded: LoadedModel,
    source: BackendSource,
    prompts: Sequence[EncodedPrompt],
    outcomes: Sequence[_Outcome],
    figures: list[dict[str, Any]],
) -> list[str]:
    width = min(shutil.get_terminal_size((100, 24)).columns, 160)
    # The constant schedule is there for its figures; its text says no more than that of the one with the same mean.
    shown = outcomes[:-1]
    lines = []
    for i, prompt in enumerate(prompts):
        lines += ["", f"> {str(prompt.record.prompt).removeprefix(_INSTRUCTION)}", ""]
        lines += side_by_side([o.name for o in shown], [o.texts[i] for o in shown], width)
    layers = outcomes[0].schedule.num_layers
    rows = [
        [
            f["name"],
            f"{f['layers_per_token']:.1f}",
            f"{f['nominal_speedup']:.2f}x",
            f"{f['measured_decode_speedup']:.2f}x",
            f"{f['decode_tokens_per_s']:.0f}",
            f"{f['kv_saved_share']:.0%}",
        ]
        for f in figures
    ]
    header = [
        f"{loaded.name}, {len(prompts)} rows, {source.engine} engine",
        f"layers of {layers}",
        "nominal",
        "measured",
        "tokens/s",
        "KV saved",
    ]
    remark = _UNTUNED if loaded.schedule is None else _TUNED
    return [*lines, "", *table(header, rows), "", *textwrap.wrap(remark, width)]
