"""Resolves a model's name: base model, adapter, place, config, recipe, schedule and fit. Reads no weights."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from skipdecode.common.options import near
from skipdecode.common.progress import note
from skipdecode.errors import ModelLoadError, SkipDecodeError, UsageError
from skipdecode.models.carried import (
    FIT_FILE,
    RECIPE_FILE,
    SCHEDULE_FILE,
    Recipe,
    checkpoint_recipe,
    digest_in,
    named_schedules,
    of_adapter,
    of_config,
    ran_in_bf16,
    schedule_file,
)
from skipdecode.models.families import FAMILIES, check_schedule, drop_unread, layer_windows, layers_in, lent_last
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.beside import HubAnswer, add_model, ask_hub, beside, find_model, fit_beside, snapshot
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import is_speedup, parse_schedule

ADAPTER_FILE = "adapter_config.json"
_BUNDLED = Path(__file__).parents[1] / "adapters"
_NAMES = (smollm2.NAME, *sorted(file.parent.name for file in _BUNDLED.glob(f"*/{ADAPTER_FILE}")))
_ACCEPTED = f"accepted are a local directory, a GGUF file, a hub id (owner/name), {', '.join(_NAMES)}"
_POINTER, _LONGEST_POINTER = b"version https://git-lfs", 1024
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 10_000
# All that is small, and an adapter's weights; `fetch` fetches those of a whole model.
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "adapter_model.*", FIT_FILE, "README.md", "kept.png")
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Keyword arguments for every ``from_pretrained``: files of a hub are fetched before."""

_told_of_cache: set[str] = set()  # a command may resolve a name several times


