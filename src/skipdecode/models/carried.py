"""What a checkpoint or an adapter carries: its schedule, the digest of its fit, and the recipe of its tuning.

A checkpoint stores its schedule in ``config.json`` (key ``skipdecode``), a PEFT adapter in ``skipdecode.json`` beside
its weights. PEFT does not keep the directory of a loaded adapter, but it keeps the adapter's config. The one free field
of this config (``auto_mapping``, unused if the task type is named) stores the schedule as well.

``recipe.json`` beside the weights has the prompt template and the schedules of the tuning. `skipdecode tune` writes it
(`skipdecode.learning.checkpoint`), and no other module reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.common.jsonl import Fields, Json, kind_of, read_json
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError, ScheduleError, UsageError
from skipdecode.models.families import decoder_layers, lent_last, unwrap
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import base_of, is_speedup, parse_schedule
from skipdecode.schedule.order import prompt_set

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

    from skipdecode.models.fit import Fit

ADAPTER_FILE = "adapter_config.json"
SCHEDULE_FILE = "skipdecode.json"
FIT_FILE = "skipdecode.fit"  # a safetensors file; other tools treat every *.safetensors of a directory as weights
RECIPE_FILE = "recipe.json"
RECIPE_KIND, RECIPE_FORMAT = "recipe", 1
GENERATION_FILE = "generation_config.json"
_FITS = Path(__file__).parent / "fits"
_KEY, _FIT_KEY = "skipdecode", "skipdecode_fit"
_TUNED = "_skipdecode_tuned_under"
_POSITIONS = 128  # those of LLM.generate by default


def bundled_schedules(model: str) -> list[str]:
    """Files of the schedules, with a fit beside them, that the package has for a model by its name."""
    return sorted(str(file) for file in _FITS.glob("*.json") if file.name.startswith(f"{model}-"))


def schedule_file(name: str) -> str:
    """A schedule's text in which a bundled name, such as smollm2-135m-1.2x, is replaced by its file.

    A file of such a name is ``./smollm2-135m-1.2x``.
    """
    base = base_of(name)
    bundled = _FITS / f"{base}.json"
    known = base == Path(base).name and os.path.isfile(bundled)  # of a name that is too long too
    return f"{bundled}{name.removeprefix(base)}" if known else name


def of_config(entries: Fields, num_layers: int, where: str) -> Schedule | None:
    """The schedule among the entries of a config; raises ScheduleError with `where` in its message."""
    data = entries.get(_KEY)
    return None if data is None else _fitting(data, num_layers, f"{where}, key {_KEY!r} of config.json")


def of_adapter(folder: Path, num_layers: int) -> Schedule | None:
    """The schedule in an adapter's directory, for a base model of so many layers; a ScheduleError names the file."""
    file = folder / SCHEDULE_FILE
    if not file.is_file():
        return None
    schedule = Schedule.load(file)
    return _fitting(schedule.to_dict(), num_layers, str(file))


def of_model(model: PreTrainedModel) -> Schedule:
    """The schedule of a loaded model: that of its active adapter, else of its config.

    Raises ScheduleError: there is no schedule, or it is invalid or for another number of layers.
    """
    plain, layers = unwrap(model), len(decoder_layers(unwrap(model)))
    adapters = getattr(model, "peft_config", None) or {}
    data = _of_active_adapter(model).get(_KEY)
    if data is not None:
        return _fitting(data, layers, "the adapter's config")
    data = getattr(plain.config, _KEY, None)
    if data is None:
        what = (
            "no schedule was given, and neither the adapter nor its base carries one"
            if adapters
            else (f"no schedule was given, and the model's config has none (key {_KEY!r})")
        )
        remedy = f"pass one, such as Schedule.from_speedup({layers}, 2, seq_len=64) or Schedule.load(FILE)"
        raise ScheduleError(f"{what}: {remedy}")
    return _fitting(data, layers, "the model's config")


def carry(adapted: PeftModel, schedule: Schedule, fit: str | None = None) -> None:
    """Store a schedule and the digest of a fit in the active adapter of a PeftModel, so that they are saved with it."""
    config = adapted.active_peft_config
    others = {name: value for name, value in (config.auto_mapping or {}).items() if name not in (_KEY, _FIT_KEY)}
    config.auto_mapping = others | _entries(schedule, fit)


def carry_in_config(config: PretrainedConfig, schedule: Schedule, fit: str | None = None) -> None:
    """Store a schedule, and the digest of a fit, in a transformers config."""
    drop_schedule(config)
    vars(config).update(_entries(schedule, fit))


def drop_schedule(config: PretrainedConfig) -> None:
    """Have a transformers config carry no schedule and no fit."""
    for name in (_KEY, _FIT_KEY):
        vars(config).pop(name, None)


def digest_in(entries: Fields) -> str | None:
    """The digest of a checkpoint's fit among the entries of a config; None without a fit."""
    return entries.get(_FIT_KEY)


def digest_of_model(model: PreTrainedModel) -> tuple[bool, str | None]:
    """Whether the active adapter of a loaded model has a schedule, and the digest of the fit that goes with it.

    Without a schedule of the adapter, the digest is of the base model's fit; None without a fit.
    """
    adapter = _of_active_adapter(model)
    return _KEY in adapter, digest_in(adapter if _KEY in adapter else vars(unwrap(model).config))


