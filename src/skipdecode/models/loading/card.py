"""Model cards of what `prepare`, `tune` and `export` save, and the upload of such a directory to a hub.

The text is in `card.md`. A card ends with its own digest, so that a README.md that somebody wrote or changed is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from skipdecode.common.environment import COMMAND
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import Json
from skipdecode.common.progress import note
from skipdecode.errors import UsageError, WriteError
from skipdecode.models.checkpoint_schedule import ADAPTER_FILE, FIT_FILE
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.checkpoint import Checkpoint, base_of_adapter, open_checkpoint
from skipdecode.models.loading.hub_files import find_file
from skipdecode.models.loading.stored import library_errors
from skipdecode.models.recipe import stored_recipe
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from huggingface_hub import RepoUrl

CARD_FILE, EVALUATION_FILE, PICTURE_FILE = "README.md", "evaluation.json", "kept.png"
_MARK = "\n<!-- card of skipdecode "
_OF_BASE = ("base_model", "license", "license_name", "license_link", "language")
_METRICS = {"1 / perplexity": "perplexity", "rouge1": "rouge", "rouge2": "rouge", "rougeL": "rouge"}
_NOT_PUSHED = "it cannot be pushed (log in with 'hf auth login', and give owner/name of a repository that is yours)"
# Neither records nor, in directories, the state of an unfinished run.
_PUSHED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.png", "*.gguf", FIT_FILE, "*.md")


def write_card(folder: Path, checkpoint: Checkpoint, schedule: Schedule, maker: str) -> None:
    """Write the card of a model that was saved into a directory, unless somebody else wrote its README.md.

    `checkpoint` is the model that it was made from, `maker` the function that made it. Recipe, fit and evaluation are
    those of the directory.
    """
    from huggingface_hub import ModelCard, ModelCardData

    if (file := folder / CARD_FILE).is_file() and not _is_own(file.read_bytes()):
        return note(f"{file} is kept, as this package did not write it: there is no model card")
    recipe, evaluation, kind = stored_recipe(folder) or {}, {}, "adapter"
    with suppress(FileNotFoundError):
        evaluation = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))
    if not (folder / ADAPTER_FILE).is_file():
        kind = "cut" if open_checkpoint(folder).schedule is None else "checkpoint"
    data = ModelCardData(
        **_base_data(checkpoint),
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["skipdecode", "layer-skipping"],
        datasets=sorted({*recipe.get("datasets", ()), *evaluation.get("datasets", ())}) or None,
        metrics=[*dict.fromkeys(_METRICS.get(name, name) for name in evaluation.get("scores", ()))] or None,
    )
    base = Path(str(data.base_model or checkpoint.base)).name
    shown: Json = {"base": base, "kind": kind, "schedule": schedule}
    shown |= {"files": {file.name for file in folder.iterdir()}, "recipe": recipe, "evaluation": evaluation}
    # A card may be public: of absolute paths it has the last part only.
    words = (word.rpartition("=") for word in shlex.split(COMMAND.get()))
    command = shlex.join(name + eq + (Path(value).name if value[:1] == "/" else value) for name, eq, value in words)
    shown["command"] = command or f"skipdecode.{maker}(…)  # in Python"
    text = str(ModelCard.from_template(data, template_path=str(Path(__file__).with_name("card.md")), **shown))
    write_whole(file, _signed(re.sub(r"\n{3,}", "\n\n", text)))
    return None


def _base_data(checkpoint: Checkpoint) -> Json:
    """The base model's hub id, with licence and language of its card, as far as they are known."""
    from huggingface_hub import ModelCard

    if checkpoint.base == smollm2.NAME:
        return {"base_model": smollm2.HUB_ID, "license": "apache-2.0"}
    data: Json = {}
    with suppress(Exception):  # of YAML, of the hub's client: a card is written without
        if (card := find_file(checkpoint.folder, CARD_FILE)) is not None:
            data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    known = {name: data[name] for name in _OF_BASE if name in data}
    is_here = Path(checkpoint.base).expanduser().exists()
    return known if is_here else known | {"base_model": re.split("[@:]", checkpoint.base)[0]}


def _signed(text: str) -> str:
    return f"{text}{_MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def _is_own(card: bytes) -> bool:
    return _signed(card.decode(errors="replace").rpartition(_MARK)[0]).encode() == card


def push_to_hub(folder: str | Path, repo: str, *, private: bool = True) -> str:
    """Upload a directory of `prepare`, `tune` or `export`: model, tokenizer, schedule, fit, recipe, card and pictures.

    A new repository is `private` or not; one that exists stays as it is. Returns the address.

    Raises UsageError: the directory has no model, or an adapter whose base is a directory of this machine; WriteError:
    the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    folder = Path(folder)
    if (folder / ADAPTER_FILE).is_file():
        if (base := base_of_adapter(folder)) == smollm2.NAME or Path(base).expanduser().exists():
            raise UsageError(
                f"the base model {base} is of this machine, so nobody else could load an adapter on it: merge it first "
                f"(skipdecode export {folder} --format merged)"
            )
    elif not (folder / "config.json").is_file() and not [*folder.glob("*.gguf")]:
        raise UsageError(f"{folder} holds no model to push: a config.json, an {ADAPTER_FILE} or a GGUF file is needed")
    url = make_repo(repo, private=private)
    if (card := folder / CARD_FILE).is_file() and _is_own(written := card.read_bytes()):
        write_whole(card, _signed(re.sub(r"\bMODEL\b", url.repo_id, written.decode().rpartition(_MARK)[0])))
    chosen: Json = {"allow_patterns": _PUSHED, "ignore_patterns": "*/*"}
    with library_errors(repo, _NOT_PUSHED, WriteError):
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload by skipdecode", **chosen)
    return str(url)


def make_repo(repo: str, *, private: bool = True) -> RepoUrl:
    """The address of a repository on the hub, which is made if it is not there; raises WriteError."""
    from huggingface_hub import HfApi

    with library_errors(repo, _NOT_PUSHED, WriteError):
        return HfApi().create_repo(repo, private=private, exist_ok=True)
