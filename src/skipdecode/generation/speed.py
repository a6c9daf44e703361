"""Decoding methods, and their speed for equal work: the one measurement of `prepare`, `eval` and `generate --compare`.

Methods decode greedily, as `LLM.generate` and the server do by default: with drafts, and with prompts that share their
beginnings. They end free-running outputs at different lengths: shorter outputs take less time, and a full batch costs
less per token. Times of such outputs do not measure speed. For speed the lengths are given, end tokens are ignored,
methods take turns, and medians of rounds count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from secrets import token_hex
from statistics import median
from typing import Any, Self

from skipdecode.common.bootstrap import Stopwatch
from skipdecode.common.resume import ResumeLog
from skipdecode.common.spread import spread_over
from skipdecode.common.tables import speedups
from skipdecode.common.types import Tokenizer
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.base import Engine, EngineStats
from skipdecode.engine.opening import Backend
from skipdecode.engine.requests import Request, Sampling, StepOutput
from skipdecode.generation.decoding import Output
from skipdecode.schedule import Schedule

ROUNDS = 3
MOST_BATCHES = 4
HOW = "drafts and shared prefixes on all sides, in turn on the same batches, medians of rounds"
HOW_WITHOUT_DRAFTS = HOW.replace("drafts and shared", "shared")
_WARM_UP_TOKENS = 4
_LEAST_TOKENS = 8  # of a sequence whose speed is measured, where the time is short


class OutOfTime(Exception):  # noqa: N818  # no error: the caller keeps what was finished
    """The clock has reached the limit of a piece of work."""


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
    answers. `variant`: another way to decode at full depth, which is compared with the plain one. Attribute `engine`:
    the name of the engine that runs the model.
    """

    def __init__(
        self,
        backend: Backend,
        schedule: Schedule | None = None,
        name: str | None = None,
        *,
        variant: bool = False,
        exact: bool = True,
    ) -> None:
        self.backend, self.engine, self.exact = backend, backend.name, exact
        self.schedule = Schedule.full(backend.num_layers) if schedule is None else schedule
        self.full_depth = self.schedule.is_full and not variant
        self.name = name or method_name(self.schedule)

    def make_engine(self, max_rows: int, share: float = 1.0) -> Engine:
        """A new engine for `max_rows` sequences at a time; all depths come within a `share` of the tokens."""
        return self.backend.engine(squeezed(self.schedule, share), max_rows=max_rows, prefix_cache=True)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        eos: Collection[int],
        sampling: Sequence[Sampling] | None = None,
        rows: int = 0,
        cache_salt: str = "",
        engine: Engine | None = None,
        until: float = math.inf,
    ) -> Generation:
        """Continuations of prompts, given as token ids, none empty; greedy unless each has its `sampling`.

        `max_new_tokens` is of every sequence or of each; tokens of `eos` end a sequence; `rows` sequences are decoded
        together, 0 for all. Drafts and prefixes are from earlier calls with the same `cache_salt` and `engine`.

        Raises OutOfTime at the first step after `until`, of `time.perf_counter()`.
        """
        engine = engine or self.make_engine(rows or len(prompts))
        engine.stats = stats = EngineStats()
        most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        samplings = sampling or [self.backend.sampling] * len(prompts)
        requests = [
            Request(tuple(prompt), new, rules, frozenset(eos), cache_salt, self.exact)
            for prompt, new, rules in zip(prompts, most, samplings, strict=True)
        ]
        tokens = [[out.token for out in steps] for steps in steps_until(engine, requests, until)]
        return Generation(
            tokens, stats.prompt_seconds, stats.decode_seconds, stats.token_layers, stats.fed_tokens, stats.steps
        )

    def settings(self) -> dict[str, Any]:
        """JSON-ready parameters, for the result: name, schedule if it skips layers, drafts, quantization, rules."""
        schedule = {} if self.full_depth else {"schedule": self.schedule.to_dict()}
        fast = self.backend.fast
        weights = {} if fast is None or fast.quantization is None else {"quantization": fast.quantization}
        rules = {"rules": self.backend.rules} if self.backend.rules else {}
        return {"name": self.name} | schedule | ({} if self.exact else {"exact": False}) | weights | rules

    def texts(self, rows: Iterable[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
        """Decode new tokens of prompts; texts are cut before the stop strings of the generation config."""
        stop = StopStrings(self.backend.stop)
        return [stop.cut(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


def steps_until(engine: Engine, requests: Sequence[Request], until: float) -> list[list[StepOutput]]:
    """Return the new tokens of each request; raises OutOfTime at the first step after `until`."""
    steps: dict[int, list[StepOutput]] = {number: [] for number in engine.submit(requests)}
    while engine.has_work:
        if time.perf_counter() > until:
            engine.close()
            raise OutOfTime
        for out in engine.step():
            steps[out.request].append(out)
    return list(steps.values())


def groups_in_time(count: int, size: int, until: float) -> Iterator[tuple[range, float]]:
    """Yield groups of records, growing up to `size`, as long as the next one is likely to end before `until`.

    With each group comes the limit of its own: the first one, of two records, has none. Without `until` all groups have
    `size` records.
    """
    start, a_row = 0, 0.0
    rows = size if until == math.inf else min(2, size)
    while start < count:
        group, begun = range(start, min(start + rows, count)), time.perf_counter()
        if start and begun + a_row * len(group) > until:
            return
        yield group, until if start else math.inf
        a_row = (time.perf_counter() - begun) / len(group)
        start, rows = group.stop, min(2 * rows, size)


def method_name(schedule: Schedule) -> str:
    """The name, in tables, of decoding under a schedule."""
    return "full" if schedule.is_full else schedule.name


def squeezed(schedule: Schedule, share: float) -> Schedule:
    """The schedule with its positions in a share of the tokens: texts cut to that share then run all of its depths."""
    if share >= 1 or schedule.is_flat:
        return schedule
    count = max(1, round(schedule.seq_len * share))
    return replace(schedule, budgets=tuple(schedule.budget(round(position / share)) for position in range(count)))


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


Turns = Stopwatch[Method, Generation]
"""Methods in turn on the same batches."""


def time_equal_lengths(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    batch_size: int,
    log: ResumeLog | None = None,
    progress: Callable[[int], None] = lambda rows: None,
    rounds: int = ROUNDS,
    share: float = 1.0,
    until: float = math.inf,
) -> Turns:
    """Have methods take turns on each batch, `rounds` times.

    `prompts` are token ids, `lengths` the numbers of new tokens. `log` has turns that an earlier, interrupted run
    finished, and stores those of this run. `progress` is called with the number of sequences of each turn. A `share`
    of the tokens is timed, at all depths. After `until`, of `time.perf_counter()`, no turn begins but the first.
    """
    groups = batches([len(prompt) for prompt in prompts], batch_size)
    turns, engines = Turns(methods), dict[Method, tuple[Engine, str]]()
    for turn in range(rounds * len(groups)):
        number = turn % len(groups)
        rows = [prompts[i] for i in groups[number]]
        counts = [timed_tokens(lengths[i], share) for i in groups[number]]
        key = f"speed {batch_size} {turn}"
        if done := log and log.get(key):
            turns.add(dict(zip(methods, (Generation(**g) for g in done), strict=True)), number)
            progress(len(rows))
            continue
        if turn and time.perf_counter() > until:
            break
        if not engines:
            warm_up(methods, rows)
        if not (engines and number):
            # A round begins with nothing that another round or method has drafted from or shared: answers are alike.
            engines = {method: (method.make_engine(batch_size, share), token_hex()) for method in methods}

        laps = turns.lap(partial(_timed, rows, counts, engines), number)
        if log is not None:
            log.put(key, [asdict(g) for g in laps.values()])
        progress(len(rows))
    return turns


def _timed(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], engines: Mapping[Method, tuple[Engine, str]], method: Method
) -> Generation:
    engine, salt = engines[method]
    generation = method.generate(rows, max_new_tokens=lengths, eos=set(), cache_salt=salt, engine=engine)
    return replace(generation, tokens=[])


def timed_tokens(length: int, share: float) -> int:
    """Tokens of a text that are timed: a share of them, and two at least, of which the second one is decoded."""
    return max(2, round(share * length))


def warm_up(methods: Sequence[Method], rows: Sequence[Sequence[int]]) -> float:
    """Generate a few tokens with each method; returns the seconds that a token of all rows takes, with all of them."""
    seconds = 0.0
    for method in methods:
        generation = method.generate(rows, max_new_tokens=_WARM_UP_TOKENS, eos=set(), cache_salt="warm-up")
        seconds += generation.decode_seconds / max(1, generation.positions)
    return seconds


def fitting_share(methods: Sequence[Method], rows: Sequence[Sequence[int]], longest: int, seconds: float) -> float:
    """The share of `longest` new tokens with which a turn of the methods on these rows takes about so many seconds."""
    if seconds == math.inf:
        return 1.0
    a_token = warm_up(methods, rows)
    return min(1.0, max(_LEAST_TOKENS, seconds / max(a_token, 1e-9)) / longest)


def medians_of(turns: Turns, method: Method) -> dict[str, float | None]:
    """`timing_of` a method, with the median of the rounds for each batch."""
    return timing_of(
        replace(rounds[0], **{n: median(getattr(g, n) for g in rounds) for n in ("prompt_seconds", "decode_seconds")})
        for rounds in turns.rounds(method)
    )


def request_seconds(longer: float = 1.0) -> Callable[[Generation], float]:
    """A clock of requests whose decoding goes on as it began, to so many times the tokens that were timed."""
    return lambda g: g.prompt_seconds + max(1.0, longer) * g.decode_seconds


@dataclass(frozen=True)
class SpeedComparison:
    """A method and full depth in turn on the same batches; `new_tokens` is their number on each side in a round."""

    turns: Turns
    method: Method
    full: Method
    batch_size: int
    new_tokens: int

    @classmethod
    def of(cls, outputs: Sequence[Output], method: Method, full: Method, batch_size: int) -> Self:
        """Time a method and full depth on prompts, for as many tokens as their outputs have."""
        timed = [output for output in outputs if len(output.tokens) > 1]  # else there is no step to compare
        chosen = [timed[i] for i in spread_over(len(timed), min(len(timed), MOST_BATCHES * batch_size))]
        lengths = [len(output.tokens) for output in chosen]
        prompts = [output.source.token_ids for output in chosen]
        turns = time_equal_lengths([full, method], prompts, lengths, batch_size=batch_size)
        return cls(turns, method, full, batch_size, sum(lengths))

    def to_dict(self) -> dict[str, Any] | None:
        """Return the speeds, JSON-ready; None if no batch had a decode step."""
        if not self.turns.laps(self.method):
            return None
        document: dict[str, Any] = {"batches": len(self.turns.rounds(self.method)), "batch_size": self.batch_size}
        for side, method in (("", self.method), ("full_", self.full)):
            timing = medians_of(self.turns, method)
            document[f"{side}layers_per_token"] = timing["layers_per_token"]
            document[f"{side}decode_tokens_per_s"] = timing["tokens_per_s"]
            document[f"{side}request_tokens_per_s"] = self.new_tokens / (timing["seconds"] or math.inf)
        return document | {
            "nominal_speedup": document["full_layers_per_token"] / document["layers_per_token"],
            "decode_speedup": self.turns.ratio(self.full, self.method, lambda g: g.decode_seconds),
            "request_speedup": self.turns.ratio(self.full, self.method, request_seconds()),
        }

    def lines(self) -> list[str]:
        """Write the speeds of both sides as a table."""
        speeds = self.to_dict()
        if speeds is None:
            return ["no comparison: no record has a second token"]
        cells = {}
        for name in ("decode", "request"):
            rates = [f"{speeds[f'{side}{name}_tokens_per_s']:.1f} tokens/s" for side in ("full_", "")]
            cells[name] = [*rates, f"{speeds[f'{name}_speedup']:.2f}x"]
        layers = [f"{speeds[f'{side}layers_per_token']:.1f} layers" for side in ("full_", "")]
        cells["nominal"] = [*layers, f"{speeds['nominal_speedup']:.2f}x"]
        many = "1 batch" if speeds["batches"] == 1 else f"{speeds['batches']} batches"
        lines = [f"{many} of {self.batch_size} again: {HOW if self.method.exact else HOW_WITHOUT_DRAFTS}"]
        lines += speedups(["full depth", "the schedule", "measured"], cells)
        schedule = self.method.schedule
        if (prompt := len(schedule.prompt_layers())) < schedule.num_layers:
            lines.append(f"prompts run {prompt} of {schedule.num_layers} layers, which the nominal speed-up leaves out")
        return lines
