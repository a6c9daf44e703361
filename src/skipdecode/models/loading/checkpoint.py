"""A model by its name, resolved once: its directories, config, schedule, fit and recipe. Reads no weights."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from skipdecode.common.jsonl import Fields, Json
from skipdecode.common.options import near
from skipdecode.common.progress import note
from skipdecode.common.types import PeftModel, PretrainedConfig, PreTrainedModel, Tokenizer
from skipdecode.errors import ModelLoadError, UsageError
from skipdecode.models.checkpoint_schedule import (
    ADAPTER_FILE,
    ADAPTER_SCHEDULE_FILE,
    FIT_FILE,
    digest_in,
    schedule_file,
    schedule_in_config,
    schedule_of_adapter,
    untuned_line,
)
from skipdecode.models.families import check_schedule, layers_in, lent_last
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.fit_file import FitFile, choose_fit
from skipdecode.models.loading.hub_files import HubAnswer, ask_hub, snapshot
from skipdecode.models.loading.store import add_model, stored_model
from skipdecode.models.loading.stored import LAYER_COUNTS, check_values, library_errors, read_config
from skipdecode.models.recipe import Recipe, checkpoint_recipe, stored_recipe
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import base_of, is_speedup, parse_schedule

_BUNDLED = Path(__file__).parents[1] / "adapters"
_NAMES = (smollm2.NAME, *sorted(file.parent.name for file in _BUNDLED.glob(f"*/{ADAPTER_FILE}")))
_ACCEPTED = f"accepted are a local directory, a GGUF file, a hub id (owner/name), {', '.join(_NAMES)}"
_LONGEST_NAME = 4096
# All that is small, and an adapter's weights; `Checkpoint.fetch` fetches those of a whole model.
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "adapter_model.*", FIT_FILE, "README.md", "kept.png")
_noted_names: set[str] = set()  # a command may resolve a name several times


@dataclass(frozen=True)
class Checkpoint:
    """A model by name, as `open_checkpoint` resolved it; only `load_model` fetches more.

    `base` is the name of the adapter's base model, or `name` again; `given_base`, if it is not the adapter's own.
    `folder` has the config of that base model: a directory, or the snapshot of a hub id. `entries` are those of its
    config.json, its text model's first. `schedule` is the adapter's own, else the base model's. `document` is
    recipe.json as `tune` wrote it. `schedule_files` may have a fit beside them. `dtype` is that in which a GGUF file
    was dequantized.
    """

    name: str
    base: str
    adapter: Path | None
    folder: Path
    entries: Fields = field(repr=False)
    num_layers: int
    schedule: Schedule | None
    document: Fields | None = field(repr=False)
    recipe: Recipe
    fit: FitFile | None
    given_base: str | None = None
    schedule_files: tuple[str, ...] = ()
    dtype: str = "auto"
    hub: HubAnswer | None = None

    @property
    def own_folder(self) -> Path:
        """The directory of the adapter, or of the whole model: recipe, schedule and fit lie there."""
        return self.adapter or self.folder

    @property
    def tuned_under(self) -> tuple[Schedule, ...]:
        """The schedules under which the weights were tuned."""
        return self.recipe.tuned_under

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules by name: full depth, the checkpoint's own, and those that its weights were tuned under."""
        schedules = (*filter(None, [self.schedule]), *self.tuned_under)
        return {"full": Schedule.full(self.num_layers)} | {schedule.name: schedule for schedule in schedules}

    def read_schedule(self, text: str, seq_len: int, default: Schedule | None = None) -> Schedule:
        """Parse a schedule (`parse_schedule`) without a look at the config's layers, which needs transformers."""
        file, default = schedule_file(text), default or self.schedule
        return parse_schedule(file, self.num_layers, seq_len=seq_len, checkpoint_schedule=default, named=self.schedules)

    def parse(self, requested: Schedule | str | Path | None, seq_len: int, default: Schedule | None = None) -> Schedule:
        """Check a schedule, or parse its text, for this model; None: `default`, else the checkpoint's own, else full.

        Endings alone, such as ``:p15``, change that one. Other arguments and errors are those of `parse_schedule`.
        """
        if requested is None:
            schedule = default or self.schedule or Schedule.full(self.num_layers)
        elif isinstance(requested, Schedule):
            schedule = requested
        else:
            schedule = self.read_schedule(str(requested), seq_len, default)
            if is_speedup(str(requested)):
                schedule = lent_last(self._config, schedule)
        check_schedule(self._config, schedule)
        return schedule

    @property
    def config(self) -> PretrainedConfig:
        """A copy of the base model's transformers config; the packaged model's needs no download."""
        return copy.deepcopy(self._config)

    @cached_property
    def _config(self) -> PretrainedConfig:
        # Read at its first use: AutoConfig imports transformers, which a command with wrong options does without.
        return read_config(self.base, _config_file(self.base, self.folder))

    def fetch(self, files: list[str]) -> None:
        """Have the hub's cache hold files of a whole model that was named by its hub id."""
        if self.hub is not None and not all((self.folder / file).is_file() for file in files):
            snapshot(self.base, files, self.hub, bars=True)


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready for decoding.

    `model`, a transformers or a PEFT model, is in eval mode, on its device. `tokenizer`, a transformers tokenizer or
    None, pads on the left; its pad token is the end token if the checkpoint names none.
    """

    model: PreTrainedModel | PeftModel
    tokenizer: Tokenizer | None
    checkpoint: Checkpoint

    def untuned_line(self, schedules: Iterable[Schedule]) -> str | None:
        """One line for users if weights were not tuned under some of the schedules and no fit has maps, else None."""
        from skipdecode.models.fit import fit_of

        checkpoint = self.checkpoint
        return untuned_line(schedules, checkpoint.tuned_under, checkpoint.name, fit=fit_of(self.model))


class _HasModel(Protocol):
    """An LLM, or another object with a loaded model."""

    loaded: LoadedModel


Model = str | Path | Checkpoint | LoadedModel | _HasModel
"""A model that is loaded (also an LLM), or a name as for `load`."""


def loaded_of(model: Model) -> LoadedModel | None:
    """The model that is loaded, also in an LLM; None for a name."""
    loaded = getattr(model, "loaded", model)
    return loaded if isinstance(loaded, LoadedModel) else None


def open_checkpoint(
    model: Model, base: str | Path | None = None, schedules: Iterable[object] = (), dtype: str = "auto"
) -> Checkpoint:
    """Resolve a model by its name, in the order of `skipdecode.load`; no weights are read.

    A fit beside the files among `schedules`, which the model will run, is used in place of the checkpoint's own. In
    `dtype` weights of a GGUF file are dequantized; auto: in that of the file, or bf16. A model that was resolved or
    loaded before is only resolved again if one of the other arguments asks for another.

    Raises ModelLoadError, ScheduleError, DataError (broken recipe), FitError (the fit that it was tuned with is
    missing), and UsageError (a `base` for a whole model, fits beside schedules of two directories).
    """
    loaded, files = loaded_of(model), _files_among(schedules)
    known = model if loaded is None else loaded.checkpoint
    given_base = None if base is None else str(base)
    if isinstance(known, Checkpoint):
        dtype = known.dtype if dtype == "auto" or not known.base.endswith(".gguf") else dtype
        given_base, files = given_base or known.given_base, files or known.schedule_files
        if (given_base, files, dtype) == (known.given_base, known.schedule_files, known.dtype):
            return known
        known = known.name
    name = _checked_name(known)
    folder, hub = _located(name, dtype)
    adapter = folder if (folder / ADAPTER_FILE).is_file() else None
    base_name = name
    if adapter is not None:
        base_name = base_of_adapter(adapter) if given_base is None else _checked_base(given_base, "base")
        folder, hub = _located_base(base_name, adapter, dtype, is_given=given_base is not None)
    elif given_base is not None:
        raise UsageError(f"{name} is no adapter, so it takes no base model: leave out {given_base}")
    file = _config_file(base_name, folder)
    with library_errors(base_name, "its config does not load"):
        stored = json.loads(file.read_text(encoding="utf-8"))
        check_values(base_name, stored)
    entries = stored | (stored.get("text_config") or {})
    counts = (entries[key] for key in LAYER_COUNTS if isinstance(entries.get(key), int))
    num_layers = next(counts, None) or layers_in(read_config(base_name, file))
    schedule = None if adapter is None else schedule_of_adapter(adapter, num_layers)
    schedule = schedule or schedule_in_config(entries, num_layers, base_name)
    own_folder = adapter or folder
    document = stored_recipe(own_folder)
    return Checkpoint(
        name=name,
        base=base_name,
        adapter=adapter,
        folder=folder,
        entries=entries,
        num_layers=num_layers,
        schedule=schedule,
        document=document,
        recipe=checkpoint_recipe(own_folder, document, schedule, num_layers),
        fit=choose_fit(*_fit_folder(base_name, adapter, folder, entries), files),
        given_base=given_base,
        schedule_files=files,
        dtype=dtype,
        hub=hub,
    )


def _files_among(schedules: Iterable[object]) -> tuple[str, ...]:
    """The files among schedules, their texts and others: a fit may lie beside them."""
    bases = (base_of(schedule_file(str(schedule))) for schedule in schedules if isinstance(schedule, str | Path))
    return tuple(filter(os.path.isfile, bases))


def _checked_name(name: object) -> str:
    """The name of a model as text; raises UsageError for other objects, and ModelLoadError for a name that is none."""
    if not isinstance(name, str | os.PathLike):
        kind = type(name).__name__
        raise UsageError(f"a model is not accepted as {kind}: give its name or directory, or the result of load to LLM")
    text = str(os.fspath(name))
    if len(os.fsencode(text)) > _LONGEST_NAME:
        raise ModelLoadError(f"model {text[:80]!r}… is not known: no directory and no hub id has so long a name")
    return text


def _located_base(name: str, adapter: Path, dtype: str, *, is_given: bool) -> tuple[Path, HubAnswer | None]:
    """`_located` for the base model of an adapter."""
    try:
        return _located(name, dtype)
    except ModelLoadError as e:
        if is_given:
            raise
        named = f"this base model is named in {adapter / ADAPTER_FILE}, base_model_name_or_path; give another as base"
        raise ModelLoadError(f"{e} ({named})") from None


def _config_file(name: str, folder: Path) -> Path:
    """The config.json of a whole model; the packaged model's is known before its download."""
    return smollm2.CONFIG if name == smollm2.NAME and not folder.is_dir() else folder / "config.json"


