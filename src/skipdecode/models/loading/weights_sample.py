"""A sample of a model's weights: an adapter and a fit have that of the weights that they were made for.

Loading compares it with the model. A sample is better than a digest here: it distinguishes a cast (bf16 changes a
weight by 0.4% at most) from a 4-bit copy (8%) and from another model (140%).
"""

from __future__ import annotations

import math
from pathlib import Path

from skipdecode.common.jsonl import Fields, Json
from skipdecode.common.progress import note
from skipdecode.common.types import PeftModel, PreTrainedModel
from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.store import source_of

_PLACES = 64
_CAST = 0.004
_SAMPLE = "_skipdecode_base_sample"
_OTHER_MODEL = 0.3


def base_entry(model: PreTrainedModel, path: Path) -> Json:
    """The entry of a recipe about the weights at the start of a run; JSON-ready.

    `model`: without an adapter. `path`: the directory of the model; for the embedded model it has the source of the
    weights.
    """
    return {"source": source_of(path), "weights": base_sample(model)}


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


def is_other_model(known: object, current: list[float]) -> bool:
    """Whether two samples (`base_sample`) come from different weights and not from a cast or a 4-bit copy."""
    return _distance(known, current) > _OTHER_MODEL


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


def _distance(known: object, current: list[float]) -> float:
    """Relative root mean square of the differences to the known numbers; infinite if `known` is not such a list."""
    if not isinstance(known, list) or len(known) != len(current) or not all(isinstance(x, int | float) for x in known):
        return math.inf
    try:
        distance, size = math.dist(known, current), math.hypot(*known)
    except OverflowError:
        return math.inf
    share = distance / size if size else distance and math.inf
    return math.inf if math.isnan(share) else share
