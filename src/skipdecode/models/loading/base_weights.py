"""What belongs to which weights: an adapter to those it was tuned on, and a fit to a checkpoint.

A recipe and a fit have a sample of the weights, which loading compares with the model. A sample is better than a digest
here: it distinguishes a cast (bf16 changes a weight by 0.4% at most) from a 4-bit copy (8%) and from another model
(140%). The config of a checkpoint, or of an adapter, has the digest of its fit. So a fit that is missing, or is another
one, is noticed: the weights were tuned with it, and without it they give other text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skipdecode.common.jsonl import Fields, Json
from skipdecode.common.progress import note
from skipdecode.errors import FitError, ModelLoadError, UsageError
from skipdecode.models.carried import FIT_FILE, digest_of_model
from skipdecode.models.families import unwrap
from skipdecode.models.loading.beside import SOURCE_FILE, beside
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from skipdecode.models.fit import Fit

_PLACES = 64
_CAST = 0.004
_SAMPLE = "_skipdecode_base_sample"
_OTHER_MODEL = 0.3


def base_entry(model: PreTrainedModel, path: Path) -> Json:
    """The entry of a recipe about the weights at the start of a run; JSON-ready.

    `model`: without an adapter. `path`: the directory of the model; for the embedded model it has the source of the
    weights.
    """
    source = path / SOURCE_FILE
    return {
        "source": source.read_text(encoding="utf-8").strip() if source.is_file() else None,
        "weights": base_sample(model),
    }


def check_base(sample: list[float], base: str, adapter: Path, known: Fields | None) -> None:
    """Compare the sample of an adapter's base model with the weights in the adapter's recipe (`known`), if it has any.

    If the weights differ by rounding only, a note says by how much.

    Raises ModelLoadError if the base model has other weights.
    """
    if known is None:
        return
    source = f" ({known['source']})" if known.get("source") else ""
    away = _distance(known.get("weights"), sample)
    if away > _OTHER_MODEL:
        raise ModelLoadError(
            f"the adapter {adapter} was tuned on other weights{source} than {base} has: give it the base it was tuned "
            f"on (base, or base_model_name_or_path of its adapter_config.json), or tune one on this"
        )
    if away > _CAST:
        note(
            f"the adapter {adapter.name} was tuned on other bits of {base}{source}: weights differ by {away:.1%}, and "
            "losses a little; skipdecode tune makes one for these"
        )


@dataclass(frozen=True)
class FitFile:
    """The file of a fit, and what it is checked against when it is loaded.

    `digest`: the fit's, if the config of the checkpoint in its directory names one. `schedules`: the schedule files
    beside it, whose prompts it has to serve. `unused`: the fit of the checkpoint in whose place it is.
    """

    file: Path
    digest: str | None = None
    schedules: tuple[str, ...] = ()
    unused: Path | None = None

    def load(self, model: PreTrainedModel) -> Fit:
        """Load the fit of a model; its weights are the base's if there is an adapter.

        Raises FitError: it is broken, another one, or for another model, other weights, or prompts of other schedules.
        """
        from skipdecode.models.fit import Fit

        fit, name = Fit.load(self.file), f"fit {self.file}"
        fit.check_is(self.digest, name)
        fit.check_fits(model, name)
        for schedule in self.schedules:
            fit.check_prompts(Schedule.load(schedule), name)
        if (base := fit.about.get("base")) is not None and is_other_model(base, base_sample(model)):
            raise FitError(f"{name}: was made for other weights than this model has: make one with skipdecode prepare")
        return fit


def choose_fit(
    own: str | Path | None, digest: str | None, schedules: Sequence[str] = (), revision: str | None = None
) -> FitFile | None:
    """Choose the fit beside schedule files, else that of the checkpoint in the directory or hub id `own`, if any.

    Raises UsageError if schedules in several directories have fits, because a model uses only one; FitError if the
    checkpoint was tuned with a fit (its config has the `digest`) that is missing; ModelLoadError as `beside`.
    """
    found = None if own is None else beside(own, FIT_FILE, revision)
    served: dict[Path, list[str]] = {}
    for schedule in schedules:
        if (file := beside(Path(schedule).expanduser().resolve().parent, FIT_FILE)) is not None:
            served.setdefault(file, []).append(schedule)
    if len(served) > 1:
        one, other, *_ = sorted(served)
        raise UsageError(
            f"the schedules have fits in {one.parent} and in {other.parent}, and a model uses one: name schedules of "
            "one directory, or start a command for each"
        )
    for file, names in served.items():
        is_own = found is not None and found.resolve() == file.resolve()
        return FitFile(file, digest if is_own else None, tuple(names), None if is_own else found)
    if found is None and digest is not None:
        raise FitError(
            f"{own} was tuned with a fit, and its {FIT_FILE} is missing: put the file back; to do without, delete "
            "'skipdecode_fit' from its config"
        )
    return None if found is None else FitFile(found, digest)


def carried_fit(model: PreTrainedModel) -> Fit | None:
    """The fit of a loaded model; of one that transformers loaded, the fit beside its weights.

    Raises FitError: the weights were tuned with a fit that is not there, is another one, or was not loaded with them.
    """
    from skipdecode.models.fit import fit_of, keep_fit, knows_fit

    of_adapter, digest = digest_of_model(model)
    where = getattr(unwrap(model).config, "_name_or_path", "")
    if knows_fit(model) or (digest is None and (of_adapter or not Path(where or "?").is_dir())):
        return fit_of(model)
    if of_adapter or not where:
        raise FitError(
            f"the {'adapter' if of_adapter else 'model'} was tuned with a fit, which was not loaded with it: give "
            "attach(model, fit=Fit.load(FILE)), with Fit of skipdecode.models.fit, the file skipdecode.fit beside the "
            "weights, or load the model with load_model of skipdecode.models.loading.hub"
        )
    if (file := choose_fit(where, digest)) is not None:
        keep_fit(model, file.load(model))
    return fit_of(model)


def is_other_model(known: object, now: list[float]) -> bool:
    """Whether two samples (`base_sample`) come from different weights and not from a cast or a 4-bit copy."""
    return _distance(known, now) > _OTHER_MODEL


def base_sample(model: PreTrainedModel) -> list[float]:
    """Sample the weights of all matrices of the model, without an adapter's, to six digits.

    Of a model with an adapter, the one kept of its base before (`keep_base_sample`): some adapters change the base.
    """
    if (known := model.__dict__.get(_SAMPLE)) is not None:
        return list(known)
    named = ((n, p) for n, p in model.named_parameters() if "lora_" not in n)
    matrices = [(n, p) for n, p in named if p.dim() > 1 and p.is_floating_point()]
    # Steps of the golden ratio: no two matrices are read at the same place.
    shares = [(i * 0.6180339887 % 1, matrices[i * len(matrices) // _PLACES][1]) for i in range(_PLACES)]
    values = [matrix.flatten()[int(share * matrix.numel())].item() for share, matrix in shares]
    return [float(f"{value:.6g}") for value in values]


def keep_base_sample(adapted: PeftModel, sample: list[float]) -> None:
    """Record in a PeftModel the sample of its base model that was taken without the adapter."""
    adapted.__dict__[_SAMPLE] = sample


def _distance(known: object, now: list[float]) -> float:
    """Relative root mean square of the differences to the known numbers; infinite if `known` is not such a list."""
    if not isinstance(known, list) or len(known) != len(now) or not all(isinstance(x, int | float) for x in known):
        return math.inf
    try:
        away, size = math.dist(known, now), math.hypot(*known)
    except OverflowError:
        return math.inf
    share = away / size if size else away and math.inf
    return math.inf if math.isnan(share) else share
