"""`skipdecode eval MODEL --self`: schedules compared with the base model, on self-generated texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from skipdecode.cli.options import adjusted_schedule
from skipdecode.cli.options.evaluation import Config, MethodChoice, choose_method, each_method
from skipdecode.common.columns import figures, table
from skipdecode.common.environment import environment
from skipdecode.common.jsonl import read_objects
from skipdecode.common.kinds import heading
from skipdecode.common.progress import note
from skipdecode.data.forms import recipe_template
from skipdecode.data.prompts import context_length, encode_prompts, prompt_room
from skipdecode.data.records import Record, Template
from skipdecode.data.source import PromptSource, Records
from skipdecode.engine.base import Engine
from skipdecode.engine.loading import load
from skipdecode.engine.opening import end_tokens
from skipdecode.engine.requests import row_seed
from skipdecode.errors import ModelLoadError, UsageError
from skipdecode.evaluation.methods import Method
from skipdecode.evaluation.results import OUTPUTS_FILE, check_free, is_unfinished, keep_unfinished, save_run
from skipdecode.evaluation.run import note_left_out
from skipdecode.evaluation.self_generated import SelfEvaluation
from skipdecode.evaluation.settings import EvaluationSettings
from skipdecode.evaluation.speed import measured_speeds
from skipdecode.models.loading.base_weights import checkpoint_digest
from skipdecode.models.loading.hub import LoadedModel
from skipdecode.models.loading.recipe import stored_recipe
from skipdecode.tuning.self_generated import (
    DEV_FILE,
    TRAIN_FILE,
    SelfGeneratedData,
    SelfGeneratedOptions,
    default_template,
    forget_prompts,
)

_HELD_OUT = 3  # other random prompts than those of `skipdecode tune --self`
_COLUMNS = {
    "schedule": "{name}",
    "request": "{measured_speedup_with_prompt:.2f}x",
    "decode": "{measured_speedup:.2f}x",
    "nominal": "{nominal_speedup:.2f}x",
    "KL": "{kl[estimate]:.3f}",
    "same token": "{top1_agreement[estimate]:.1f}%",
    "perplexity": "{perplexity:.2f}",
    "of base model": "{of_base[estimate]:.3f} [{of_base[low]:.3f}, {of_base[high]:.3f}]",
    "instructions": "{instructions[followed]:.1%}",
}
_TITLE = (
    "{n} prompts. KL, same token: on the base model's texts. Perplexity: of the base model on the texts of each\n"
    "schedule, and its ratio [95% interval]. Request, decode: speed-up over full depth on the same engine.\n"
)


def evaluate_self(config: Config, prompts: PromptSource | None) -> int:
    """Measure on `prompts`, or on sampled ones, save and print; returns 0."""
    if not config.model or not config.out:
        raise UsageError(f"{'--out' if config.model else 'MODEL'} is missing")
    each = each_method(config)
    out, ref = Path(config.out), config.ref
    check_free(out, overwrite=config.overwrite or is_unfinished(out))
    loaded = config.load()
    recipe = stored_recipe(loaded.path)
    tuned_from = None if recipe is None else recipe["options"].get("model")
    name = config.base or (tuned_from if ref.adapter is None else ref.base) or config.model
    try:
        base = loaded
        if name != config.model:
            base = load(name, dtype=config.dtype, device=config.device, engine=config.engine)
    except ModelLoadError as e:
        raise type(e)(f"the base model: {e} (--base selects another)") from None
    document, rows = _measured(config, prompts, loaded, base, _methods(config, each, loaded))
    save_run(out, document, rows)
    forget_prompts(out)
    print(json.dumps(document, indent=1) if config.json else "\n".join(_lines(document, out)))
    return 0


def _methods(config: Config, each: list[MethodChoice], loaded: LoadedModel) -> list[Method]:
    """The schedules of the options, else all that the checkpoint was tuned under."""
    named = config.methods or config.schedule or config.nominal_speedup
    if named or loaded.recipe is None:
        kind: dict[str, Any] = {"carried": loaded.schedule, "default_seq_len": config.self_tokens}
        choices = [choose_method(one, loaded.num_layers, **kind) for one in each]
    else:
        choices = [adjusted_schedule(config, schedule, "tuned under") for schedule in loaded.recipe.tuned_under]
    schedules = [schedule for schedule, _ in choices if not schedule.is_full]
    if not schedules:
        raise UsageError("--self compares schedules with full depth: give some, as in --methods unified:1.5 even:2")
    if len(schedules) > len({schedule.name for schedule in schedules}):
        raise UsageError("two of --methods have the same name: give the schedules different names")
    backend = config.engines(loaded)
    return [Method(backend, schedule) for schedule in schedules]


def _measured(
    config: Config,
    source: PromptSource | None,
    loaded: LoadedModel,
    base: LoadedModel,
    methods: list[Method],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The document, and the texts of each prompt."""
    backend = methods[0].backend
    note(f"base model: {base.name}; engine: {backend.name}")
    reference = Method(backend if base is loaded else config.engines(base), name="base")
    full = reference if base is loaded else Method(backend)
    template, records, prompts = _prompts(config, source, loaded, base, reference.make_engine)
    settings = replace(config.part(EvaluationSettings), max_new_tokens=config.self_tokens)
    about = {name: getattr(config, name) for name in ("name", "model", "quantization")} | {
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "base": base.name,
        "checkpoint": checkpoint_digest(loaded),
        "base_checkpoint": checkpoint_digest(base),
        "self_generated": asdict(config.part(SelfGeneratedOptions)),
        "template": template.to_dict(),
        "settings": asdict(settings),
        "methods": [method.settings() for method in methods],
        "engine": full.engine,
        "device": str(loaded.model.device),
        "tuned": (stored_recipe(loaded.path) or {}).get("result"),
    }
    variants = list(dict.fromkeys([reference, full, *methods]))
    tokenizer: Any = base.tokenizer
    ends = end_tokens(base.model, tokenizer)
    out, whole = Path(config.out or ""), about | {"prompts": prompts}
    check_free(out, overwrite=config.overwrite or is_unfinished(out, whole))
    with closing(keep_unfinished(out, whole)) as kept:
        comparison = SelfEvaluation(reference, tokenizer, prompts, config.answers(config.seed), ends, settings, kept)
        texts = {variant: comparison.texts(variant) for variant in variants}
        rows = comparison.rows(texts, chat=template.chat)
        lengths = [len(text) for text in texts[reference]]
        speeds = measured_speeds([full, *methods], prompts, lengths, settings, kept, True)
        kept.remove()
    for variant, row in zip(variants, rows, strict=True):
        row |= speeds.get(variant, {})
    said = {one.name: tokenizer.batch_decode(texts[one], skip_special_tokens=True) for one in variants}
    document = heading("self-generated") | {"n": len(prompts), "engine": full.engine, "rows": rows}
    document |= {"outputs": OUTPUTS_FILE, "config": about, "environment": environment()}
    return document, [
        {"id": record.id, "prompt": record.prompt, "texts": {name: each[i] for name, each in said.items()}}
        for i, record in enumerate(records)
    ]


