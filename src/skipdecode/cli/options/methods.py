"""Options that name a decoding method: a schedule, or one of the methods that are none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from skipdecode.cli.arguments import flag
from skipdecode.cli.options import ScheduleOptions, check_schedule_options, choose_schedule, with_prompt_layers
from skipdecode.common.options import Reads, option
from skipdecode.common.registry import near
from skipdecode.errors import OptionError, UsageError
from skipdecode.evaluation.methods import METHODS
from skipdecode.schedule import ORDER_OF_ITS_OWN, PUBLISHED, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skipdecode.evaluation.methods.base import Method

__all__ = ["MethodOptions", "check_method_options", "choose_method", "each_method"]

_OTHERS = tuple(name for name in METHODS if name != "schedule")
_SCHEDULES = tuple(name for name in PUBLISHED if name not in _OTHERS)
_TAKE_ORDER = tuple(name for name in _SCHEDULES if name not in ORDER_OF_ITS_OWN)
_ONE_ONLY = ("schedule", "nominal_speedup", "method", "exit_layer")


@dataclass(frozen=True, kw_only=True)
class MethodOptions(ScheduleOptions):
    """How to decode."""

    seq_len: int | None = option(
        "positions over which --nominal-speedup lowers the depth (default: 95th percentile of the task's responses)",
        default=None,
        least=1,
    )
    method: str | None = option(
        "how to decode; schedules by name need --nominal-speedup (default: what --schedule, --nominal-speedup or the "
        "checkpoint say)",
        default=None,
        choices=(*_OTHERS, *_SCHEDULES),
    )
    warmup_layers: int = option("first layers that always run under --nominal-speedup", default=1, least=0)
    drop_order: str | None = option(
        f"schedule file whose order of layers --nominal-speedup takes, for {', '.join(_TAKE_ORDER)}; static_pruning "
        "needs one",
        default=None,
        path=Reads(),
    )
    threshold: float = option("confidence at which calm lets a token exit, 0 to 1", default=0.9, least=0)
    confidence: str = option(
        "of calm; softmax: difference of the two likeliest tokens' probabilities; state: similarity of a layer's "
        "output to its input",
        default="softmax",
        choices=("softmax", "state"),
    )
    exit_layer: int | None = option("layers that draft in self_speculation (default: a third)", default=None, least=1)
    draft_tokens: int = option("longest draft of prompt_lookup", default=10, least=1)


OptionsT = TypeVar("OptionsT", bound=MethodOptions)


def each_method(options: OptionsT, wanted: Sequence[str]) -> list[OptionsT]:
    """The options of each of several methods that were asked for in short.

    `options` is what they have in common; `wanted` are words such as ``full`` and ``calm``, ``even:3`` (a schedule by
    name and nominal speed-up), ``even:3:15`` (its prompt layers too) and schedule files (*.json). Raises UsageError if
    one is not understood, `options` name a method too, or a drop order that none of them takes.
    """
    for name in _ONE_ONLY:
        if getattr(options, name) is not None:
            raise UsageError(f"--methods and {flag(name)} both say how to decode: leave out {flag(name)}")
    each = [_from_word(options, word) for word in wanted]
    if options.drop_order is not None and all(one.drop_order is None for one in each):
        accepted = ", ".join(f"{name}:2" for name in _TAKE_ORDER)
        raise UsageError(
            f"--drop-order: none of --methods {' '.join(wanted)} takes an order of layers: leave it out, or add one "
            f"that does, such as {accepted}"
        )
    return each


def _from_word(options: OptionsT, word: str) -> OptionsT:
    if word.endswith(".json"):
        return replace(options, schedule=word, seq_len=None, drop_order=None)
    name, colon, rest = word.partition(":")
    speedup, _, prompt = rest.partition(":")
    if name not in (*_OTHERS, *_SCHEDULES):
        hint = near(name, (*_OTHERS, *_SCHEDULES))
        accepted = f"{', '.join((*_OTHERS, *_SCHEDULES))} and schedule files (*.json)"
        raise UsageError(f"--methods {word}: unknown method {name!r}{hint}: accepted are {accepted}")
    if not colon:
        return replace(options, method=name, seq_len=None, drop_order=None, prompt_layers=None)
    order = options.drop_order if name in _TAKE_ORDER else None
    given = prompt or options.prompt_layers
    try:
        return replace(options, method=name, nominal_speedup=float(speedup), drop_order=order, prompt_layers=given)
    except OptionError as e:
        raise UsageError(f"--methods {word}: a speed-up of {speedup} is not accepted: give {e.accepted}") from None
    except ValueError:
        raise UsageError(f"--methods {word}: {speedup!r} is no speed-up: give a number, as in {name}:2") from None


def check_method_options(options: MethodOptions) -> None:
    """Refuse, before a model is loaded, options that contradict each other."""
    check_schedule_options(options)
    if options.method in _OTHERS:
        for name in ("schedule", "nominal_speedup", "prompt_layers"):
            if getattr(options, name) is not None:
                raise UsageError(f"--method {options.method} has no schedule: leave out {flag(name)}")
    if options.method in _SCHEDULES and options.nominal_speedup is None:
        raise UsageError(f"--method {options.method} needs --nominal-speedup")
    if options.drop_order is not None and options.nominal_speedup is None:
        raise UsageError("--drop-order belongs to --nominal-speedup: give both, or neither")
    if options.method == "static_pruning" and options.drop_order is None:
        raise UsageError(
            "static_pruning drops layers by their influence, which is measured: give --drop-order FILE, such as the "
            "schedule that skipdecode calibrate wrote"
        )
    if options.exit_layer is not None and options.method != "self_speculation":
        raise UsageError("--exit-layer belongs to --method self_speculation")


def choose_method(
    options: MethodOptions, num_layers: int, *, carried: Schedule | None, default_seq_len: int
) -> tuple[Method, str]:
    """The method that the options name, and where it is from in words; the rest is as in `choose_schedule`."""
    check_method_options(options)
    if options.method == "self_speculation":
        exit_layer = max(1, num_layers // 3) if options.exit_layer is None else options.exit_layer
        return METHODS.get("self_speculation")(exit_layer), f"drafts from {exit_layer} of {num_layers} layers"
    if options.method == "calm":
        return METHODS.get("calm")(options.threshold, options.confidence), f"exit at {options.confidence} confidence"
    if options.method == "prompt_lookup":
        return METHODS.get("prompt_lookup")(options.draft_tokens), f"drafts of up to {options.draft_tokens} tokens"
    if options.nominal_speedup is not None:
        seq_len = default_seq_len if options.seq_len is None else options.seq_len
        schedule = Schedule.published(
            options.method or "skipdecode",
            num_layers,
            options.nominal_speedup,
            seq_len,
            warmup_layers=options.warmup_layers,
            drop_order=None if options.drop_order is None else Schedule.load(options.drop_order).drop_order,
        )
        origin = f"nominal {schedule.nominal_speedup:.2f}x over {seq_len} positions"
        origin += "" if options.drop_order is None else f", layers in the order of {options.drop_order}"
        schedule, origin = with_prompt_layers(options, schedule, origin)
    elif options.method == "full":
        schedule, origin = Schedule.full(num_layers), "every layer"
    else:
        schedule, origin = choose_schedule(options, num_layers, carried=carried, default_seq_len=default_seq_len)
    if schedule.is_full:
        return METHODS.get("full")(), origin
    return METHODS.get("schedule")(schedule), origin
