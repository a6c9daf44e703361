"""From a model's name to where transformers finds it. Reads no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.common.registry import near
from skipdecode.errors import ModelLoadError
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.hub_probe import HubAnswer, ask_hub
from skipdecode.models.loading.store import find_model

__all__ = ["Place", "adapter_dir", "base_name", "locate", "model_files"]

_ADAPTER_FILE = "adapter_config.json"
_BUNDLED = Path(__file__).parents[1] / "adapters"
_NAMES = (smollm2.NAME, *sorted(file.parent.name for file in _BUNDLED.glob(f"*/{_ADAPTER_FILE}")))
_ACCEPTED = f"accepted are a local directory, a hub id (owner/name), {', '.join(_NAMES)}"
# Models in the hub's local cache for which it did not answer: a command asks for one several times, for seconds each.
_UNANSWERED: dict[str, HubAnswer] = {}


@dataclass(frozen=True)
class Place:
    """Where transformers finds a model.

    Parameters
    ----------
    where : str
        A directory or a hub id.
    local_only : bool
        Whether it must not ask the hub.
    """

    where: str
    local_only: bool

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for every ``from_pretrained``."""
        return {"local_files_only": self.local_only, "trust_remote_code": False}

    def folder(self) -> Path:
        """The directory that holds its config; of a hub id whose config is loaded, the snapshot in the hub's cache."""
        from transformers.utils import cached_file

        return Path(cached_file(self.where, "config.json", local_files_only=True)).parent


def locate(name: str) -> Place:
    """Where the model called `name` is; the embedded model is fetched first if need be.

    Raises
    ------
    ModelLoadError
        If the name is unknown, or the hub is needed and not reachable; lists what is accepted.
    """
    if name == smollm2.NAME:
        return Place(str(smollm2.fetch()), local_only=True)
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{name} holds no model: a config.json or an {_ADAPTER_FILE} is needed")
        return Place(str(path), local_only=True)
    if name and path.exists():
        raise ModelLoadError(f"{name} is a file: {_ACCEPTED}")
    return _locate_on_hub(name)


def _locate_on_hub(name: str) -> Place:
    from huggingface_hub import try_to_load_from_cache

    answer = _UNANSWERED.get(name) or ask_hub(name)
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
        _UNANSWERED[name] = answer
        return Place(str(Path(config).parent), local_only=True)
    raise ModelLoadError(
        f"model {name!r}{meant} is neither a local directory nor in the hub's local cache, and {answer.reason}; "
        f"{_ACCEPTED}"
    )


def adapter_dir(name: str) -> Path | None:
    """The directory of a PEFT adapter, if `name` is one; the names of bundled ones go first."""
    if name in _NAMES:
        return None if name == smollm2.NAME else _BUNDLED / name
    path = Path(name).expanduser()
    return path if name and (path / _ADAPTER_FILE).is_file() else None


def model_files(name: str) -> list[Path]:
    """Directories and files on this machine that loading the model called `name` reads, as far as its name tells."""
    adapter = adapter_dir(name)
    if adapter is None:
        path = find_model(name) if name == smollm2.NAME else Path(name).expanduser()
        return [path] if path is not None and path.exists() else []
    try:
        return [adapter, *model_files(base_name(adapter))]
    except (ModelLoadError, OSError):  # told when it is loaded
        return [adapter]


def base_name(adapter: Path) -> str:
    """The name of the model that an adapter goes on.

    Raises
    ------
    ModelLoadError
        If the adapter's config is broken, or its base is an adapter itself.
    """
    file = adapter / _ADAPTER_FILE
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as e:
        raise ModelLoadError(f"{file} is not the JSON object of a PEFT adapter: {e}") from e
    if not isinstance(base, str) or not base:
        raise ModelLoadError(f"{file} names no base model: base_model_name_or_path is needed")
    if adapter_dir(base) is not None:
        raise ModelLoadError(f"{file} names {base} as its base, which is an adapter itself: merge that one first")
    return base
