"""The schedule of a checkpoint or an adapter, and the digest of its fit: where they are stored, and how they are read.

A checkpoint stores its schedule in ``config.json`` (key ``skipdecode``), a PEFT adapter in ``skipdecode.json`` beside
its weights. PEFT does not keep the directory of a loaded adapter, but it keeps the adapter's config. The one free field
of this config (``auto_mapping``, unused if the task type is named) stores the schedule as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skipdecode.common.jsonl import Fields, Json
from skipdecode.common.types import PeftModel, PretrainedConfig, PreTrainedModel
from skipdecode.errors import ScheduleError
from skipdecode.models.families import decoder_layers, lent_last, unwrap
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import base_of, is_speedup, parse_schedule

if TYPE_CHECKING:
    from skipdecode.models.fit import Fit

ADAPTER_FILE = "adapter_config.json"
ADAPTER_SCHEDULE_FILE = "skipdecode.json"
FIT_FILE = "skipdecode.fit"  # a safetensors file; other tools treat every *.safetensors of a directory as weights
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


def schedule_in_config(entries: Fields, num_layers: int, where: str) -> Schedule | None:
    """The schedule among the entries of a config; raises ScheduleError with `where` in its message."""
    data = entries.get(_KEY)
    return None if data is None else _fitting(data, num_layers, f"{where}, key {_KEY!r} of config.json")


def schedule_of_adapter(folder: Path, num_layers: int) -> Schedule | None:
    """The schedule in an adapter's directory, for a base model of so many layers; a ScheduleError names the file."""
    file = folder / ADAPTER_SCHEDULE_FILE
    if not file.is_file():
        return None
    schedule = Schedule.load(file)
    return _fitting(schedule.to_dict(), num_layers, str(file))


def schedule_of_model(model: PreTrainedModel) -> Schedule:
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
        missing = f"the model's config has none (key {_KEY!r})"
        missing = "neither the adapter nor its base carries one" if adapters else missing
        remedy = f"pass one, such as Schedule.from_speedup({layers}, 2, seq_len=64) or Schedule.load(FILE)"
        raise ScheduleError(f"no schedule was given, and {missing}: {remedy}")
    return _fitting(data, layers, "the model's config")


def store_in_adapter(adapted: PeftModel, schedule: Schedule, fit: str | None = None) -> None:
    """Store a schedule and the digest of a fit in the active adapter of a PeftModel, so that they are saved with it."""
    config = adapted.active_peft_config
    others = {name: value for name, value in (config.auto_mapping or {}).items() if name not in (_KEY, _FIT_KEY)}
    config.auto_mapping = others | _entries(schedule, fit)


def store_in_config(config: PretrainedConfig, schedule: Schedule, fit: str | None = None) -> None:
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


def record_tuned_under(model: PreTrainedModel, schedules: tuple[Schedule, ...]) -> None:
    """Record in a loaded model all schedules under which it was tuned."""
    unwrap(model).__dict__[_TUNED] = schedules


def tuned_under(model: PreTrainedModel) -> tuple[Schedule, ...]:
    """The recorded schedules under which a loaded model was tuned, with the schedule of its checkpoint."""
    known: tuple[Schedule, ...] = unwrap(model).__dict__.get(_TUNED, ())
    try:
        return (*known, schedule_of_model(model))
    except ScheduleError:
        return known


def named_schedule(model: PreTrainedModel, text: str) -> Schedule:
    """The schedule of a text (`skipdecode.schedule.grammar`) for a loaded model.

    A speed-up without a schedule of the model falls over 128 positions. Raises ScheduleError if the text has no such
    form.
    """
    known = {schedule.name: schedule for schedule in tuned_under(model)}
    latest = next(reversed(known.values()), None)
    layers = len(decoder_layers(unwrap(model)))
    parsed = parse_schedule(text, layers, seq_len=_POSITIONS, checkpoint_schedule=latest, named=known)
    return lent_last(unwrap(model).config, parsed) if is_speedup(text) else parsed


def _of_active_adapter(model: PreTrainedModel) -> Json:
    """Values that the active adapter of a PeftModel carries; none for other models."""
    adapters = getattr(model, "peft_config", None) or {}
    active = getattr(model, "active_adapter", None)
    adapter = adapters.get(active) if isinstance(active, str) else next(iter(adapters.values()), None)
    mapping: Json = getattr(adapter, "auto_mapping", None) or {}
    return mapping


def _entries(schedule: Schedule, fit: str | None) -> Json:
    return {_KEY: schedule.to_dict()} | ({} if fit is None else {_FIT_KEY: fit})


def _fitting(data: object, num_layers: int, where: str) -> Schedule:
    try:
        schedule = Schedule.from_dict(data)
        schedule.check_fits(num_layers)
    except ScheduleError as e:
        raise ScheduleError(f"{where}: {e}") from e
    return schedule


def untuned_line(
    schedules: Iterable[Schedule], tuned_under: Sequence[Schedule], model: str = "MODEL", fit: Fit | None = None
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
