"""Which engine generates for a model: the fast one where it covers the model, else transformers' forward, with a note.

Models wrapped by PEFT run through the fast engine on a copy into which the adapter is merged: the same function,
rounded once more in the weights' type.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from skipdecode.engine.backend import ENGINES, WEIGHTS, Backend
from skipdecode.engine.engine_backend import EngineBackend
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.open_model import open_model
from skipdecode.engine.transformers_backend import TransformersBackend, end_tokens
from skipdecode.errors import UnfitModelError, UsageError
from skipdecode.models.families import unwrap
from skipdecode.schedule import Schedule

__all__ = ["BackendSource", "open_backends", "open_fast"]


class BackendSource:
    """Backends of one model on one engine, for any number of schedules.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
    tokenizer : transformers tokenizer
    fast : FastModel or None
        None: through transformers.
    note : callable
        Told one line where a schedule runs otherwise than it says.
    """

    def __init__(self, model: Any, tokenizer: Any, fast: FastModel | None, note: Callable[[str], None]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._fast = fast
        self._note = note

    @property
    def engine(self) -> str:
        """ "fast" (with quantised weights "fast-int8" or "fast-int4") or "transformers"."""
        return "transformers" if self._fast is None else self._fast.name

    def backend(self, schedule: Schedule | None) -> Backend:
        """A backend under a schedule; None is full depth."""
        if self._fast is None:
            return TransformersBackend.of(self._model, self._tokenizer, schedule)
        if schedule is not None and (suited := self._fast.suited(schedule)) != schedule:
            before, after = (len(set(s.budgets)) for s in (schedule, suited))
            self._note(
                f"{before} different depths are rounded up to {after}, since each is recorded apart on this device: "
                f"{schedule.mean_budget():.2f} layers on average become {suited.mean_budget():.2f}"
            )
        return EngineBackend(self._fast, schedule, end_tokens=end_tokens(self._model, self._tokenizer))


def open_backends(
    model: Any, tokenizer: Any, engine: str, note: Callable[[str], None], weights: str = "model"
) -> BackendSource:
    """The engine for a model, as a source of backends; see `open_fast`."""
    return BackendSource(model, tokenizer, open_fast(model, engine, note, weights), note)


def open_fast(model: Any, engine: str, note: Callable[[str], None], weights: str = "model") -> FastModel | None:
    """The fast path of a model; None where it is to run through transformers.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        Its projection weights may be fused in place; it stays usable.
    engine : {"auto", "fast", "transformers"}
        auto: fast where it covers the model and the C++ kernels run or the device is a GPU, else transformers, with a
        note why.
    note : callable
        Told one line where the choice needs a word.
    weights : {"model", "int8", "int4"}
        What the fast engine reads: the model's own weights, or quantised copies.

    Raises
    ------
    UsageError
        `engine` or `weights` is unknown, or the model cannot run as they say.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine {engine!r} is not known: accepted are {', '.join(ENGINES)}")
    if weights not in WEIGHTS:
        raise UsageError(f"weights {weights!r} are not known: accepted are {', '.join(WEIGHTS)}")
    kind: Any = None if weights == "model" else weights
    if engine == "transformers":
        if kind:
            raise UsageError(f"--weights {kind} needs the fast engine: leave out --engine transformers")
        return None
    merged = hasattr(model, "get_base_model")
    try:
        fast = open_model(_merged_copy(model) if merged else unwrap(model), quantization=kind)
    except UnfitModelError as e:
        if engine == "fast":
            raise UsageError(f"--engine fast does not cover this model: {e}; give --engine auto") from None
        if kind:
            raise UsageError(f"--weights {kind} needs the fast engine, which does not cover this model: {e}") from None
        note(f"decoding through transformers, several times slower than the fast engine: {e}")
        return None
    if fast.hint and kind:
        raise UsageError(f"--weights {kind} needs the fast engine's kernels: {fast.hint}")
    if fast.hint and engine == "auto":
        note(f"decoding through transformers: {fast.hint}")
        return None
    if fast.hint:
        note(f"the fast engine runs without its kernels: {fast.hint}")
    if merged:
        note(
            "the adapter is merged into a copy of the weights for the fast engine; --engine transformers keeps it apart"
        )
    return fast


def _merged_copy(model: Any) -> Any:
    """The plain model with a PEFT adapter added to its weights."""
    unwrap(model)  # Refuses prompt learning, which has no weights to merge.
    twin = copy.deepcopy(model)
    merge = getattr(twin, "merge_and_unload", None)
    if merge is None:
        raise UnfitModelError("its adapter cannot be merged into the weights")
    try:
        return merge()
    except (ValueError, TypeError, NotImplementedError) as e:
        raise UnfitModelError(f"its adapter cannot be merged into the weights ({e})") from None