def keep_tuned(model: PreTrainedModel, schedules: tuple[Schedule, ...]) -> None:
    """Record in a loaded model all schedules under which it was tuned."""
    unwrap(model).__dict__[_TUNED] = schedules


def tuned_under(model: PreTrainedModel) -> tuple[Schedule, ...]:
    """The recorded schedules under which a loaded model was tuned, with the schedule of its checkpoint."""
    known: tuple[Schedule, ...] = unwrap(model).__dict__.get(_TUNED, ())
    try:
        return (*known, of_model(model))
    except ScheduleError:
        return known


def named_schedule(model: PreTrainedModel, text: str) -> Schedule:
    """The schedule of a text (`skipdecode.schedule.grammar`) for a loaded model.

    A speed-up without a schedule of the model falls over 128 positions. Raises ScheduleError if the text has no such
    form.
    """
    known = {schedule.name: schedule for schedule in tuned_under(model)}
    own = next(reversed(known.values()), None)
    layers = len(decoder_layers(unwrap(model)))
    found = parse_schedule(text, layers, seq_len=_POSITIONS, carried=own, named=known)
    return lent_last(unwrap(model).config, found) if is_speedup(text) else found


def _of_active_adapter(model: PreTrainedModel) -> Json:
    """Values that the active adapter of a PeftModel carries; none for other models."""
    adapters = getattr(model, "peft_config", None) or {}
    active = getattr(model, "active_adapter", None)
    adapter = adapters.get(active) if isinstance(active, str) else next(iter(adapters.values()), None)
    found: Json = getattr(adapter, "auto_mapping", None) or {}
    return found


def _entries(schedule: Schedule, fit: str | None) -> Json:
    return {_KEY: schedule.to_dict()} | ({} if fit is None else {_FIT_KEY: fit})


def _fitting(data: object, num_layers: int, where: str) -> Schedule:
    try:
        schedule = Schedule.from_dict(data)
        schedule.check_fits(num_layers)
    except ScheduleError as e:
        raise ScheduleError(f"{where}: {e}") from e
    return schedule


# ---------------------------------------------------------------------- the recipe of a tuning


@dataclass(frozen=True)
class Recipe:
    """The facts about a checkpoint's tuning that its use needs."""

    template: PromptTemplate | None = None
    tuned_under: tuple[Schedule, ...] = ()  # the schedules under which the weights were tuned, the target first
    # The weights at the start of the run; see `skipdecode.models.loading.base_weights`.
    base: Fields | None = None


def tuned_template(recipe: Recipe | None) -> PromptTemplate | None:
    """The template that a checkpoint was tuned on; None if it has no recipe, or a recipe without template."""
    return None if recipe is None else recipe.template


def untuned_line(
    schedules: Iterable[Schedule],
    tuned_under: Sequence[Schedule],
    model: str = "MODEL",
    fit: Fit | None = None,
) -> str | None:
    """One line for users if weights were not tuned under some of the schedules and the `fit` has no maps, else None."""
    bare = [s for s in schedules if not s.fits_weights(tuned_under) and (fit is None or not fit.serves(s))]
    if not bare:
        return None
    names = ", ".join(schedule.name for schedule in bare)
    other = "" if fit is None else f", and its fit is for other layers or prompts ({fit.describe()})"
    return (
        f"text will be bad: the weights were not tuned under {names}, or to skip more layers{other} (SmolLM2-135M "
        f"untuned keeps 5% of its BLEU on E2E at nominal 2x). Train them: skipdecode prepare {model} chooses layers "
        f"and tunes, skipdecode tune {model} --schedule FILE tunes"
    )


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
    is_own = isinstance(document, dict) and isinstance(document.get("options"), dict)
    return read_recipe(path) if is_own else None


def ran_in_bf16(folder: Path) -> bool:
    """Whether the weights in a directory come from `skipdecode tune --full` with bf16 arithmetic."""
    try:
        recipe = stored_recipe(folder) or {"options": {}}
    except DataError:  # callers that need the recipe raise the error
        return False
    full, result = recipe["options"].get("full"), recipe.get("result")
    return bool(full) and isinstance(result, dict) and result.get("precision") == "bf16"


def checkpoint_recipe(
    folder: Path, document: Fields | None, carried: Schedule | None, num_layers: int
) -> Recipe | None:
    """The recipe of a checkpoint in a directory, from its `stored_recipe`.

    Without one, the recipe has only the schedule of the checkpoint; without a schedule there is no recipe.

    Raises DataError: the file is broken; the message names the file and the fault.
    """
    if document is None:
        return None if carried is None else Recipe(tuned_under=(carried,))
    try:
        tuned_under = _tuned_under(document, carried, num_layers)
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


def _tuned_under(document: Fields, carried: Schedule | None, num_layers: int) -> tuple[Schedule, ...]:
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


def _of(values: Fields, name: str, kind: type) -> Any:
    value = values.get(name)
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{name!r} is {kind_of(value)}, which is not accepted there")
    return value