def _prompts(
    config: Config,
    source: PromptSource | None,
    loaded: LoadedModel,
    base: LoadedModel,
    make_engine: Callable[[int], Engine],
) -> tuple[Template, list[Record], list[list[int]]]:
    """The template, prompts that the checkpoint was not tuned on, and the token ids of the prompts."""
    asked = Template("{prompt}", chat=True) if config.chat else recipe_template(loaded.recipe)
    template, options = default_template(base.tokenizer, asked), config.part(SelfGeneratedOptions)
    seed, skip_bad = row_seed(config.seed, _HELD_OUT), config.bad_records == "skip"
    data = SelfGeneratedData(base, make_engine, template, options, source, Path(config.out or ""), seed, skip_bad)
    known = (
        row
        for file in (TRAIN_FILE, DEV_FILE)
        if (loaded.path / file).is_file()
        for _, row in read_objects(loaded.path / file)
    )
    rows = (row for row in known if isinstance(row, dict) and row.keys() >= set(template.fields))
    found = data.prompts(map(template.render, rows))
    room = prompt_room(context_length(base.model.config), config.self_tokens)
    fitting, ids = encode_prompts(template, Records(tuple(found)), base.tokenizer, room=room, skip_bad=True)
    note_left_out(fitting.skipped)
    return template, list(fitting.items), ids


def _lines(document: dict[str, Any], out: Path) -> list[str]:
    """The tables of the results."""
    rows: list[dict[str, Any]] = document["rows"]
    lines = [_TITLE.format(n=document["n"]), *figures(_COLUMNS, rows)]
    for title, name, form in (("KL by position", "kl", "{:.3f}"), ("perplexity", "perplexity", "{:.2f}")):
        shown = {row["name"]: row["by_position"].get(name, ()) for row in rows}
        heads = [f"{bucket['low']}-{bucket['high']}" for bucket in max(shown.values(), key=len)]
        cells = [[form.format(b["score"]) for b in buckets] for buckets in shown.values()]
        filled = [[which, *row, *["-"] * (len(heads) - len(row))] for which, row in zip(shown, cells, strict=True)]
        lines += ["", *table([title, *heads], filled)]
    return [*lines, "", f"{out / 'run.json'}, {document['outputs']} beside it"]
