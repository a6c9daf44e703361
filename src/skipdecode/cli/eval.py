"""Measure quality, fidelity and speed of decoding methods on a task; compare runs.

  skipdecode eval MODEL --task e2e --data test.jsonl --nominal-speedup 2 --out runs/2x
  skipdecode eval MODEL --task e2e --data test.jsonl --methods skipdecode:2 even:2 mine.json --out runs
  skipdecode eval --compare runs/full runs/2x
  skipdecode eval MODEL --self --out runs

The first form generates an output for each record with the method and at full depth, scores both, and shows first the
share of full depth's scores that the method keeps. Speed is measured on a few batches, with the same output lengths for
both. It writes OUT/run.json and OUT/outputs.jsonl, and the same files for full depth in OUT/full.
After an interruption, the same command continues.
The second form evaluates several methods, which share full depth; each has its own directory in OUT. All run on
the fast engine if it supports the model, else through transformers (--engine).
The third form compares finished runs with the first of them.
The fourth form needs no records: it measures the KL divergence from the base model, the base model's perplexity on the
texts of each schedule, and the share of instructions that are followed.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.options import ScheduleChoice
from skipdecode.cli.options.evaluation import EVAL_DIRECTORY, Config, MethodChoice, choose_method, each_method
from skipdecode.common.progress import note
from skipdecode.data.forms import recipe_template
from skipdecode.data.prompts import context_length, prompt_room
from skipdecode.data.source import Records, load_records
from skipdecode.data.tasks import Task, load_task, task_names
from skipdecode.errors import UsageError
from skipdecode.evaluation.settings import EvaluationSettings, MetricOptions, Subject, method_name
from skipdecode.models.loading.base_weights import checkpoint_digest
from skipdecode.models.loading.hub import LoadedModel
from skipdecode.models.loading.recipe import Recipe, stored_recipe
from skipdecode.tuning.self_generated import open_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skipdecode.evaluation.compare import Pair
    from skipdecode.evaluation.metrics import Metric
    from skipdecode.evaluation.results import Run


def run(config: Config) -> int:
    """Evaluate or compare."""
    prompts = open_prompts(config)
    if config.self:
        from skipdecode.cli.eval_self import evaluate_self

        return evaluate_self(config, prompts)
    if config.compare:
        return _compare(config)
    for value, flag in ((config.model, "MODEL"), (config.out, "--out")):
        if not value:
            raise UsageError(f"{flag} is missing (or give --compare with finished runs)")
    return _evaluate(config)


# ---------------------------------------------------------------------- finished runs


def _compare(config: Config) -> int:
    from skipdecode.evaluation.compare import compare_runs
    from skipdecode.evaluation.results import load_run

    runs = [load_run(path) for path in config.compare]
    pairs = compare_runs(runs, config.metrics, resamples=config.resamples, seed=config.seed)
    _show(config, runs, pairs)
    return 0


def _show(config: Config, runs: Sequence[Run], pairs: Sequence[Pair] = ()) -> None:
    from skipdecode.evaluation.compare import pairs_table, runs_tables

    if config.json:
        print(json.dumps({"runs": [r.data for r in runs], "pairs": [p.to_dict() for p in pairs]}, indent=1))
        return
    print(runs_tables(runs))
    if pairs:
        print(f"\n{pairs_table(pairs)}")
    if not config.compare:
        print("", *(f"{run.name}: {run.path}, {run.data['outputs']} beside it" for run in runs), sep="\n")


# ---------------------------------------------------------------------- a new run


def _evaluate(config: Config) -> int:
    from skipdecode.evaluation.metrics import check_metrics, make_metrics
    from skipdecode.evaluation.run import note_left_out

    each, task = each_method(config), _task(config)
    directory = Path(config.out or "")
    records = load_records(task, config.data, skip_bad=config.bad_records == "skip", limit=config.limit)
    note_left_out(records.skipped)
    options = config.part(MetricOptions)
    # A metric of the task, which was not named, may be skipped.
    asked = bool(config.metrics) or options.bertscore_model != MetricOptions().bertscore_model
    names = check_metrics(config.metrics or task.metrics, options, None if asked else note)
    chosen = _checked_methods(config, each, task, directory)
    runs = _runs(config, chosen, task, records, make_metrics(names, options), directory)
    _show(config, runs)
    return 0


def _checked_methods(
    config: Config, each: Sequence[MethodChoice], task: Task, directory: Path
) -> dict[Path, ScheduleChoice]:
    """The schedules; refuses, before weights are loaded, what does not fit the config or cannot be written."""
    prompt_room(context_length(config.ref.config), config.max_new_tokens or task.max_new_tokens)
    methods = _chosen(config, each, task, directory)
    _check_places(config, methods, directory)
    return methods


def _check_places(config: Config, methods: dict[Path, ScheduleChoice], directory: Path) -> None:
    """Refuse, without --overwrite, directories with a finished run and files that are not from a run."""
    from skipdecode.evaluation.results import check_free, is_unfinished

    # Of an unfinished run, `evaluate` checks whether it is the same: that needs the loaded model.
    if config.overwrite or is_unfinished(directory):
        return
    for place in {*methods, directory / "full"}:
        EVAL_DIRECTORY.check(place, resume=True)
    for place, (schedule, _) in methods.items():
        if not schedule.is_full or len(methods) == 1:
            check_free(place, overwrite=False)


def _runs(
    config: Config,
    chosen: dict[Path, ScheduleChoice],
    task: Task,
    records: Records,
    metrics: Sequence[Metric],
    directory: Path,
) -> list[Run]:
    from skipdecode.engine.opening import end_tokens
    from skipdecode.evaluation.methods import Method
    from skipdecode.evaluation.run import evaluate

    loaded = config.load()
    recipe = _recipe(loaded)
    _check_template(loaded.recipe, task)
    _tell(config, chosen, loaded)
    backend = config.engines(loaded)
    note(f"engine: {backend.name}")
    methods = {place: Method(backend, schedule, exact=config.exact) for place, (schedule, _) in chosen.items()}
    if config.full_depth and not any(method.full_depth for method in methods.values()):
        methods = {directory / "full": Method(backend), **methods}
    subject = Subject(
        loaded.model,
        loaded.tokenizer,
        set(end_tokens(loaded.model, loaded.tokenizer)),
        context_length(loaded.model.config),
    )
    about = {
        "name": config.name,
        "model": config.model,
        "recipe": recipe,
        "data": None if config.data is None else Path(config.data).name,
        "limit": config.limit,
        "quantization": config.quantization,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "checkpoint": checkpoint_digest(loaded),
    }
    return evaluate(
        subject,
        methods,
        task,
        records,
        metrics,
        config.part(EvaluationSettings),
        out=directory,
        config=about,
        overwrite=config.overwrite,
        skip_bad=config.bad_records == "skip",
        progress=True,
    )


def _tell(config: Config, chosen: dict[Path, ScheduleChoice], loaded: LoadedModel) -> None:
    """Print the origin of each schedule, and the schedules that the weights were not tuned under."""
    for schedule, origin in chosen.values():
        note(f"{method_name(schedule, config.exact)}: {origin}")
    schedules = [schedule for schedule, _ in chosen.values() if not schedule.is_full]
    if not config.exact and (line := loaded.untuned_line(schedules)):
        note(line)


def _chosen(config: Config, each: Sequence[MethodChoice], task: Task, directory: Path) -> dict[Path, ScheduleChoice]:
    """The schedules with their origins, by the directory of their results."""
    seq_len = task.response_tokens.get("p95", config.max_new_tokens or task.max_new_tokens)
    methods: dict[Path, ScheduleChoice] = {}
    for one in each:
        choice = choose_method(one, config.ref.num_layers, carried=config.ref.schedule, default_seq_len=seq_len)
        name = method_name(choice.schedule, config.exact)
        # Names of schedules are free text.
        folder = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "schedule"
        place = directory / folder if config.methods else directory
        if place in methods:
            raise UsageError(f"--methods has {name} twice: leave one out, or give the schedules different names")
        methods[place] = choice
    return methods


def _recipe(loaded: LoadedModel) -> dict[str, Any] | None:
    """Schedule name, options, data and result from the recipe of the model, if it has one."""
    if (recipe := stored_recipe(loaded.path)) is None:
        return None
    schedule = (recipe.get("schedule") or {}).get("name")
    return {"schedule": schedule} | {name: recipe.get(name) for name in ("options", "data", "result")}


def _task(config: Config) -> Task:
    """The task of --task, else that of the checkpoint: the task that it was tuned on, or records in its template."""
    from skipdecode.evaluation.metrics import METRICS

    recipe = None if config.task else config.ref.recipe
    template = recipe_template(recipe)
    if recipe is None or template is None:
        if not config.task:
            raise UsageError(f"--task is missing: {config.model} has no template that it was tuned on")
        task = load_task(config.task, METRICS.check)
    else:
        alike = (name for name in task_names() if load_task(name).prompt == template.prompt)
        task = load_task(next(alike, "jsonl"), METRICS.check)
        fields = ("prompt", "chat", "truncate", "max_prompt_tokens")
        found = {name: getattr(template, name) for name in fields}
        task = replace(task, **found, references=tuple(dict.fromkeys((*template.responses, *task.references))))
        note(f"task {task.name}, with the checkpoint's template {task.prompt!r} (--task selects another)")
    return replace(task, chat=task.chat or config.chat)


def _check_template(recipe: Recipe | None, task: Task) -> None:
    """Print a note if the model was tuned on another template: its scores would then be too low."""
    tuned = recipe_template(recipe)
    if tuned is not None and (tuned.prompt, tuned.chat) != (task.prompt, task.chat):
        note(
            f"the model was tuned with the template {tuned.prompt!r}, chat={tuned.chat}; the task has another template"
        )
