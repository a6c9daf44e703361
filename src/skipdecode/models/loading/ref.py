"""Resolves a model's name: base model, adapter, place, config, recipe, schedule and fit. Reads no weights."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from skipdecode.common.options import near
from skipdecode.common.progress import note
from skipdecode.errors import ModelLoadError, SkipDecodeError, UsageError
from skipdecode.models.carried import FIT_FILE, RECIPE_FILE, SCHEDULE_FILE, digest_in, of_adapter, of_config
from skipdecode.models.families import FAMILIES, layers_in
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.beside import ask_hub, beside, fit_beside
from skipdecode.models.loading.recipe import Recipe, checkpoint_recipe, named_schedules, ran_in_bf16
from skipdecode.models.loading.store import add_model, find_model
from skipdecode.models.windows import drop_unread, layer_windows
from skipdecode.schedule import Schedule

ADAPTER_FILE = "adapter_config.json"
_BUNDLED = Path(__file__).parents[1] / "adapters"
_NAMES = (smollm2.NAME, *sorted(file.parent.name for file in _BUNDLED.glob(f"*/{ADAPTER_FILE}")))
_ACCEPTED = f"accepted are a local directory, a GGUF file, a hub id (owner/name), {', '.join(_NAMES)}"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_POINTER, _LONGEST_POINTER = b"version https://git-lfs", 1024
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 10_000
_HUB_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

_told_of_cache: set[str] = set()  # a command may resolve a name several times


@dataclass(frozen=True)
class Place:
    """The place from which transformers loads a model.

    Parameters
    ----------
    where : str
        A directory or a hub id.
    local_only : bool
        Whether transformers must not contact the hub.
    """

    where: str
    local_only: bool

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for every ``from_pretrained``."""
        return {"local_files_only": self.local_only, "trust_remote_code": False}

    def folder(self) -> Path:
        """The directory of the config; for a hub id whose config is loaded, the snapshot in the hub's cache."""
        from transformers.utils import cached_file

        return Path(cached_file(self.where, "config.json", local_files_only=True)).parent


@dataclass(frozen=True)
class ModelRef:
    """A model by name: a directory, a hub id, ``smollm2-135m``, a PEFT adapter, or a bundled adapter.

    Every property is computed once, at its first use, and the hub is contacted once. The names of the embedded model
    and of bundled adapters take precedence: a directory of such a name is ``./smollm2-135m``. Properties raise the
    errors of `load_model`. `schedule_files` are the files of the schedules that the model will run. `given_base` is the
    name of an adapter's base model in place of the one in the adapter's directory.
    """

    name: str
    schedule_files: tuple[str, ...] = ()
    given_base: str | None = None

    @cached_property
    def adapter(self) -> Path | None:
        """The directory of the adapter; None for a whole model."""
        if self.name in _NAMES:
            return None if self.name == smollm2.NAME else _BUNDLED / self.name
        path = Path(self.name).expanduser()
        return path if self.name and (path / ADAPTER_FILE).is_file() else None

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
        base = _adapter_settings(file).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ModelLoadError(f"{file} names no base model: base_model_name_or_path is needed")
        return _no_adapter(base, str(file))

    @cached_property
    def place(self) -> Place:
        """The place of the base model; the embedded model is downloaded first if necessary."""
        try:
            return _located(self.base)
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
    def num_layers(self) -> int:
        """Number of decoder layers, from the config."""
        return layers_in(self.config)

    @cached_property
    def schedule(self) -> Schedule | None:
        """The schedule of the adapter, else of its base model."""
        own = None if self.adapter is None else of_adapter(self.adapter, self.config)
        return own or of_config(self.config, self.base)

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe of the adapter or the whole model; None if there is none."""
        if self.name == smollm2.NAME and find_model(smollm2.NAME) is None:
            return None
        where = self.place.where if self.adapter is None else self.adapter
        file = beside(where, RECIPE_FILE)
        return checkpoint_recipe(file or Path(where) / RECIPE_FILE, self.schedule, self.num_layers)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules of the checkpoint by name; see `named_schedules`."""
        return named_schedules(self.num_layers, self.schedule, self.recipe)

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
    def _fitted(self) -> tuple[Path | str, str | None] | None:
        """Where the checkpoint's own fit may be, and its digest: the adapter if it has a schedule, else the base."""
        if self.adapter is not None and any((self.adapter / name).exists() for name in (SCHEDULE_FILE, FIT_FILE)):
            entries = _adapter_settings(self.adapter / ADAPTER_FILE).get("auto_mapping")
            return self.adapter, digest_in(entries if isinstance(entries, dict) else {})
        if self.base == smollm2.NAME:
            return None
        return self.place.where, digest_in(vars(self._config))

    @property
    def folder(self) -> Path:
        """The directory of the adapter, or of the whole model; for a hub id, its snapshot in the hub's cache."""
        return self.place.folder() if self.adapter is None else self.adapter

    @property
    def runs_in_bf16(self) -> bool:
        """Whether the base is ``smollm2-135m`` or of `tune --full` in bf16, whose fp32 weights are the optimizer's."""
        return self.base == smollm2.NAME or ran_in_bf16(Path(self.base).expanduser())

    @property
    def stored_in_bf16(self) -> bool:
        """Whether the config says that the weights are stored in bf16."""
        stored = getattr(self.config.get_text_config(decoder=True), "dtype", None)
        return str(stored).removeprefix("torch.") == "bfloat16"

    def has_weights(self) -> bool:
        """Whether the weights are on this machine, so that loading needs no download."""
        if self.base == smollm2.NAME:
            return find_model(smollm2.NAME) is not None
        path = Path(self.base).expanduser()
        if path.is_dir():
            return any(any(path.glob(pattern)) for pattern in _WEIGHTS)
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            return any(isinstance(try_to_load_from_cache(self.base, file), str) for file in _HUB_WEIGHTS)
        except HFValidationError:
            return False  # No hub id at all; loading its config says so.

    @cached_property
    def _config(self) -> Any:
        """The config; raises an error unless it is of a decoder-only causal LM."""
        from transformers import AutoConfig, PretrainedConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

        where = self.place.where
        with told(where, "its config does not load"):
            check_config_values(where, PretrainedConfig.get_config_dict(where, **self.place.options)[0])
            config = AutoConfig.from_pretrained(where, **self.place.options)
            layers_in(config)
        needed = "a decoder-only causal language model is needed"
        if config.is_encoder_decoder:
            raise ModelLoadError(f"{where} is an encoder-decoder ({config.model_type}): {needed}")
        classes = config.architectures or []
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


