"""The schedule that a model or an adapter carries: where it is written, and how it is found again.

A checkpoint has it in ``config.json`` (key ``skipdecode``), a PEFT adapter in ``skipdecode.json`` beside its weights.
PEFT forgets the directory that it loads an adapter from, but keeps the adapter's config, whose one free field
(``auto_mapping``, unused where the task type is named) holds the schedule too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skipdecode.errors import ScheduleError
from skipdecode.models.families import decoder_layers, layers_in, unwrap
from skipdecode.schedule import Schedule

__all__ = ["FIT_FILE", "SCHEDULE_FILE", "carry", "keep_tuned", "of_adapter", "of_config", "of_model", "tuned_under"]

SCHEDULE_FILE = "skipdecode.json"
FIT_FILE = "skipdecode.fit"  # safetensors inside; other tools take every *.safetensors of a directory for weights
_KEY = "skipdecode"
_TUNED = "_skipdecode_tuned_under"


def of_config(config: Any, where: str) -> Schedule | None:
    """The schedule in a transformers config; raises ScheduleError naming `where`."""
    data = getattr(config, _KEY, None)
    return None if data is None else _fitting(data, layers_in(config), f"{where}, key {_KEY!r} of config.json")


def of_adapter(folder: Path, config: Any) -> Schedule | None:
    """The schedule in an adapter's directory, for a base model of this config; raises ScheduleError naming the file."""
    file = folder / SCHEDULE_FILE
    if not file.is_file():
        return None
    schedule = Schedule.load(file)
    return _fitting(schedule.to_dict(), layers_in(config), str(file))


def of_model(model: Any) -> Schedule:
    """The schedule that a loaded model carries: its active adapter's, else its config's.

    Raises
    ------
    ScheduleError
        It carries none, or one that is wrong or for another number of layers.
    """
    plain, layers = unwrap(model), len(decoder_layers(unwrap(model)))
    adapters = getattr(model, "peft_config", None) or {}
    active = getattr(model, "active_adapter", None)
    adapter = adapters.get(active) if isinstance(active, str) else next(iter(adapters.values()), None)
    data = (getattr(adapter, "auto_mapping", None) or {}).get(_KEY)
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


def carry(adapted: Any, schedule: Schedule) -> None:
    """Have the active adapter of a PeftModel carry a schedule, also when it is saved."""
    config = adapted.active_peft_config
    config.auto_mapping = {**(config.auto_mapping or {}), _KEY: schedule.to_dict()}


def keep_tuned(model: Any, schedules: tuple[Schedule, ...]) -> None:
    """Have a loaded model know all schedules that it was tuned under; it carries one of them at most."""
    unwrap(model).__dict__[_TUNED] = schedules


def tuned_under(model: Any) -> tuple[Schedule, ...]:
    """The schedules that a loaded model was tuned under, as far as it knows: what it carries counts."""
    known: tuple[Schedule, ...] = unwrap(model).__dict__.get(_TUNED, ())
    try:
        return (*known, of_model(model))
    except ScheduleError:
        return known


def _fitting(data: Any, num_layers: int, where: str) -> Schedule:
    try:
        schedule = Schedule.from_dict(data)
        schedule.check_fits(num_layers)
    except ScheduleError as e:
        raise ScheduleError(f"{where}: {e}") from e
    return schedule
