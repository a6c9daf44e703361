"""Options of `skipdecode eval`, and the schedules that they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from skipdecode.cli.arguments import check_together
from skipdecode.cli.options import (
    BASE,
    MODEL,
    EngineOptions,
    ScheduleChoice,
    ScheduleOptions,
    adjusted_schedule,
    choose_schedule,
)
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.common.registry import near
from skipdecode.data.tasks import task_file
from skipdecode.errors import OptionError, UsageError
from skipdecode.evaluation.results import EVAL_DIRECTORY
from skipdecode.evaluation.settings import EvaluationOptions, method_name
from skipdecode.models.loading.ref import model_files
from skipdecode.schedule import ORDER_OF_ITS_OWN, PUBLISHED, Schedule
from skipdecode.schedule.grammar import base_of, is_speedup

_TAKE_ORDER = tuple(name for name in PUBLISHED if name not in ORDER_OF_ITS_OWN)


def _files_of_run(place: str) -> list[Path]:
    path = Path(place)
    folder = path if path.is_dir() else path.parent
    return [path, folder / "run.json", folder / "outputs.jsonl"]


def _schedule_file(method: str) -> list[Path]:
    base = base_of(method)
    return [Path(base)] if base.endswith(".json") else []


@dataclass(frozen=True, kw_only=True)
class MethodOptions(ScheduleOptions):
    """The decoding method."""

    warmup_layers: int = option("first layers that always run with --nominal-speedup", default=1, least=0)
    drop_order: str | None = option(
        f"schedule file with the order of layers for --nominal-speedup, and in --methods for {', '.join(_TAKE_ORDER)}; "
        "required for static_pruning",
        default=None,
        path=Reads(),
    )


@dataclass(frozen=True, kw_only=True)
class Config(EvaluationOptions, MethodOptions, EngineOptions):
    """Options of `skipdecode eval`."""

    model: str = option(MODEL, default="", positional=True, path=Reads(model_files))
    task: str = option(
        "e2e, cnn_dm, tldr, jsonl (your own records), or a task file (*.yaml) (default with --data: the template that "
        "the checkpoint was tuned on, else jsonl)",
        default="",
        path=Reads(task_file),
    )
    data: str | None = option(
        "JSONL or CSV file of records with references (default with --task: the dataset of the task, from the hub)",
        default=None,
        path=Reads(),
    )
    prompts: str | None = option(
        "without references: file of prompts, read as generate reads its input (default: the base model draws them, by "
        "its chat template)",
        default=None,
        path=Reads(),
    )
    methods: tuple[str, ...] = option(
        "several schedules in one run, as --schedule names them: full, 2x, 2x:p15, files (*.json), names of the "
        "checkpoint's schedules; or a published method with its nominal speed-up (even:2) and prompt layers "
        "(even:3:15)",
        default=(),
        path=Reads(_schedule_file),
    )
    out: str | None = option("directory for run.json and outputs.jsonl", default=None, path=EVAL_DIRECTORY)
    compare: tuple[str, ...] = option(
        "runs (run.json or its directory), which are compared with the first of them",
        default=(),
        path=Reads(_files_of_run),
    )
    json: bool = option("print one JSON document", default=False)
    base: str | None = option(
        f"{BASE}; without references: the base model to compare with (default: the model that MODEL was tuned from)",
        default=None,
        path=Reads(model_files),
    )

    NEEDS: ClassVar = dict.fromkeys(("seq_len", "drop_order"), ("nominal_speedup", "methods"))
    EXCLUDES: ClassVar = ScheduleOptions.EXCLUDES | {
        "compare": ("model", "task", "out", "methods"),
        "methods": ("schedule", "nominal_speedup"),
        "prompts": ("task", "data", "compare"),
    }

    @property
    def without_references(self) -> bool:
        """Whether schedules are compared on texts of the model."""
        return not self.task and self.data is None

    @property
    def adapter_base(self) -> str | None:
        """The base model of --base; without references it is the model to compare with."""
        return None if self.without_references else self.base


class MethodChoice(NamedTuple):
    """The options of one method, and the name of its published schedule, if `--methods` names one."""

    options: Config
    published: str | None = None


def each_method(options: Config) -> list[MethodChoice]:
    """The methods of --methods, or the single method of the other options.

    A method is a schedule's text (`skipdecode.schedule.grammar`), such as ``2x:p15``, or a published method with its
    nominal speed-up, such as ``even:3`` or ``even:3:15`` (also with prompt layers). Raises UsageError if a
    method is unknown, if options exclude each other, or if no method uses --drop-order.
    """
    wanted = options.methods
    own = [name for name in options.ref.schedules if name != "full"] if wanted and options.model else []
    each = [_from_word(replace(options, methods=()), word, own) for word in wanted] or [MethodChoice(options)]
    if wanted and options.drop_order is not None and all(one.options.drop_order is None for one in each):
        accepted = ", ".join(f"{name}:2" for name in _TAKE_ORDER)
        raise UsageError(f"--drop-order: no method in {' '.join(wanted)} uses it: leave it out, or add {accepted}")
    for one in each:
        check_together(one.options)
    return each


def _from_word(options: Config, word: str, own: Sequence[str]) -> MethodChoice:
    base = base_of(word)
    if base in own or base.endswith(".json") or is_speedup(word) or (base == "full" and word != base):
        seq_len = options.seq_len if is_speedup(word) else None
        return MethodChoice(replace(options, schedule=word, seq_len=seq_len, drop_order=None))
    name, colon, rest = word.partition(":")
    speedup, _, prompt = rest.partition(":")
    if name not in PUBLISHED:
        accepted = f"{', '.join((*PUBLISHED, *own))}, speed-ups such as 2x, and schedule files (*.json)"
        raise UsageError(f"--methods {word}: unknown method {name!r}{near(name, PUBLISHED)}: accepted are {accepted}")
    if not colon:
        if name != "full":
            raise UsageError(f"--methods {word}: give a nominal speed-up, as in {name}:2")
        return MethodChoice(replace(options, seq_len=None, drop_order=None, prompt_layers=None), name)
    order = options.drop_order if name in _TAKE_ORDER else None
    if name == "static_pruning" and order is None:
        raise UsageError(
            f"--methods {word} needs --drop-order FILE: an order by measured influence of layers, such as the "
            "schedule that skipdecode calibrate writes"
        )
    given = prompt or options.prompt_layers
    try:
        return MethodChoice(
            replace(options, nominal_speedup=float(speedup), drop_order=order, prompt_layers=given), name
        )
    except OptionError as e:
        raise UsageError(f"--methods {word}: the speed-up {speedup} is not accepted: give {e.accepted}") from None
    except ValueError:
        raise UsageError(f"--methods {word}: {speedup!r} is not accepted: give a number, as in {name}:2") from None


def asked_schedules(config: Config) -> Schedule | list[Schedule] | tuple[()]:
    """The schedules that the options name, a single one unless they come from --methods; their origins are printed.

    Nothing if no option names one. Needs no weights.
    """
    if not any((config.methods, config.schedule, config.nominal_speedup, config.prompt_layers, config.flat)):
        return ()
    chosen = [choose_method(one, config) for one in each_method(config)]
    for schedule, origin in chosen:
        note(f"{method_name(schedule, config.exact)}: {origin}")
    return [schedule for schedule, _ in chosen] if config.methods else chosen[0].schedule


def choose_method(method: MethodChoice, config: Config) -> ScheduleChoice:
    """The schedule of an element of `each_method`, and its origin."""
    options, published = method
    num_layers, default = config.ref.num_layers, _default_seq_len(config)
    if options.nominal_speedup is not None:
        seq_len = default if options.seq_len is None else options.seq_len
        schedule = Schedule.published(
            published or "skipdecode",
            num_layers,
            options.nominal_speedup,
            seq_len,
            warmup_layers=options.warmup_layers,
            drop_order=None if options.drop_order is None else Schedule.load(options.drop_order).drop_order,
        )
        origin = f"nominal {schedule.nominal_speedup:.2f}x over {seq_len} positions"
        origin += "" if options.drop_order is None else f", layers in the order of {options.drop_order}"
        return adjusted_schedule(options, schedule, origin)
    if published is not None:
        return ScheduleChoice(Schedule.full(num_layers), "every layer")
    return choose_schedule(
        options, num_layers, carried=config.ref.schedule, default_seq_len=default, named=config.ref.schedules
    )


def _default_seq_len(config: Config) -> int:
    from skipdecode.evaluation.evaluate import task_of
    from skipdecode.evaluation.self_generated import OwnTexts

    if config.without_references:
        return config.max_new_tokens or OwnTexts.TOKENS
    task = task_of(config.ref, config.task or None)
    return task.response_tokens.get("p95", config.max_new_tokens or task.max_new_tokens)
