"""The schedule of a checkpoint or an adapter: where it is stored, and how it is read.

A checkpoint stores its schedule in ``config.json`` (key ``skipdecode``), a PEFT adapter in ``skipdecode.json`` beside
its weights. PEFT does not keep the directory of a loaded adapter, but it keeps the adapter's config. The one free field
of this config (``auto_mapping``, unused if the task type is named) stores the schedule as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipdecode.errors import ScheduleError
from skipdecode.models.families import decoder_layers, layers_in, lent_last, unwrap
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import base_of, is_speedup, parse_schedule

SCHEDULE_FILE = "skipdecode.json"
FIT_FILE = "skipdecode.fit"  # a safetensors file; other tools treat every *.safetensors of a directory as weights
RECIPE_FILE = "recipe.json"
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


def of_config(config: Any, where: str) -> Schedule | None:
    """The schedule in a transformers config; raises ScheduleError with `where` in its message."""
    data = getattr(config, _KEY, None)
    return None if data is None else _fitting(data, layers_in(config), f"{where}, key {_KEY!r} of config.json")


def of_adapter(folder: Path, config: Any) -> Schedule | None:
    """The schedule in an adapter's directory, for a base model with this config; a ScheduleError names the file."""
    file = folder / SCHEDULE_FILE
    if not file.is_file():
        return None
    schedule = Schedule.load(file)
    return _fitting(schedule.to_dict(), layers_in(config), str(file))


def of_model(model: Any) -> Schedule:
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


def carry(adapted: Any, schedule: Schedule, fit: str | None = None) -> None:
    """Store a schedule and the digest of a fit in the active adapter of a PeftModel, so that they are saved with it."""
    config = adapted.active_peft_config
    others = {name: value for name, value in (config.auto_mapping or {}).items() if name not in (_KEY, _FIT_KEY)}
    config.auto_mapping = others | _entries(schedule, fit)


def carry_in_config(config: Any, schedule: Schedule, fit: str | None = None) -> None:
    """Store a schedule, and the digest of a fit, in a transformers config."""
    drop_schedule(config)
    vars(config).update(_entries(schedule, fit))


def drop_schedule(config: Any) -> None:
    """Have a transformers config carry no schedule and no fit."""
    for name in (_KEY, _FIT_KEY):
        vars(config).pop(name, None)


def digest_in(entries: Mapping[str, Any]) -> str | None:
    """The digest of a checkpoint's fit among the entries of a config; None without a fit."""
    return entries.get(_FIT_KEY)


def digest_of_model(model: Any) -> tuple[bool, str | None]:
    """Whether the active adapter of a loaded model has a schedule, and the digest of the fit that goes with it.

    Without a schedule of the adapter, the digest is of the base model's fit; None without a fit.
    """
    adapter = _of_active_adapter(model)
    return _KEY in adapter, digest_in(adapter if _KEY in adapter else vars(unwrap(model).config))


def keep_tuned(model: Any, schedules: tuple[Schedule, ...]) -> None:
    """Record in a loaded model all schedules under which it was tuned."""
    unwrap(model).__dict__[_TUNED] = schedules


def tuned_under(model: Any) -> tuple[Schedule, ...]:
    """The recorded schedules under which a loaded model was tuned, with the schedule of its checkpoint."""
    known: tuple[Schedule, ...] = unwrap(model).__dict__.get(_TUNED, ())
    try:
        return (*known, of_model(model))
    except ScheduleError:
        return known


def named_schedule(model: Any, text: str) -> Schedule:
    """The schedule of a text (`skipdecode.schedule.grammar`) for a loaded model.

    A speed-up without a schedule of the model falls over 128 positions. Raises ScheduleError if the text has no such
    form.
    """
    known = {schedule.name: schedule for schedule in tuned_under(model)}
    own = next(reversed(known.values()), None)
    layers = len(decoder_layers(unwrap(model)))
    found = parse_schedule(text, layers, seq_len=_POSITIONS, carried=own, named=known)
    return lent_last(unwrap(model).config, found) if is_speedup(text) else found


def _of_active_adapter(model: Any) -> dict[str, Any]:
    """What the active adapter of a PeftModel carries; nothing for other models."""
    adapters = getattr(model, "peft_config", None) or {}
    active = getattr(model, "active_adapter", None)
    adapter = adapters.get(active) if isinstance(active, str) else next(iter(adapters.values()), None)
    found: dict[str, Any] = getattr(adapter, "auto_mapping", None) or {}
    return found


def _entries(schedule: Schedule, fit: str | None) -> dict[str, Any]:
    return {_KEY: schedule.to_dict()} | ({} if fit is None else {_FIT_KEY: fit})


def _fitting(data: Any, num_layers: int, where: str) -> Schedule:
    try:
        schedule = Schedule.from_dict(data)
        schedule.check_fits(num_layers)
    except ScheduleError as e:
        raise ScheduleError(f"{where}: {e}") from e
    return schedule
