"""Full depth and schedules through the package's own engine: the same tokens, on its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skipdecode.engine.backend import GenerationSettings
from skipdecode.engine.engine_backend import EngineBackend
from skipdecode.engine.engines import open_fast
from skipdecode.engine.fast_model import FastModel
from skipdecode.errors import UsageError
from skipdecode.evaluation.methods.base import Generation, Method, fed_tokens
from skipdecode.evaluation.methods.full import Full
from skipdecode.evaluation.methods.scheduled import Scheduled
from skipdecode.schedule import Schedule

__all__ = ["Engined", "on_engine"]


class Engined(Method):
    """A method that is a schedule, decoded by the engine; rows that end leave the batch.

    Parameters
    ----------
    method : Full or Scheduled
        What to decode; its name, settings and checks are this one's.
    fast : FastModel
        The fast path of the model that `generate` is called with; may be shared.
    """

    rows_leave = True

    def __init__(self, method: Full | Scheduled, fast: FastModel) -> None:
        self._method = method
        self._fast = fast
        self.engine = fast.name
        self.schedule = None if method.schedule is None else fast.suited(method.schedule)
        self._runs = self.schedule or Schedule.full(fast.num_layers)
        self.name = method.name
        self.lossless = method.lossless
        self.full_depth = method.full_depth

    def generate(
        self, model: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos: set[int]
    ) -> Generation:
        """See `Method.generate`."""
        backend = EngineBackend(self._fast, self._runs, end_tokens=sorted(eos))
        result = backend.generate(prompts, GenerationSettings(max_new_tokens), range(len(prompts)))
        layers = sum(self._runs.budget(i) for row in result.tokens for i in range(len(row) - 1))
        return Generation(result.tokens, result.prefill_s, result.decode_s, layers, fed_tokens(result.tokens))

    def settings(self) -> dict[str, Any]:
        """See `Method.settings`."""
        return self._method.settings()

    def check(self, model: Any) -> None:
        """See `Method.check`."""
        self._method.check(model)


def on_engine(
    methods: Sequence[Method], model: Any, engine: str, note: Callable[[str], None], weights: str = "model"
) -> tuple[list[Method], tuple[Method, ...]]:
    """Methods on the engine that is asked for, where it can run them, and full depth on each engine that is used.

    Parameters
    ----------
    methods : sequence of Method
        As made: through transformers.
    model : PreTrainedModel or PeftModel
    engine : {"auto", "fast", "transformers"}
        See `skipdecode.engine.engines.open_fast`.
    note : callable
        Told one line where the choice needs a word.
    weights : {"model", "int8", "int4"}
        See `open_fast`.

    Raises
    ------
    SkipDecodeError
        A method does not fit the model, or `engine` is "fast" and cannot run the model or a method.
    """
    for method in methods:
        method.check(model)
    others = [m.name for m in methods if not isinstance(m, Full | Scheduled)]
    if others and engine == "fast":
        raise UsageError(f"--engine fast does not run {', '.join(others)}: give --engine auto")
    fast = open_fast(model, engine, note, weights) if len(others) < len(methods) else None
    if fast is None:
        return list(methods), (Full(),)
    if others:
        note(f"{', '.join(others)}: no schedule, so it runs through transformers, next to full depth there")
    bound = [Engined(m, fast) if isinstance(m, Full | Scheduled) else m for m in methods]
    return bound, (Engined(Full(), fast), Full())
