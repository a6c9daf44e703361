"""Speed for equal work: a sequence gets the same number of new tokens under every method, in turn, medians of rounds.

Methods end free-running outputs at different lengths: shorter outputs take less time, and a full batch costs less per
token. Times of such outputs do not measure speed. Here the lengths are given, and end tokens are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from secrets import token_hex
from statistics import median
from typing import Any

from skipdecode.common.bootstrap import Stopwatch
from skipdecode.common.journal import KeptValues
from skipdecode.common.progress import progress_bar
from skipdecode.data.chats import chat_fault
from skipdecode.data.forms import choose_form
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder, context_length
from skipdecode.engine.opening import end_tokens
from skipdecode.errors import UsageError
from skipdecode.evaluation.methods import Generation, Method, batches, timing_of
from skipdecode.evaluation.settings import EvaluationSettings
from skipdecode.generation.llm import LLM
from skipdecode.models.loading.ref import ModelRef
from skipdecode.schedule import Schedule

ROUNDS = 3
WHAT = "outputs of the lengths of the references, all methods in turn on the same batches, medians of rounds"
_WARM_UP_TOKENS = 4
_LEAST_ROWS = 16
_ALONE, _ALONE_TOKENS = 2, 64  # records that are decoded alone, once, and their most new tokens

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


_RECORDS, _CHAT = "e2e-smollm2-135m", "chat-smollm2-135m"
_INSTRUCTION = "Describe this place in one sentence, from these facts: "
_TUNED = "The weights were tuned under these schedules. Names that the training data did not have may be lost."
_UNTUNED = (
    "The weights were not tuned under these schedules, so the text degrades when layers are skipped: skipdecode "
    "prepare repairs it. Layers and speed are the same for tuned weights."
)


def demo_models() -> list[str]:
    """The models that are shown by default: the bundled adapters that are there."""
    return [name for name in (_RECORDS, _CHAT) if ModelRef(name).adapter is not None]


def demo(llm: LLM, max_new_tokens: int) -> dict[str, Any]:
    """The outputs and speeds of a model for the built-in prompts, `max_new_tokens` for each; JSON-ready.

    Full depth is the first schedule, then come those that the checkpoint was tuned under, else some of each kind.
    Raises UsageError if the prompts do not fit the model.
    """
    loaded, layers = llm.loaded, llm.num_layers
    known = (*(() if loaded.recipe is None else loaded.recipe.tuned_under), loaded.schedule)
    schedules = sorted({s for s in known if s and not s.is_full}, key=lambda s: (s.nominal_speedup, s.name))
    if loaded.recipe is None:
        schedules.append(Schedule.even(layers, layers - max(1, layers // 10)))
        schedules += [Schedule.from_speedup(layers, speedup, max_new_tokens - 1) for speedup in (2, 3)]
    full, *others = [Method(llm.backend), *(Method(llm.backend, schedule) for schedule in schedules)]
    prompts = _prompts(llm, max_new_tokens)
    tokens, lengths = [prompt.token_ids for prompt in prompts], [max_new_tokens] * len(prompts)
    turns = time_equal_lengths([full, *others], tokens, lengths, batch_size=len(prompts))
    ends, rows = set(end_tokens(loaded.model, llm.tokenizer)), []
    for method in (full, *others):
        found = method.generate(tokens, max_new_tokens=max_new_tokens, eos=ends)
        texts = [text.strip() for text in llm.tokenizer.batch_decode(found.tokens, skip_special_tokens=True)]
        nominal = layers / method.schedule.mean_budget(max_new_tokens - 1)
        speeds = speed_entries(turns, method, full, EvaluationSettings(), {"batch_size": len(prompts)})
        rows.append({"name": method.name, "texts": texts, "nominal_speedup": nominal, **speeds})
    return {
        "model": loaded.name,
        "engine": llm.backend.name,
        "prompts": [str(p.record.prompt).removeprefix(_INSTRUCTION).strip() for p in prompts],
        "rows": rows,
        "remark": _UNTUNED if loaded.untuned_line(schedules) else _TUNED,
    }


def _prompts(llm: LLM, max_new_tokens: int) -> list[EncodedPrompt]:
    """The built-in prompts, records in the template that the checkpoint was tuned on, else as chats."""
    loaded = llm.loaded
    form = choose_form(loaded.recipe)
    chat = form.template is None and chat_fault(loaded.tokenizer) is None
    listed = json.loads(
        resources.files("skipdecode.evaluation").joinpath("demo_prompts.json").read_text(encoding="utf-8")
    )
    kind = {_RECORDS: "record", _CHAT: "chat"}.get(loaded.name, "record" if form.template else "")
    ask = {"record": _INSTRUCTION if chat else "", "chat": ""}
    wanted = [p for p in listed if p["kind"] == kind or not kind]
    records = [
        replace(form.record(ask[p["kind"]] + p["text"]), index=i, line=i + 1, id=p["id"]) for i, p in enumerate(wanted)
    ]
    context = context_length(loaded.model.config)
    prompts = PromptEncoder(loaded.tokenizer, context, template=form.template, chat=chat).encode(records)
    for prompt in prompts:
        if prompt.error is not None and form.template is not None:
            raise UsageError(f"{loaded.name} needs records, and the demo has texts: {prompt.error}")
        if prompt.error is not None or (prompt.room is not None and prompt.room < max_new_tokens):
            raise UsageError(f"max_new_tokens={max_new_tokens} is too many: {loaded.name} has a context of {context}")
    return prompts