def model_files(name: str) -> list[Path]:
    """Directories and files on this machine that loading the model `name` reads, as far as the name determines them."""
    ref = ModelRef(name)
    if ref.adapter is None:
        path = find_model(name) if name == smollm2.NAME else Path(name).expanduser()
        return [path] if path is not None and path.exists() else []
    try:
        return [ref.adapter, *model_files(ref.base)]
    except (ModelLoadError, OSError):  # told when it is loaded
        return [ref.adapter]


def _no_adapter(base: str, where: str) -> str:
    """The name of a base model; raises ModelLoadError if it is that of an adapter."""
    if ModelRef(base).adapter is not None:
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


def _located(name: str) -> Place:
    if name == smollm2.NAME:
        return Place(str(smollm2.fetch()), local_only=True)
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{name} holds no model: a config.json or an {ADAPTER_FILE} is needed")
        return Place(str(path), local_only=True)
    if name.endswith(".gguf"):
        return Place(str(_from_gguf(name)), local_only=True)
    if name and path.exists():
        raise ModelLoadError(f"{name} is a file: {_ACCEPTED}")
    return _locate_on_hub(name)


def _from_gguf(name: str) -> Path:
    """The checkpoint of a GGUF file, or of `owner/name:file.gguf` on the hub: converted into the user's cache, once."""
    from skipdecode.models.loading.gguf_reader import convert

    repo, _, inside = name.rpartition(":")
    file = Path(name).expanduser()
    if repo and not file.exists():
        from huggingface_hub import hf_hub_download

        with told(name, "it cannot be fetched"):
            file = Path(hf_hub_download(repo, inside))
    if not file.is_file():
        raise ModelLoadError(f"{name} is no file; of a hub, give owner/name:file.gguf")
    file, state = file.resolve(), file.stat()
    known = hashlib.sha256(f"{file} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    return add_model(f"{file.stem}-{known}", lambda target: convert(file, target))


def _locate_on_hub(name: str) -> Place:
    from huggingface_hub import try_to_load_from_cache

    answer = ask_hub(name)
    if answer.state == "found":
        return Place(name, local_only=False)
    folder = Path(name).parent
    beside = [str(folder / each.name) for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
    meant = near(name, [*_NAMES, *beside])
    if answer.state == "absent":
        raise ModelLoadError(
            f"model {name!r}{meant} is not known: there is no such directory, and {answer.reason}; {_ACCEPTED}"
        )
    # The snapshot's directory and not the id: transformers looks for adapters on the hub even when told not to.
    if isinstance(config := try_to_load_from_cache(name, "config.json"), str):
        if answer.state == "unreachable" and name not in _told_of_cache:
            _told_of_cache.add(name)
            note(f"{answer.reason}: {name} is read from the hub's local cache")
        return Place(str(Path(config).parent), local_only=True)
    raise ModelLoadError(
        f"model {name!r}{meant} is neither a local directory nor in the hub's local cache, and {answer.reason}; "
        f"{_ACCEPTED}"
    )


@contextmanager
def told(where: str, what: str) -> Iterator[None]:
    """A context that turns any error of a library into one line; `--debug` shows the traceback."""
    try:
        yield
    except SkipDecodeError:
        raise
    except Exception as e:
        raise ModelLoadError(f"{where}: {_pointer(Path(where)) or f'{what}: {one_line(e)}'}") from e


def _pointer(folder: Path) -> str | None:
    """What is said of a file in a model's directory that stands for another, which git-lfs would put there."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.is_file() and file.stat().st_size < _LONGEST_POINTER and file.read_bytes().startswith(_POINTER):
            return f"{file.name} is a git-lfs pointer, not the file itself: run 'git lfs pull' there, or fetch it again"
    return None


def one_line(error: Exception) -> str:
    """The text of a library's error, shortened to one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
