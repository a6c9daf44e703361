"""Speed for the same work: each row gets as many new tokens under every method, all in turn, medians of rounds.

Free-running outputs end where a method ends them: what says less is done sooner, and a batch that stays full is cheaper
a token. So their times are no measure of a method's speed. Here the lengths are given and end tokens end nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from skipdecode.common.journal import KeptValues
from skipdecode.common.progress import progress_bar
from skipdecode.evaluation.bootstrap import Table, compare
from skipdecode.evaluation.methods.base import Generation, Method
from skipdecode.evaluation.settings import EvaluationSettings

__all__ = ["ROUNDS", "WHAT", "Timing", "batches", "measured_speeds", "speed_entries", "time_equal_lengths"]

ROUNDS = 3
WHAT = "outputs of the lengths of the references, all methods in turn on the same batches, medians of rounds"
_WARM_UP_TOKENS = 4
_BATCHES = 4
_LEAST_ROWS = 16
_SPEEDUPS = {
    "measured_speedup_with_prompt": ("prompt_seconds", "decode_seconds"),
    "measured_speedup": ("decode_seconds",),
}


@dataclass(frozen=True)
class Timing:
    """Seconds and work of one method, batch by batch."""

    batches: Sequence[Generation]

    def seconds(self, parts: Sequence[str]) -> Table:
        """Seconds of each batch, (batches, 1)."""
        return np.asarray([[sum(getattr(g, part) for part in parts)] for g in self.batches], dtype=np.float64)

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready sums over batches, and rates; `tokens_per_s` is of decoding."""
        names = ("prompt_seconds", "decode_seconds", "positions", "fed_tokens", "layer_tokens")
        prompt, decode, positions, fed, layers = (float(sum(getattr(g, n) for g in self.batches)) for n in names)
        return {
            "seconds": prompt + decode,
            **dict(zip(names, (prompt, decode, positions, fed, layers), strict=True)),
            "layers_per_token": layers / fed if fed else None,
            "ms_per_position": 1000 * decode / positions if positions else None,
            "tokens_per_s": fed / decode if decode else None,
        }


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of records in batches of like length, longest first, so that what does not fit fails at once."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + size] for start in range(0, len(order), size)]


def time_equal_lengths(
    model: Any,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    batch_size: int,
    kept: KeptValues | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> list[Timing]:
    """The times of methods, in their order; of each batch the median of `ROUNDS` rounds.

    `prompts` are token ids of each row, `lengths` how many new tokens it gets. `kept` has turns that an earlier,
    interrupted run finished, and takes those of this one. `progress` is told the rows of each turn of all methods.
    """
    groups = batches([len(prompt) for prompt in prompts], batch_size)
    turns: list[list[list[Generation]]] = [[] for _ in groups]
    warm = False
    for turn in range(ROUNDS * len(groups)):
        indices = groups[turn % len(groups)]
        rows, each = [prompts[i] for i in indices], [lengths[i] for i in indices]
        done = [Generation(**g) for g in (kept and kept.get(f"speed {turn}")) or ()]
        if not done:
            for method in () if warm else methods:
                method.generate(model, rows, max_new_tokens=_WARM_UP_TOKENS, eos=set())
            warm = True
            order = [(turn + i) % len(methods) for i in range(len(methods))]
            found = {i: methods[i].generate(model, rows, max_new_tokens=each, eos=set()) for i in order}
            done = [replace(found[i], tokens=[]) for i in range(len(methods))]
            if kept is not None:
                kept.put(f"speed {turn}", [asdict(g) for g in done])
        turns[turn % len(groups)].append(done)
        progress(len(indices))
    return [Timing([_median([done[i] for done in rounds]) for rounds in turns]) for i in range(len(methods))]


def _median(rounds: Sequence[Generation]) -> Generation:
    seconds = {name: median(getattr(g, name) for g in rounds) for name in ("prompt_seconds", "decode_seconds")}
    return replace(rounds[0], **seconds)


def measured_speeds(
    model: Any,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    settings: EvaluationSettings,
    kept: KeptValues,
    progress: bool,
) -> dict[Method, dict[str, Any]]:
    """What each method's result says of speed, from a few batches of rows from all over the data.

    Nothing, unless full depth is there and another method too. Rows get 2 new tokens at least, and at most as many as
    outputs may have. The rest is as in `time_equal_lengths`.
    """
    if len({method.full_depth for method in methods}) < 2:
        return {}
    size = settings.batch_size
    wanted = min(len(prompts), max(_BATCHES * size, _LEAST_ROWS))
    chosen = [i * len(prompts) // wanted for i in range(wanted)]
    rows, most = [prompts[i] for i in chosen], settings.max_new_tokens or 2
    each = [min(max(lengths[i], 2), most) for i in chosen]
    with progress_bar(ROUNDS * wanted, "record", name="speed", shown=progress) as bar:
        timings = time_equal_lengths(model, methods, rows, each, batch_size=size, kept=kept, progress=bar.update)
    about = {"what": WHAT, "records": wanted, "batch_size": size, "rounds": ROUNDS, "new_tokens": sum(each)}
    by_engine = {method.engine: timing for method, timing in zip(methods, timings, strict=True) if method.full_depth}
    return {
        method: speed_entries(timing, None if method.full_depth else by_engine[method.engine], settings, about)
        for method, timing in zip(methods, timings, strict=True)
        if method.engine in by_engine
    }


def speed_entries(
    ours: Timing, full: Timing | None, settings: EvaluationSettings, about: Mapping[str, Any]
) -> dict[str, Any]:
    """What a result says of a method's speed, JSON-ready: full depth's seconds over its own, for the same batches.

    With prompts, and of decoding alone; None where no time passed. Intervals are over batches: of one there is none.
    `full` is None for full depth itself; `about` says how it was measured.
    """
    found: dict[str, Any] = {"speed": {**about, **ours.to_dict()}, "full_depth_speed": full and full.to_dict()}
    for name, parts in _SPEEDUPS.items():
        gain = None
        if full is not None:
            times = ours.seconds(parts), full.seconds(parts)
            gain = compare(
                *times, lambda total: float(total[0]), resamples=settings.resamples, seed=settings.seed
            ).ratio
        found[name] = 1.0 if full is None else None if gain is None else gain.estimate
        found[f"{name}_interval"] = None if gain is None or len(ours.batches) < 2 else asdict(gain)
    return found