def _fit_folder(base: str, adapter: Path | None, folder: Path, entries: Fields) -> tuple[Path | None, str | None]:
    """The directory of the checkpoint's own fit, and its digest: the adapter if it has a schedule, else the base."""
    if adapter is not None and any((adapter / name).exists() for name in (ADAPTER_SCHEDULE_FILE, FIT_FILE)):
        mapping = _adapter_settings(adapter).get("auto_mapping")
        return adapter, digest_in(mapping if isinstance(mapping, dict) else {})
    return (None, None) if base == smollm2.NAME else (folder, digest_in(entries))


def served_name(name: str) -> str:
    """The name of a model for clients: the last part of its path or hub id."""
    return Path(name).absolute().name or name


def model_files(name: str) -> list[Path]:
    """Directories and files on this machine that loading the model `name` reads, as far as the name determines them."""
    path = _directory(name)
    if not path.exists():
        return []
    if not (path / ADAPTER_FILE).is_file():
        return [path]
    try:
        return [path, *model_files(base_of_adapter(path))]
    except (ModelLoadError, OSError):  # refused when it is loaded
        return [path]


def base_of_adapter(adapter: Path) -> str:
    """The name of the base model that an adapter's directory names."""
    settings, file = _adapter_settings(adapter), adapter / ADAPTER_FILE
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        raise ModelLoadError(f"{file} names no base model: base_model_name_or_path is needed")
    is_id = isinstance(revision, str) and base not in _NAMES and not Path(base).expanduser().exists()
    return _checked_base(f"{base}@{revision}" if is_id else base, str(file))


