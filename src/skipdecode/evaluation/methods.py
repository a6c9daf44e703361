"""Decoding methods of an evaluation: a schedule on a backend, its outputs, and its speed for equal work.

Greedy only, so that methods are compared without sampling noise. Knows nothing about text.

Methods end free-running outputs at different lengths: shorter outputs take less time, and a full batch costs less per
token. Times of such outputs do not measure speed. For speed the lengths are given, end tokens are ignored, methods take
turns, and medians of rounds count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from secrets import token_hex
from statistics import median
from typing import Any

from skipdecode.common.bootstrap import Stopwatch
from skipdecode.common.journal import KeptValues
from skipdecode.common.progress import note, progress_bar
from skipdecode.engine.base import Engine
from skipdecode.engine.opening import Backend, open_engines
from skipdecode.engine.requests import Request
from skipdecode.errors import SkipDecodeError
from skipdecode.evaluation.results import EvaluationSettings, method_name
from skipdecode.schedule import Schedule

ROUNDS = 3
WHAT = "outputs of the lengths of the references, all methods in turn on the same batches, medians of rounds"
_WARM_UP_TOKENS = 4
_LEAST_ROWS = 16
_ALONE, _ALONE_TOKENS = 2, 64  # records that are decoded alone, once, and their most new tokens
_MOST_BATCHES = 4
_LEAST_TURNS = 8  # if there are enough records: an interrupted run keeps whole turns


@dataclass(frozen=True)
class Generation:
    """The new tokens of some sequences, each with its end token if one came, and their cost.

    `prompt_seconds` are of the forwards of prompts, `decode_seconds` all other time. `fed_tokens` are the generated
    tokens that had to be fed back: all but each sequence's last. `layer_tokens` is the sum of the layers that they ran,
    `positions` the number of decode steps up to the end of the longest sequence.
    """

    tokens: list[list[int]]
    prompt_seconds: float
    decode_seconds: float
    layer_tokens: int
    fed_tokens: int
    positions: int


class Method:
    """Greedy decoding of a backend's model under a schedule, by default full depth, with which others are compared.

    `name` is the label in tables, by default the schedule's. `exact`: with drafts from the text and from earlier
    answers. `beside`: another way to decode at full depth, which is compared with the plain one.
    """

    def __init__(
        self,
        backend: Backend,
        schedule: Schedule | None = None,
        name: str | None = None,
        *,
        beside: bool = False,
        exact: bool = False,
    ) -> None:
        self.backend, self.exact = backend, exact
        self.schedule = Schedule.full(backend.num_layers) if schedule is None else schedule
        self.full_depth = self.schedule.is_full and not (beside or exact)
        self.name = name or method_name(self.schedule)

    @property
    def engine(self) -> str:
        """What runs the model."""
        return self.backend.name

    def make_engine(self, max_rows: int) -> Engine:
        """A new engine that decodes this way, `max_rows` sequences at a time."""
        return self.backend.engine(self.schedule, max_rows=max_rows)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        eos: set[int],
        rows: int = 0,
        cache_salt: str = "",
    ) -> Generation:
        """Greedy continuations of prompts, given as token ids, none empty.

        `max_new_tokens` is of every sequence or of each; tokens of `eos` end a sequence; `rows` sequences are decoded
        together, 0 for all. Drafts are from earlier answers of the same `cache_salt`.
        """
        engine, ends = self.make_engine(rows or len(prompts)), frozenset(eos)
        most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        options: dict[str, Any] = {"stop_ids": ends, "exact": self.exact, "cache_salt": cache_salt}
        options["sampling"] = self.backend.sampling
        decoded = engine.decode([Request(tuple(p), new, **options) for p, new in zip(prompts, most, strict=True)])
        stats = engine.stats
        return Generation(
            [sequence.tokens for sequence in decoded],
            stats.prompt_seconds,
            stats.decode_seconds,
            stats.token_layers,
            stats.fed_tokens,
            stats.steps,
        )

    def settings(self) -> dict[str, Any]:
        """JSON-ready parameters, for the result: name, schedule if it skips layers, drafts, quantization, rules."""
        schedule = {} if self.full_depth else {"schedule": self.schedule.to_dict()}
        fast = self.backend.fast
        weights = {} if fast is None or fast.quantization is None else {"quantization": fast.quantization}
        rules = {"rules": self.backend.sampling.active} if self.backend.sampling.active else {}
        return {"name": self.name} | schedule | ({"exact": True} if self.exact else {}) | weights | rules


def other_ways(backend: Backend, schedules: Sequence[Schedule], which: str) -> list[Method]:
    """Full depth with drafts and with W8A8 weights if the fast engine has them; `which` "all": schedules with them too.

    An empty `which` asks for none.
    """
    if not which:
        return []
    full = Schedule.full(backend.num_layers)
    ways = [Method(backend, full, "full, exact", exact=True)]
    try:
        fast = open_engines(backend.model, "fast", lambda text: None, "w8a8", generation_config=False)
    except SkipDecodeError as e:
        note(f"no W8A8: {e}")
        return ways
    fast.sampling = backend.sampling
    ways += [Method(fast, full, "full, w8a8", beside=True), Method(fast, full, "full, w8a8, exact", exact=True)]
    skipping = [schedule for schedule in schedules if which == "all" and not schedule.is_full]
    return ways + [Method(fast, schedule, f"{schedule.name}, w8a8") for schedule in skipping]


def timing_of(batches: Iterable[Generation]) -> dict[str, float | None]:
    """JSON-ready sums over the batches of one method, and rates; `tokens_per_s` is of decoding."""
    done = list(batches)
    names = ("prompt_seconds", "decode_seconds", "positions", "fed_tokens", "layer_tokens")
    prompt, decode, positions, fed, layers = (float(sum(getattr(g, n) for g in done)) for n in names)
    return {
        "seconds": prompt + decode,
        **dict(zip(names, (prompt, decode, positions, fed, layers), strict=True)),
        "layers_per_token": layers / fed if fed else None,
        "ms_per_position": 1000 * decode / positions if positions else None,
        "tokens_per_s": fed / decode if decode else None,
    }


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of records in batches of similar length, longest first: a batch that does not fit fails at once."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + size] for start in range(0, len(order), size)]


@dataclass(frozen=True)
class Outputs:
    """The outputs of one method: tokens of every record in the order of the prompts, and the cost of each batch.

    `full` are full depth's tokens, for comparison; empty if it was not run, or for full depth itself.
    """

    tokens: list[list[int]]
    batches: list[Generation]
    full: list[list[int]] = field(default_factory=list)


def generate_all(
    sides: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    kept: KeptValues,
    *,
    batch_size: int,
    max_new_tokens: int,
    eos: set[int],
    progress: Callable[[int], None] = lambda rows: None,
) -> list[Outputs]:
    """Run methods over all prompts; the outputs of each, in order.

    `kept` has batches that an earlier, interrupted run finished, and stores those of this run. `progress` is called
    with the number of records of each batch.
    """
    tokens: list[list[list[int]]] = [[[] for _ in prompts] for _ in sides]
    taken: list[list[Generation]] = [[] for _ in sides]
    # An engine gets the sequences of several batches together, and sorts them into batches by length.
    rows_at_once = batch_size * max(1, min(_MOST_BATCHES, len(prompts) // (batch_size * _LEAST_TURNS)))
    for number, indices in enumerate(batches([len(p) for p in prompts], rows_at_once)):
        rows, together = [prompts[i] for i in indices], min(batch_size, len(indices))
        done = [Generation(**g) for g in kept.get(f"batch {number}") or ()]
        if not done:
            done = [side.generate(rows, max_new_tokens=max_new_tokens, eos=eos, rows=together) for side in sides]
            kept.put(f"batch {number}", [asdict(g) for g in done])
        for generation, generations, outputs in zip(done, taken, tokens, strict=True):
            generations.append(replace(generation, tokens=[]))
            for index, row in zip(indices, generation.tokens, strict=True):
                outputs[index] = row
        progress(len(indices))
    return [Outputs(*each) for each in zip(tokens, taken, strict=True)]


# ---------------------------------------------------------------------- speed

Turns = Stopwatch[Method, Generation]
"""Methods in turn on the same batches."""


def time_equal_lengths(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    batch_size: int,
    kept: KeptValues | None = None,
    progress: Callable[[int], None] = lambda rows: None,
    rounds: int = ROUNDS,
) -> Turns:
    """Have methods take turns on each batch, `rounds` times.

    `prompts` are token ids, `lengths` the numbers of new tokens. `kept` has turns that an earlier, interrupted run
    finished, and stores those of this run. `progress` is called with the number of sequences of each turn.
    """
    groups = batches([len(prompt) for prompt in prompts], batch_size)
    turns = Turns(methods)
    warm, salt = False, ""
    for turn in range(rounds * len(groups)):
        number = turn % len(groups)
        if not (number and salt):
            salt = token_hex()  # no round drafts from the answers of another, which are the same
        rows, each = [prompts[i] for i in groups[number]], [lengths[i] for i in groups[number]]
        key = f"speed {batch_size} {turn}"
        if done := kept and kept.get(key):
            turns.add(dict(zip(methods, (Generation(**g) for g in done), strict=True)), number)
        else:
            for method in () if warm else methods:
                method.generate(rows, max_new_tokens=_WARM_UP_TOKENS, eos=set(), cache_salt="warm-up")
            warm = True

            def generate(method: Method, rows: Any = rows, each: Any = each, salt: str = salt) -> Generation:
                return replace(method.generate(rows, max_new_tokens=each, eos=set(), cache_salt=salt), tokens=[])

            found = turns.lap(generate, number)
            if kept is not None:
                kept.put(key, [asdict(g) for g in found.values()])
        progress(len(rows))
    return turns


def medians_of(turns: Turns, method: Method) -> dict[str, float | None]:
    """`timing_of` a method, with the median of the rounds for each batch."""
    return timing_of(
        replace(rounds[0], **{n: median(getattr(g, n) for g in rounds) for n in ("prompt_seconds", "decode_seconds")})
        for rounds in turns.rounds(method)
    )


def measured_speeds(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    settings: EvaluationSettings,
    kept: KeptValues,
) -> dict[Method, dict[str, Any]]:
    """The speed of each method, for its result, from a few batches of records from all over the data.

    Empty without full depth and another method. Sequences get 2 new tokens at least, and at most as many as outputs may
    have. The other arguments are as in `time_equal_lengths`.
    """
    full = next((method for method in methods if method.full_depth), None)
    if full is None or len(methods) < 2:
        return {}
    size = settings.batch_size
    wanted = min(len(prompts), max(settings.speed_batches * size, _LEAST_ROWS))
    chosen = [i * len(prompts) // wanted for i in range(wanted)]
    rows, most = [prompts[i] for i in chosen], settings.max_new_tokens or 2
    each = [min(max(lengths[i], 2), most) for i in chosen]
    rounds = settings.speed_rounds
    with progress_bar(rounds * wanted, "record", name="speed") as bar:
        timed: dict[str, Any] = {"kept": kept, "progress": bar.update, "rounds": rounds}
        turns = time_equal_lengths(methods, rows, each, batch_size=size, **timed)
    about = {"what": WHAT, "records": wanted, "batch_size": size, "rounds": rounds, "new_tokens": sum(each)}
    found = {method: speed_entries(turns, method, full, settings, about) for method in methods}
    if settings.ways and size > 1:
        short = [min(length, _ALONE_TOKENS) for length in each[:_ALONE]]
        alone = time_equal_lengths(methods, rows[:_ALONE], short, batch_size=1, kept=kept, rounds=1)
        clock = _request_seconds(settings.speed_tokens * len(short) / sum(short))
        for method, entries in found.items():
            entries["request_speedup_alone"] = alone.ratio(full, method, clock)
    return found


def _request_seconds(longer: float) -> Callable[[Generation], float]:
    """Seconds of a request whose decoding goes on as it began, to so many times the tokens that were timed."""
    return lambda g: g.prompt_seconds + max(1.0, longer) * g.decode_seconds


def speed_entries(
    turns: Turns, method: Method, full: Method, settings: EvaluationSettings, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The speed of a method, JSON-ready: the time of full depth for the same batches divided by the method's.

    With prompts, and of decoding alone; None if no time passed. Intervals are over batches, or the rounds of one.
    `about` describes the measurement.
    """
    beside = None if method is full else medians_of(turns, full)
    found: dict[str, Any] = {"speed": {**about, **medians_of(turns, method)}, "full_depth_speed": beside}
    longer = settings.speed_tokens * about.get("records", 1) / about.get("new_tokens", math.inf)
    clocks = {"request_speedup": _request_seconds(longer), "decode_speedup": lambda g: g.decode_seconds}
    for name, clock in clocks.items():
        bounds = turns.interval(full, method, clock, resamples=settings.resamples, seed=settings.seed)
        found[name] = turns.ratio(full, method, clock)
        found[f"{name}_interval"] = None if method is full or bounds is None else asdict(bounds)
    return found