@dataclass(frozen=True)
class ModelRef:
    """A model by name: a directory, a hub id, ``smollm2-135m``, a PEFT adapter, or a bundled adapter.

    Every property is computed once, at its first use, and the hub is contacted once. The names of the embedded model
    and of bundled adapters take precedence: a directory of such a name is ``./smollm2-135m``. Properties raise the
    errors of `load_model`. `schedule_files` are the files of the schedules that the model will run. `given_base` is the
    name of an adapter's base model in place of the one in the adapter's directory. `dtype` is the type in which weights
    of a GGUF file are dequantized, by default that of the file or bf16.
    """

    name: str
    schedule_files: tuple[str, ...] = ()
    given_base: str | None = None
    dtype: str = "auto"

    def in_dtype(self, dtype: str) -> ModelRef:
        """The same model in another `dtype`; itself if its base model is no GGUF file, or `dtype` is auto."""
        if dtype in ("auto", self.dtype) or not self.base.endswith(".gguf"):
            return self
        return replace(self, dtype=dtype)

    @cached_property
    def adapter(self) -> Path | None:
        """The directory of the adapter; None for a whole model."""
        if self.name in _NAMES:
            return None if self.name == smollm2.NAME else _BUNDLED / self.name
        path = Path(self.name).expanduser()
        if not self.name or path.exists() or self.name.endswith(".gguf"):
            return path if self.name and (path / ADAPTER_FILE).is_file() else None
        return folder if ((folder := self._located(self.name)) / ADAPTER_FILE).is_file() else None

    @cached_property
    def base(self) -> str:
        """The name of the adapter's base model; for a whole model, its own name."""
        if self.adapter is None:
            if self.given_base is not None:
                raise UsageError(f"{self.name} is no adapter, so it takes no base model: leave out {self.given_base}")
            return self.name
        file = self.adapter / ADAPTER_FILE
        if self.given_base is not None:
            return _no_adapter(self.given_base, "base")
        settings = _adapter_settings(file)
        base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
        if not isinstance(base, str) or not base:
            raise ModelLoadError(f"{file} names no base model: base_model_name_or_path is needed")
        is_id = isinstance(revision, str) and base not in _NAMES and not Path(base).expanduser().exists()
        return _no_adapter(f"{base}@{revision}" if is_id else base, str(file))

    @cached_property
    def _asked(self) -> dict[str, tuple[HubAnswer, Path]]:
        """The hub's answers by hub id, and the directories."""
        return {}

    def _located(self, name: str) -> Path:
        """The directory of a whole model or of a hub id; what is small of the latter is fetched once."""
        if (folder := _on_this_machine(name, self.dtype)) is None:
            if name not in self._asked:
                self._asked[name] = (answer := ask_hub(name)), _on_hub(name, answer)
            folder = self._asked[name][1]
        return folder

    @cached_property
    def place(self) -> Path:
        """The directory of the base model, for a hub id its snapshot; the embedded model is downloaded first."""
        try:
            return self._located(self.base)
        except ModelLoadError as e:
            if self.adapter is None or self.given_base is not None:
                raise
            file = self.adapter / ADAPTER_FILE
            named = f"this base model is named in {file}, base_model_name_or_path; give another as base"
            raise ModelLoadError(f"{e} ({named})") from None

    @property
    def config(self) -> Any:
        """A copy of the base model's transformers config; the config of the embedded model needs no download."""
        unfetched = self.base == smollm2.NAME and find_model(smollm2.NAME) is None
        return smollm2.known_config() if unfetched else copy.deepcopy(self._config)

    @property
    def entries(self) -> dict[str, Any]:
        """The entries of the base model's config.json, its text model's first; read without transformers."""
        return self._stored_config | (self._stored_config.get("text_config") or {})

    @cached_property
    def _stored_config(self) -> dict[str, Any]:
        """The base model's config.json, whose values have the right types."""
        unfetched = self.base == smollm2.NAME and find_model(smollm2.NAME) is None
        file = smollm2.CONFIG if unfetched else self.place / "config.json"
        with told(self.base, "its config does not load"):
            stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            check_config_values(self.base, stored)
            return stored

    @cached_property
    def num_layers(self) -> int:
        """Number of decoder layers, from the config."""
        count = next((self.entries[key] for key in _LAYER_COUNTS if isinstance(self.entries.get(key), int)), None)
        return layers_in(self.config) if count is None else count

    @cached_property
    def schedule(self) -> Schedule | None:
        """The schedule of the adapter, else of its base model."""
        own = None if self.adapter is None else of_adapter(self.adapter, self.num_layers)
        return own or of_config(self.entries, self.num_layers, self.base)

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe of the adapter or the whole model; None if there is none."""
        if self.name == smollm2.NAME and find_model(smollm2.NAME) is None:
            return None
        return checkpoint_recipe(self.folder / RECIPE_FILE, self.schedule, self.num_layers)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules of the checkpoint by name; see `named_schedules`."""
        return named_schedules(self.num_layers, self.schedule, self.recipe)

    def read_schedule(self, text: str, seq_len: int) -> Schedule:
        """The schedule of a text, from the files of the checkpoint alone; see `parse_schedule`."""
        known: dict[str, Any] = {"carried": self.schedule, "named": self.schedules}
        return parse_schedule(schedule_file(text), self.num_layers, seq_len=seq_len, **known)

    def parsed(self, asked: Schedule | str | Path, seq_len: int) -> Schedule:
        """Check a schedule, or parse one, for this model; other arguments and errors as for `parse_schedule`."""
        schedule = asked if isinstance(asked, Schedule) else self.read_schedule(str(asked), seq_len)
        if not isinstance(asked, Schedule) and is_speedup(str(asked)):
            schedule = lent_last(self.config, schedule)
        check_schedule(self.config, schedule)
        return schedule

    @cached_property
    def fit(self) -> Path | None:
        """The file of the model's fit: the one beside `schedule_files`, else the checkpoint's own; None without a fit.

        Raises UsageError if schedules in several directories have fits, because a model uses only one, and FitError if
        the checkpoint was tuned with a fit that is missing.
        """
        folders = {Path(file).expanduser().resolve().parent for file in self.schedule_files}
        found = sorted(file for folder in folders if (file := beside(folder, FIT_FILE)) is not None)
        if len(found) > 1:
            raise UsageError(
                f"the schedules have fits in {found[0].parent} and in {found[1].parent}, and a model uses one: name "
                "schedules of one directory, or start a command for each"
            )
        if found or self._fitted is None:
            return found[0] if found else None
        return fit_beside(*self._fitted)

    @cached_property
    def own_fit(self) -> Path | None:
        """The file of the fit that the checkpoint has beside its weights; None without one."""
        return None if self._fitted is None else beside(self._fitted[0], FIT_FILE)

    @property
    def fit_digest(self) -> str | None:
        """The digest of the checkpoint's own fit, from its config; None if the config has none."""
        return None if self._fitted is None else self._fitted[1]

    @cached_property
    def _fitted(self) -> tuple[Path, str | None] | None:
        """The place of the checkpoint's fit, and its digest: the adapter if it has a schedule, else the base."""
        if self.adapter is not None and any((self.adapter / name).exists() for name in (SCHEDULE_FILE, FIT_FILE)):
            entries = _adapter_settings(self.adapter / ADAPTER_FILE).get("auto_mapping")
            return self.adapter, digest_in(entries if isinstance(entries, dict) else {})
        if self.base == smollm2.NAME:
            return None
        return self.place, digest_in(self.entries)

    @property
    def folder(self) -> Path:
        """The directory of the adapter, or of the whole model; for a hub id, its snapshot in the hub's cache."""
        return self.adapter or self.place

    @property
    def runs_in_bf16(self) -> bool:
        """Whether the base is ``smollm2-135m`` or of `tune --full` in bf16, whose fp32 weights are the optimizer's."""
        return self.base == smollm2.NAME or ran_in_bf16(Path(self.base).expanduser())

    @property
    def stored_in_bf16(self) -> bool:
        """Whether the config says that the weights are stored in bf16."""
        stored = getattr(self.config.get_text_config(decoder=True), "dtype", None)
        return str(stored).removeprefix("torch.") == "bfloat16"

    def fetch(self, files: list[str]) -> None:
        """Have the hub's cache hold files of a whole model that was named by its hub id."""
        if self.base in self._asked and not all((self.place / file).is_file() for file in files):
            snapshot(self.base, files, self._asked[self.base][0], bars=True)

    @cached_property
    def _config(self) -> Any:
        """The config; raises an error unless it is of a decoder-only causal LM."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

        where, classes = self.base, self._stored_config.get("architectures") or []
        with told(where, "its config does not load"):
            config = AutoConfig.from_pretrained(self.place, **LOCAL)
            layers_in(config)
        needed = "a decoder-only causal language model is needed"
        if config.is_encoder_decoder:
            raise ModelLoadError(f"{where} is an encoder-decoder ({config.model_type}): {needed}")
        if (text := config.get_text_config(decoder=True)).model_type in FAMILIES and text is not config:
            # The text model of a checkpoint that reads images or sounds too.
            text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
            config, classes = text, []
        if config.model_type not in CAUSAL_LM or (classes and not set(classes) & set(CAUSAL_LM.values())):
            raise ModelLoadError(f"{where} holds {', '.join(classes) or config.model_type}: {needed}")
        if config.model_type in FAMILIES:
            layer_windows(config)
            drop_unread(config)
        return config


def check_config_values(where: str, values: Any) -> None:
    """Refuse values of a config's JSON that would fill the memory, or fail later without a word about the config."""
    for part in (values, values.get("text_config")):
        for key in _LAYER_COUNTS if isinstance(part, dict) else ():
            if isinstance(number := part.get(key), int) and not 0 < number <= _MOST_LAYERS:
                raise ModelLoadError(f"{where}: its config has {key} {number}: 1 to {_MOST_LAYERS} are accepted")
    classes = values.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ModelLoadError(f"{where}: its config has architectures {classes!r}: a list of class names is accepted")