def _checked_base(base: str, where: str) -> str:
    """The name of a base model; raises ModelLoadError if it is that of an adapter."""
    if base in _NAMES[1:] or (base and (Path(base).expanduser() / ADAPTER_FILE).is_file()):
        raise ModelLoadError(f"{where} names {base} as its base, which is an adapter itself: merge that one first")
    return base


def _adapter_settings(adapter: Path) -> Json:
    """The content of an adapter's config."""
    file = adapter / ADAPTER_FILE
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ModelLoadError(f"{file} is not the JSON object of a PEFT adapter: {e}") from e
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{file} is not the JSON object of a PEFT adapter")
    return settings


def _directory(name: str) -> Path:
    """The directory that a name stands for, if it is on this machine."""
    if name == smollm2.NAME:
        return stored_model(name)
    return _BUNDLED / name if name in _NAMES else Path(name).expanduser()


def _located(name: str, dtype: str) -> tuple[Path, HubAnswer | None]:
    """The directory of a model or an adapter, and for a hub id, of which what is small is fetched, the hub's answer."""
    path = _directory(name)
    if name in _NAMES:
        return path, None
    if name and path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", ADAPTER_FILE)):
            file = next(map(str, sorted(path.glob("*.gguf"))), None)
            remedy = f"give the file {file}" if file else f"a config.json or an {ADAPTER_FILE} is needed"
            raise ModelLoadError(f"{name} holds no model: {remedy}")
        return path, None
    if name.endswith(".gguf"):
        return _from_gguf(name, dtype), None
    if name and path.exists():
        raise ModelLoadError(f"{name} is a file: {_ACCEPTED}")
    answer = ask_hub(name)
    return _on_hub(name, answer), answer


