"""Models by name: a directory, a hub id, the embedded ``smollm2-135m``; PEFT adapters too, bundled ones by name.

Knows nothing about how a schedule is applied; it only hands over the one a checkpoint carries.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.common.environment import multiplies_bf16
from skipdecode.common.progress import without_foreign_bars
from skipdecode.errors import MissingExtraError, ModelLoadError, SkipDecodeError, UsageError
from skipdecode.models.carried import carry, keep_tuned, of_adapter, of_config
from skipdecode.models.families import decoder_layers, layers_in, unwrap
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.base_weights import check_base
from skipdecode.models.loading.locate import Place, adapter_dir, base_name, locate
from skipdecode.models.loading.recipe import RECIPE_FILE, Recipe, checkpoint_recipe, ran_in_bf16
from skipdecode.models.loading.tensors import check_tensors
from skipdecode.schedule import Schedule

__all__ = ["DTYPES", "LoadedModel", "choose_device", "load_config", "load_model", "load_recipe", "weights_dtype"]

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# Without one of these, transformers either fails or makes up an empty tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready for decoding.

    Parameters
    ----------
    model : transformers causal LM or peft.PeftModel
        It is in eval mode and on its device.
    tokenizer : transformers tokenizer or None
        Pads on the left; its pad token is the end token where the checkpoint names none.
    name : str
        The name that was asked for.
    path : Path
        The directory it was read from; of a hub id, its snapshot in the hub's own cache.
    recipe : Recipe or None
        The prompt and the schedules that it was tuned on; None where it does not say how it was tuned.
    """

    model: Any
    tokenizer: Any | None
    name: str
    path: Path
    schedule: Schedule | None
    recipe: Recipe | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(decoder_layers(unwrap(self.model)))


def load_model(
    name: str, *, dtype: str = "auto", device: str | None = None, require_tokenizer: bool = True
) -> LoadedModel:
    """A causal LM by name, with its tokenizer and the schedule it carries.

    Parameters
    ----------
    name : str
        A local directory (a checkpoint or a PEFT adapter), a hub id, ``smollm2-135m``, or ``e2e-smollm2-135m``, the
        bundled adapter on it. These two names go first: a directory of such a name is ``./smollm2-135m``.
    dtype : {"auto", "float32", "bfloat16", "float16", "float64"}
        Type of the weights; "auto" is the checkpoint's own, but see `weights_dtype`.
    device : str, optional
        A torch device such as "cpu" or "cuda:1"; by default the first GPU if there is one, else the CPU.
    require_tokenizer : bool
        Whether a checkpoint without tokenizer is an error; otherwise `LoadedModel.tokenizer` is None.

    Raises
    ------
    ModelLoadError
        If the name is unknown, the hub is needed and not reachable, the files are broken or incomplete, or they hold no
        decoder-only causal LM.
    MissingExtraError
        If peft is needed and absent.
    ScheduleError
        If the schedule it carries is wrong or is for another number of layers.
    DataError
        If its recipe.json is broken.
    UsageError
        If `dtype` or `device` is not accepted.
    """
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not accepted: give one of {', '.join(DTYPES)}")
    target = choose_device(device)
    adapter = adapter_dir(name)
    if adapter is not None and importlib.util.find_spec("peft") is None:
        raise MissingExtraError(f"the adapter {name}", "peft")
    place = locate(name if adapter is None else base_name(adapter))
    config = _config(place)
    schedule, recipe = _carried(adapter, place, config)
    tokenizer = _tokenizer(name, adapter, place, require_tokenizer)
    kind = weights_dtype(name, dtype, target)
    with _told(place.where, "its weights do not load"), without_foreign_bars():
        model, loading = AutoModelForCausalLM.from_pretrained(
            place.where,
            config=config,
            dtype=kind,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **place.options,
        )
    model.to(target)
    check_tensors(
        place.where,
        model.named_parameters(),
        missing=loading["missing_keys"],
        unexpected=loading["unexpected_keys"],
        mismatched=loading["mismatched_keys"],
    )
    if recipe is not None:
        keep_tuned(model, recipe.tuned_under)
    if adapter is not None:
        check_base(model, base_name(adapter), adapter, None if recipe is None else recipe.base)
        model = _with_adapter(model, adapter, target)
        if schedule is not None:
            carry(model, schedule)
        return LoadedModel(model, tokenizer, name, adapter, schedule, recipe)
    return LoadedModel(model.eval(), tokenizer, name, place.folder(), schedule, recipe)