def served_name(name: str) -> str:
    """The name of a model for clients: the last part of its path or hub id."""
    return Path(name).absolute().name or name


def model_files(name: str) -> list[Path]:
    """Directories and files on this machine that loading the model `name` reads, as far as the name determines them."""
    ref, local = ModelRef(name), name in _NAMES or Path(name).expanduser().exists()
    if not local or ref.adapter is None:
        path = find_model(name) if name == smollm2.NAME else Path(name).expanduser()
        return [path] if path is not None and path.exists() else []
    try:
        return [ref.adapter, *model_files(ref.base)]
    except (ModelLoadError, OSError):  # told when it is loaded
        return [ref.adapter]


def _no_adapter(base: str, where: str) -> str:
    """The name of a base model; raises ModelLoadError if it is that of an adapter."""
    if base in _NAMES[1:] or (base and (Path(base).expanduser() / ADAPTER_FILE).is_file()):
        raise ModelLoadError(f"{where} names {base} as its base, which is an adapter itself: merge that one first")
    return base


def _adapter_settings(file: Path) -> dict[str, Any]:
    """The content of an adapter's config."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ModelLoadError(f"{file} is not the JSON object of a PEFT adapter: {e}") from e
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} is not the JSON object of a PEFT adapter")
    return found


def _on_this_machine(name: str, dtype: str) -> Path | None:
    """The directory of a whole model that is no hub id, a GGUF file's in `dtype`; None for other names."""
    if name == smollm2.NAME:
        return smollm2.fetch()
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            file = next(map(str, sorted(path.glob("*.gguf"))), None)
            what = f"give the file {file}" if file else f"a config.json or an {ADAPTER_FILE} is needed"
            raise ModelLoadError(f"{name} holds no model: {what}")
        return path
    if name.endswith(".gguf"):
        return _from_gguf(name, dtype)
    if name and path.exists():
        raise ModelLoadError(f"{name} is a file: {_ACCEPTED}")
    return None