def _from_gguf(name: str, dtype: str) -> Path:
    """The checkpoint of a GGUF file, or of `owner/name:file.gguf` on the hub: converted into the user's cache, once."""
    repo, _, inside = name.rpartition(":")
    file = Path(name).expanduser()
    if repo and not file.exists():
        from huggingface_hub import hf_hub_download

        with library_errors(name, "it cannot be fetched"):
            file = Path(hf_hub_download(repo, inside))
    if not file.is_file():
        raise ModelLoadError(f"{name} is no file; of a hub, give owner/name:file.gguf")
    import torch

    from skipdecode.models.loading.gguf_reader import VERSION, convert

    file, state = file.resolve(), file.stat()
    stored = {"auto": None, "float64": torch.float32}.get(dtype, getattr(torch, dtype, None))
    known = f"{file} {state.st_size} {state.st_mtime_ns} {stored} {VERSION}"
    folder = f"{file.stem}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"
    with library_errors(str(file), "it is not read here, give its safetensors"):
        return add_model(folder, lambda target: convert(file, target, stored))


def _on_hub(name: str, answer: HubAnswer) -> Path:
    folder = Path(name).parent
    siblings = [str(folder / path.name) for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    hint = near(name, [*_NAMES, *siblings])
    if answer.state == "absent":
        raise ModelLoadError(
            f"model {name!r}{hint} is not known: there is no such directory, and {answer.reason}; {_ACCEPTED}"
        )
    if (snapshot_folder := snapshot(name, _SMALL, answer)) is not None:
        if answer.state == "unreachable" and name not in _noted_names:
            _noted_names.add(name)
            note(f"{answer.reason}: {name} is read from the hub's local cache")
        return snapshot_folder
    raise ModelLoadError(
        f"model {name!r}{hint} is neither a local directory nor in the hub's local cache, and {answer.reason}; "
        f"{_ACCEPTED}"
    )
