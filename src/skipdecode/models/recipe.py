"""The recipe of a tuning, ``recipe.json`` beside the weights: the prompt template and the schedules.

`skipdecode tune` writes it (`skipdecode.learning.checkpoint`), and no other module reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skipdecode.common.jsonl import Fields, Json, kind_of, read_json
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError, ScheduleError, UsageError
from skipdecode.schedule import Schedule
from skipdecode.schedule.order import prompt_set

RECIPE_FILE = "recipe.json"
RECIPE_KIND, RECIPE_FORMAT = "recipe", 1


@dataclass(frozen=True)
class Recipe:
    """The facts about a checkpoint's tuning that its use needs."""

    template: PromptTemplate | None = None
    tuned_under: tuple[Schedule, ...] = ()  # the schedules under which the weights were tuned, the target first
    # The weights at the start of the run; see `skipdecode.models.loading.weights_sample`.
    base: Fields | None = None


def read_recipe(path: Path) -> Json:
    """A recipe as `skipdecode tune` wrote it; raises DataError if the file cannot be read or is not a recipe."""
    recipe = read_json(path)
    if not isinstance(recipe, dict) or not isinstance(recipe.get("options"), dict):
        raise DataError(f"recipe {path}: a JSON object with the key 'options' is accepted")
    if recipe.get("kind", RECIPE_KIND) != RECIPE_KIND:
        raise DataError(f"recipe {path}: is of kind {recipe['kind']!r}, {RECIPE_KIND} is accepted")
    if recipe.get("format", RECIPE_FORMAT) != RECIPE_FORMAT:
        raise DataError(f"recipe {path}: format {recipe['format']!r} is not known, this version reads {RECIPE_FORMAT}")
    return recipe


def stored_recipe(folder: Path) -> Json | None:
    """`read_recipe` of a checkpoint's directory; None if it has no recipe, or that of another tool."""
    path = folder / RECIPE_FILE
    document = read_json(path) if path.is_file() else None
    is_recipe = isinstance(document, dict) and isinstance(document.get("options"), dict)
    return read_recipe(path) if is_recipe else None


def ran_in_bf16(folder: Path) -> bool:
    """Whether the weights in a directory come from `skipdecode tune --full` with bf16 arithmetic."""
    try:
        recipe = stored_recipe(folder) or {"options": {}}
    except DataError:  # callers that need the recipe raise the error
        return False
    full, result = recipe["options"].get("full"), recipe.get("result")
    return bool(full) and isinstance(result, dict) and result.get("precision") == "bf16"


def checkpoint_recipe(
    folder: Path, document: Fields | None, checkpoint_schedule: Schedule | None, num_layers: int
) -> Recipe:
    """The recipe of a checkpoint in a directory, from its `stored_recipe`.

    Without one, the recipe has at most the schedule of the checkpoint.

    Raises DataError: the file is broken; the message names the file and the fault.
    """
    if document is None:
        return Recipe(tuned_under=() if checkpoint_schedule is None else (checkpoint_schedule,))
    try:
        tuned_under = _tuned_under(document, checkpoint_schedule, num_layers)
        template = _template(_of(document, "prompt", dict) or {})
        return Recipe(template, tuned_under, _of(document, "base", dict))
    except (DataError, ScheduleError, UsageError) as e:
        raise DataError(f"recipe {folder / RECIPE_FILE}: {e}; mend it, or take the file away to do without") from None


def _template(entry: Fields) -> PromptTemplate | None:
    """The template of the recipe's entry `prompt`, if it has one."""
    kinds = {"template": str, "responses": list, "chat": bool, "truncate": str, "max_prompt_tokens": int}
    text, responses, chat, *cut = (_of(entry, name, kind) for name, kind in kinds.items())
    if not all(isinstance(name, str) for name in responses or ()):
        raise DataError("'responses' is not a list of texts")
    return None if text is None else PromptTemplate(text, tuple(responses or ()), bool(chat), *cut)


def _tuned_under(document: Fields, checkpoint_schedule: Schedule | None, num_layers: int) -> tuple[Schedule, ...]:
    data, options = document.get("schedule"), document["options"]
    target = checkpoint_schedule if data is None else Schedule.from_dict(data)
    if target is None:
        return ()
    target.check_fits(num_layers)
    sampled = (_of(options, name, list) or () for name in ("sampled_speedups", "sampled_prompts"))
    return tuple(dict.fromkeys((target, *sampled_schedules(target, *sampled))))


def sampled_schedules(target: Schedule, speedups: Sequence[float], prompts: Sequence[str]) -> tuple[Schedule, ...]:
    """The schedules that a run samples besides `target`: its order at each speed-up, with its prompts and `prompts`.

    The target's own nominal speed-up is the target, whatever its budgets. A schedule that is named twice is listed
    twice; the first that equals the target is left out. Different schedules have different names. Raises ScheduleError
    for speed-ups and prompt layers that the target's order does not allow.
    """
    nominal = target.nominal_speedup
    sampled = [target if speedup == nominal else target.with_speedup(speedup) for speedup in speedups]
    sampled = [target if (s.budgets, s.prompt) == (target.budgets, target.prompt) else s for s in sampled]
    if target in sampled:
        sampled.remove(target)
    sets = [prompt for text in prompts if (prompt := prompt_set(text, target.num_layers)) != target.prompt]
    split = (s.with_prompt(prompt) for prompt in sets for s in (target, *sampled) if not s.is_full)
    named, schedules = {target.name: target}, []
    for schedule in (*sampled, *split):
        while named.setdefault(schedule.name, schedule) != schedule:  # custom and linear budgets may share a name
            schedule = replace(schedule, name="", variant="-".join(filter(None, (schedule.variant, "sampled"))))
        schedules.append(schedule)
    return tuple(schedules)


def _of(values: Fields, name: str, kind: type) -> Any:
    value = values.get(name)
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{name!r} is {kind_of(value)}, which is not accepted there")
    return value