def _from_gguf(name: str, dtype: str) -> Path:
    """The checkpoint of a GGUF file, or of `owner/name:file.gguf` on the hub: converted into the user's cache, once."""
    repo, _, inside = name.rpartition(":")
    file = Path(name).expanduser()
    if repo and not file.exists():
        from huggingface_hub import hf_hub_download

        with told(name, "it cannot be fetched"):
            file = Path(hf_hub_download(repo, inside))
    if not file.is_file():
        raise ModelLoadError(f"{name} is no file; of a hub, give owner/name:file.gguf")
    import torch

    from skipdecode.models.loading.gguf_reader import VERSION, convert

    file, state = file.resolve(), file.stat()
    stored = {"auto": None, "float64": torch.float32}.get(dtype, getattr(torch, dtype, None))
    known = f"{file} {state.st_size} {state.st_mtime_ns} {stored} {VERSION}"
    folder = f"{file.stem}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"
    with told(str(file), "it is not read here, give its safetensors"):
        return add_model(folder, lambda target: convert(file, target, stored))


def _on_hub(name: str, answer: HubAnswer) -> Path:
    folder = Path(name).parent
    beside = [str(folder / each.name) for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
    meant = near(name, [*_NAMES, *beside])
    if answer.state == "absent":
        raise ModelLoadError(
            f"model {name!r}{meant} is not known: there is no such directory, and {answer.reason}; {_ACCEPTED}"
        )
    if (found := snapshot(name, _SMALL, answer)) is not None:
        if answer.state == "unreachable" and name not in _told_of_cache:
            _told_of_cache.add(name)
            note(f"{answer.reason}: {name} is read from the hub's local cache")
        return found
    raise ModelLoadError(
        f"model {name!r}{meant} is neither a local directory nor in the hub's local cache, and {answer.reason}; "
        f"{_ACCEPTED}"
    )


@contextmanager
def told(where: str, what: str, error: type[SkipDecodeError] = ModelLoadError) -> Iterator[None]:
    """A context that turns any error of a library into one line of an `error`; `--debug` shows the traceback."""
    try:
        yield
    except SkipDecodeError:
        raise
    except Exception as e:
        raise error(f"{where}: {_pointer(Path(where).expanduser()) or f'{what}: {one_line(e)}'}") from e


def _pointer(folder: Path) -> str | None:
    """The message on a file in a model's directory that is a pointer of git-lfs, and not the file."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.is_file() and file.stat().st_size < _LONGEST_POINTER and file.read_bytes().startswith(_POINTER):
            return f"{file.name} is a git-lfs pointer, not the file itself: run 'git lfs pull' there, or fetch it again"
    return None


def one_line(error: Exception) -> str:
    """The text of a library's error, shortened to one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