def weights_dtype(name: str, dtype: str, device: Any) -> str:
    """`dtype`, or what "auto" means where it is not the checkpoint's own type: bf16 where the device multiplies that.

    So it is for ``smollm2-135m``, for directories that `skipdecode tune --full` wrote after a run in bf16, whose fp32
    weights are the optimizer's, and for adapters on either.
    """
    adapter = adapter_dir(name)
    base = name if adapter is None else base_name(adapter)
    if dtype == "auto" and base == smollm2.NAME:
        return smollm2.running_dtype(device.type)
    rounded = dtype == "auto" and ran_in_bf16(Path(base).expanduser()) and multiplies_bf16(device.type)
    return "bfloat16" if rounded else dtype


def load_config(name: str) -> Any:
    """The transformers config of a causal LM by name, without its weights; of an adapter, its base model's.

    Fetches nothing for ``smollm2-135m``. Raises as `load_model` does.
    """
    adapter = adapter_dir(name)
    base = name if adapter is None else base_name(adapter)
    return smollm2.known_config() if base == smollm2.NAME else _config(locate(base))


def load_recipe(name: str) -> Recipe | None:
    """The recipe of a model by name, without its weights; None where it has none. Raises as `load_model` does."""
    adapter = adapter_dir(name)
    if adapter is None and name == smollm2.NAME:
        return None
    place = locate(name) if adapter is None else Place(str(adapter), local_only=True)
    return _carried(adapter, place, _config(place) if adapter is None else load_config(name))[1]


# ---------------------------------------------------------------------- parts


def _config(place: Place) -> Any:
    """The config, if it is a decoder-only causal LM's."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

    with _told(place.where, "its config does not load"):
        config = AutoConfig.from_pretrained(place.where, **place.options)
    needed = "a decoder-only causal language model is needed"
    if config.is_encoder_decoder:
        raise ModelLoadError(f"{place.where} is an encoder-decoder ({config.model_type}): {needed}")
    classes = config.architectures or []
    if config.model_type not in CAUSAL_LM or (classes and not set(classes) & set(CAUSAL_LM.values())):
        raise ModelLoadError(f"{place.where} holds {', '.join(classes) or config.model_type}: {needed}")
    return config


def _tokenizer(name: str, adapter: Path | None, place: Place, required: bool) -> Any | None:
    """The adapter's tokenizer if it has one, else the model's; None without one unless `required`."""
    from transformers import AutoTokenizer

    own = adapter is not None and _has_tokenizer(adapter)
    source = Place(str(adapter), local_only=True) if own else place
    tokenizer: Any = None
    error: Exception | None = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.where, **source.options)
    except (
        Exception
    ) as e:  # Of many classes; what it means is told below: without files a tokenizer is absent, not broken.
        error = e
    if not own and not _has_tokenizer(place.folder()):
        if required:
            raise ModelLoadError(f"{name} has no tokenizer: put a tokenizer.json in its directory") from error
        return None
    if error is not None:
        raise ModelLoadError(f"{source.where}: its tokenizer does not load: {_one_line(error)}") from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def choose_device(device: str | None) -> Any:
    """The torch device of that name, by default the first GPU or else the CPU; raises UsageError."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise UsageError(f"device {device!r} is not accepted: {_one_line(e)}") from e


def _with_adapter(model: Any, adapter: Path, device: Any) -> Any:
    import peft

    # Adapter weights in the base's dtype: this is for decoding, where mixed dtypes only cost casts.
    options: dict[str, Any] = {"torch_device": str(device), "autocast_adapter_dtype": False}
    with _told(str(adapter), "the adapter does not go on its base model"), without_foreign_bars():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of missing tensors, which are refused below
            adapted = peft.PeftModel.from_pretrained(model, str(adapter), **options)
        # Again, as only this returns which tensors did not fit.
        found = adapted.load_adapter(str(adapter), adapted.active_adapter, **options)
        tensors = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    check_tensors(str(adapter), tensors.items(), missing=found.missing_keys, unexpected=found.unexpected_keys)
    return adapted.eval()


def _carried(adapter: Path | None, place: Place, config: Any) -> tuple[Schedule | None, Recipe | None]:
    """The schedule and the recipe of an adapter, or of the model at `place`; `config` is the model's in both cases."""
    from transformers.utils import cached_file

    schedule = of_config(config, place.where)
    if adapter is not None:
        schedule = of_adapter(adapter, config) or schedule
        place = Place(str(adapter), local_only=True)
    # Where the hub has none, or cannot be reached, this answers None.
    found = cached_file(
        place.where,
        RECIPE_FILE,
        local_files_only=place.local_only,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return schedule, checkpoint_recipe(Path(found or Path(place.where) / RECIPE_FILE), schedule, layers_in(config))


# ---------------------------------------------------------------------- errors


@contextmanager
def _told(where: str, what: str) -> Iterator[None]:
    """Anything a library raises over a user's files becomes one line; `--debug` shows the rest."""
    try:
        yield
    except SkipDecodeError:
        raise
    except Exception as e:
        raise ModelLoadError(f"{where}: {what}: {_one_line(e)}") from e


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
