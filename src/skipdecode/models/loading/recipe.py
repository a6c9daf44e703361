"""Reads a checkpoint's recipe.json: the prompt template and the schedules of the tuning.

`skipdecode tune` writes recipes (`skipdecode.learning.checkpoint`). No other module reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.common.jsonl import kind_of, read_json
from skipdecode.errors import DataError, ScheduleError
from skipdecode.models.carried import RECIPE_FILE
from skipdecode.schedule import Schedule
from skipdecode.schedule.order import prompt_set

if TYPE_CHECKING:
    from skipdecode.models.fit import Fit

RECIPE_KIND, RECIPE_FORMAT = "recipe", 1


@dataclass(frozen=True)
class Recipe:
    """The facts about a checkpoint's tuning that its use needs."""

    # The prompt text with record fields in braces; None if the recipe has no template.
    prompt_template: str | None = None
    responses: tuple[str, ...] = ()  # fields that may hold the response
    chat: bool = False  # whether the prompt was formatted with the tokenizer's chat template
    # See `skipdecode.data.records.Template`.
    truncate: str | None = None
    max_prompt_tokens: int | None = None
    tuned_under: tuple[Schedule, ...] = ()  # the schedules under which the weights were tuned, the target first
    # The weights at the start of the run; see `skipdecode.models.loading.base_weights`.
    base: Mapping[str, Any] | None = None


def named_schedules(num_layers: int, carried: Schedule | None, recipe: Recipe | None) -> dict[str, Schedule]:
    """Schedules by name: full depth, that of a checkpoint, and those that its weights were tuned under."""
    own = (*(() if carried is None else (carried,)), *(() if recipe is None else recipe.tuned_under))
    return {"full": Schedule.full(num_layers)} | {schedule.name: schedule for schedule in own}


def untuned_line(
    schedules: Iterable[Schedule],
    recipe: Recipe | None,
    model: str = "MODEL",
    fit: Fit | None = None,
) -> str | None:
    """One line for users if weights were not tuned under some of the schedules and the `fit` has no maps, else None."""
    known = () if recipe is None else recipe.tuned_under
    bare = [s for s in schedules if not s.fits_weights(known) and (fit is None or not fit.serves(s))]
    if not bare:
        return None
    names = ", ".join(schedule.name for schedule in bare)
    other = "" if fit is None else f", and its fit is for other layers or prompts ({fit.describe()})"
    return (
        f"text will be bad: the weights were not tuned under {names}, or to skip more layers{other} (SmolLM2-135M "
        f"untuned keeps 5% of its BLEU on E2E at nominal 2x). Train them: skipdecode prepare {model} chooses layers "
        f"and tunes, skipdecode tune {model} --schedule FILE tunes"
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe as `skipdecode tune` wrote it; raises DataError if the file cannot be read or is not a recipe."""
    recipe = read_json(path)
    if not isinstance(recipe, dict) or not isinstance(recipe.get("options"), dict):
        raise DataError(f"recipe {path}: a JSON object with the key 'options' is accepted")
    if recipe.get("kind", RECIPE_KIND) != RECIPE_KIND:
        raise DataError(f"recipe {path}: is of kind {recipe['kind']!r}, {RECIPE_KIND} is accepted")
    if recipe.get("format", RECIPE_FORMAT) != RECIPE_FORMAT:
        raise DataError(f"recipe {path}: format {recipe['format']!r} is not known, this version reads {RECIPE_FORMAT}")
    return recipe


def stored_recipe(folder: Path) -> dict[str, Any] | None:
    """`read_recipe` of a checkpoint's directory; None if it has no recipe."""
    path = folder / RECIPE_FILE
    return read_recipe(path) if path.is_file() else None


def ran_in_bf16(folder: Path) -> bool:
    """Whether the weights in a directory come from `skipdecode tune --full` with bf16 arithmetic."""
    try:
        recipe = stored_recipe(folder) or {"options": {}}
    except DataError:  # another tool's file, or broken: callers that need the recipe raise the error
        return False
    full, result = recipe["options"].get("full"), recipe.get("result")
    return bool(full) and isinstance(result, dict) and result.get("precision") == "bf16"


def checkpoint_recipe(path: Path, carried: Schedule | None, num_layers: int) -> Recipe | None:
    """The recipe of a checkpoint, from the file beside its weights.

    If there is no such file, or another tool wrote it, the recipe has only the schedule of the checkpoint. Without a
    schedule there is no recipe.

    Raises DataError: the file is broken; the message names the file and the fault.
    """
    document = read_json(path) if path.is_file() else None
    if not isinstance(document, dict) or not isinstance(document.get("options"), dict):
        return None if carried is None else Recipe(tuned_under=(carried,))
    document = read_recipe(path)
    try:
        tuned_under = _tuned_under(document, carried, num_layers)
        prompt = _prompt(_of(document, "prompt", dict) or {})
        return Recipe(**prompt, tuned_under=tuned_under, base=_of(document, "base", dict))
    except (DataError, ScheduleError) as e:
        raise DataError(f"recipe {path}: {e}; mend it, or take the file away to do without") from None


def _prompt(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about the prompt, from the recipe's entry `prompt`."""
    responses = _of(entry, "responses", list) or []
    if not all(isinstance(name, str) for name in responses):
        raise DataError("'responses' is not a list of texts")
    return {
        "prompt_template": _of(entry, "template", str),
        "responses": tuple(responses),
        "chat": bool(_of(entry, "chat", bool)),
        "truncate": _of(entry, "truncate", str),
        "max_prompt_tokens": _of(entry, "max_prompt_tokens", int),
    }


def _tuned_under(document: Mapping[str, Any], carried: Schedule | None, num_layers: int) -> tuple[Schedule, ...]:
    data, options = document.get("schedule"), document["options"]
    target = carried if data is None else Schedule.from_dict(data)
    if target is None:
        return ()
    target.check_fits(num_layers)
    beside = (_of(options, name, list) or () for name in ("sampled_speedups", "sampled_prompts"))
    return tuple(dict.fromkeys((target, *sampled_schedules(target, *beside))))


def sampled_schedules(target: Schedule, speedups: Sequence[float], prompts: Sequence[str]) -> tuple[Schedule, ...]:
    """The schedules that a run samples besides `target`: its order at each speed-up, with its prompts and `prompts`.

    The target's own nominal speed-up is the target, whatever its budgets. A schedule that is named twice is listed
    twice; the first that equals the target is left out. Different schedules have different names. Raises ScheduleError
    for speed-ups and prompt layers that the target's order does not allow.
    """
    nominal = target.nominal_speedup
    asked = [target if speedup == nominal else target.with_speedup(speedup) for speedup in speedups]
    asked = [target if (one.budgets, one.prompt) == (target.budgets, target.prompt) else one for one in asked]
    if target in asked:
        asked.remove(target)
    sets = [own for text in prompts if (own := prompt_set(text, target.num_layers)) != target.prompt]
    split = (one.with_prompt(own) for own in sets for one in (target, *asked) if not one.is_full)
    named, found = {target.name: target}, []
    for one in (*asked, *split):
        while named.setdefault(one.name, one) != one:  # such as a name shared by custom and linear budgets
            one = replace(one, name="", variant="-".join(filter(None, (one.variant, "sampled"))))
        found.append(one)
    return tuple(found)


def _of(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{name!r} is {kind_of(value)}, which is not accepted there")
    return value
