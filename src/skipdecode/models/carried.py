"""The schedule of a checkpoint or an adapter: where it is stored, and how it is read.

A checkpoint stores its schedule in ``config.json`` (key ``skipdecode``), a PEFT adapter in ``skipdecode.json`` beside
its weights. PEFT does not keep the directory of a loaded adapter, but it keeps the adapter's config. The one free field
of this config (``auto_mapping``, unused if the task type is named) stores the schedule as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skipdecode.errors import ScheduleError
from skipdecode.models.families import decoder_layers, layers_in, unwrap
from skipdecode.schedule import Schedule

__all__ = [
    "FIT_FILE",
    "SCHEDULE_FILE",
    "bundled_schedules",
    "carry",
    "drop_schedule",
    "keep_tuned",
    "of_adapter",
    "of_config",
    "of_model",
    "schedule_file",
    "tuned_under",
]

SCHEDULE_FILE = "skipdecode.json"
FIT_FILE = "skipdecode.fit"  # a safetensors file; other tools treat every *.safetensors of a directory as weights
_FITS = Path(__file__).parent / "fits"
_KEY = "skipdecode"
_TUNED = "_skipdecode_tuned_under"


def bundled_schedules(model: str) -> list[str]:
    """Files of the schedules, with a fit beside them, that the package has for a model by its name."""
    return sorted(str(file) for file in _FITS.glob("*.json") if file.name.startswith(f"{model}-"))


def schedule_file(name: str) -> str:
    """The file of a schedule that is named: a path, or the name of one that the package has, such as smollm2-135m-1.2x.

    A file of such a name is ``./smollm2-135m-1.2x``.
    """
    bundled = _FITS / f"{name}.json"
    return str(bundled) if name == Path(name).name and bundled.is_file() else name


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

    Raises
    ------
    ScheduleError
        There is no schedule, or it is invalid or for another number of layers.
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
    """Store a schedule in the active adapter of a PeftModel, so that saving the adapter saves the schedule."""
    config = adapted.active_peft_config
    config.auto_mapping = {**(config.auto_mapping or {}), _KEY: schedule.to_dict()}


def drop_schedule(config: Any) -> None:
    """Have a transformers config carry no schedule."""
    vars(config).pop(_KEY, None)


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


def _fitting(data: Any, num_layers: int, where: str) -> Schedule:
    try:
        schedule = Schedule.from_dict(data)
        schedule.check_fits(num_layers)
    except ScheduleError as e:
        raise ScheduleError(f"{where}: {e}") from e
    return schedule
