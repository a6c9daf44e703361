"""The file of a fit: which one a model uses, and whether it belongs to the weights.

The config of a checkpoint, or of an adapter, has the digest of its fit. So a fit that is missing, or is another one, is
noticed: the weights were tuned with it, and without it they give other text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skipdecode.common.types import PreTrainedModel
from skipdecode.errors import FitError, UsageError
from skipdecode.models.checkpoint_schedule import FIT_FILE, digest_of_model
from skipdecode.models.families import unwrap
from skipdecode.models.loading.hub_files import find_file
from skipdecode.models.loading.weights_sample import base_sample, is_other_model
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.models.fit import Fit


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
        fit.check_digest(self.digest, name)
        fit.check_fits(model, name)
        for schedule in self.schedules:
            fit.check_prompts(Schedule.load(schedule), name)
        if (base := fit.about.get("base")) is not None and is_other_model(base, base_sample(model)):
            raise FitError(f"{name}: was made for other weights than this model has: make one with skipdecode prepare")
        return fit


def choose_fit(
    checkpoint: str | Path | None, digest: str | None, schedules: Sequence[str] = (), revision: str | None = None
) -> FitFile | None:
    """Choose the fit beside schedule files, else the one of the directory or hub id `checkpoint`, if any.

    Raises UsageError if schedules in several directories have fits, because a model uses only one; FitError if the
    checkpoint was tuned with a fit (its config has the `digest`) that is missing; ModelLoadError as `find_file`.
    """
    fit_path = None if checkpoint is None else find_file(checkpoint, FIT_FILE, revision)
    served: dict[Path, list[str]] = {}
    for schedule in schedules:
        if (file := find_file(Path(schedule).expanduser().resolve().parent, FIT_FILE)) is not None:
            served.setdefault(file, []).append(schedule)
    if len(served) > 1:
        first, other, *_ = sorted(served)
        raise UsageError(
            f"the schedules have fits in {first.parent} and in {other.parent}, and a model uses one: name schedules of "
            "one directory, or start a command for each"
        )
    for file, names in served.items():
        is_own = fit_path is not None and fit_path.resolve() == file.resolve()
        return FitFile(file, digest if is_own else None, tuple(names), None if is_own else fit_path)
    if fit_path is None and digest is not None:
        raise FitError(
            f"{checkpoint} was tuned with a fit, and its {FIT_FILE} is missing: put the file back; to do without, "
            "delete 'skipdecode_fit' from its config"
        )
    return None if fit_path is None else FitFile(fit_path, digest)


def fit_of_checkpoint(model: PreTrainedModel) -> Fit | None:
    """The fit of a loaded model; of one that transformers loaded, the fit beside its weights.

    Raises FitError: the weights were tuned with a fit that is not there, is another one, or was not loaded with them.
    """
    from skipdecode.models.fit import fit_of, is_fit_set, set_fit

    of_adapter, digest = digest_of_model(model)
    where = getattr(unwrap(model).config, "_name_or_path", "")
    if is_fit_set(model) or (digest is None and (of_adapter or not Path(where or "?").is_dir())):
        return fit_of(model)
    if of_adapter or not where:
        raise FitError(
            f"the {'adapter' if of_adapter else 'model'} was tuned with a fit, which was not loaded with it: give "
            "attach(model, fit=Fit.load(FILE)), with Fit of skipdecode.models.fit, the file skipdecode.fit beside the "
            "weights, or load the model with load_model of skipdecode.models.loading.hub"
        )
    if (file := choose_fit(where, digest)) is not None:
        set_fit(model, file.load(model))
    return fit_of(model)
