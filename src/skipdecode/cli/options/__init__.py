"""Options that several verbs share: each group is a dataclass that a verb's config inherits from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skipdecode.common.kinds import read_json
from skipdecode.common.options import Options, Reads, option
from skipdecode.common.progress import note
from skipdecode.engine.base import ENGINES, QUANTIZATIONS
from skipdecode.engine.requests import SamplingOptions
from skipdecode.errors import DataError, UsageError
from skipdecode.models.carried import schedule_file
from skipdecode.models.loading.hub import DTYPES, LoadedModel, load_model
from skipdecode.models.loading.ref import ModelRef, model_files
from skipdecode.performance.cost import CostModel
from skipdecode.schedule import Schedule
from skipdecode.schedule import order as layer_order

if TYPE_CHECKING:
    from skipdecode.engine.opening import Backend

__all__ = [
    "MODEL",
    "DecodingOptions",
    "EngineOptions",
    "NamedModel",
    "ScheduleChoice",
    "ScheduleOptions",
    "ThreadOptions",
    "adjusted_schedule",
    "choose_schedule",
    "named_schedule",
    "read_cost",
    "stop_text",
    "with_breaks",
]


MODEL = (
    "a directory (of a model or an adapter), a hub id, smollm2-135m, or an adapter on it: e2e-smollm2-135m, "
    "chat-smollm2-135m"
)


@dataclass(frozen=True, kw_only=True)
class ThreadOptions(Options):
    """CPU threads."""

    threads: int | None = option("CPU threads (default: torch's choice)", default=None, least=1)

    def use_threads(self) -> None:
        """Tell torch."""
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class NamedModel(Options):
    """A model by name."""

    model: str = option(MODEL, positional=True, path=Reads(model_files))

    @cached_property
    def ref(self) -> ModelRef:
        """What the name stands for, with the schedule files that the options name."""
        named: Any = getattr(self, "schedule", None) or ()
        files = [named] if isinstance(named, str) else named
        methods = [word for word in getattr(self, "methods", ()) if word.endswith(".json")]
        return ModelRef(self.model, (*files, *methods))


@dataclass(frozen=True, kw_only=True)
class EngineOptions(NamedModel, ThreadOptions):
    """How a model is loaded, and what runs it."""

    dtype: str = option(
        "of the weights; auto is the checkpoint's own, but bfloat16 for smollm2-135m and what tune made in bf16, where "
        "the device multiplies that",
        default="auto",
        choices=DTYPES,
    )
    device: str | None = option("torch device (default: the first GPU if there is one, else cpu)", default=None)

    engine: str = option(
        "what runs the model; fast: the package's own engine (CPUs; `info` lists its model types); "
        "auto: fast where it covers the model, else transformers",
        default="auto",
        choices=ENGINES,
    )
    quantization: str = option(
        "of the weights, after loading, by the fast engine (CPUs only): int8, int4: faster, less exact; w8a8: "
        "activations in 8 bits too, for batches and long prompts (CPUs with AVX512_VNNI)",
        default="none",
        alias="weights",
        choices=QUANTIZATIONS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization != "none" and self.engine == "transformers":
            raise UsageError(
                f"--quantization {self.quantization} needs the fast engine: leave out --engine transformers"
            )

    def load(self) -> LoadedModel:
        """The model with its weights, and the fit that goes with them, which is told."""
        from skipdecode.models.fit import fit_of

        self.use_threads()
        loaded = load_model(self.ref, dtype=self.dtype, device=self.device)
        if (fit := fit_of(loaded.model)) is not None:
            note(f"fit {self.ref.fit}: {fit.describe()}")
        return loaded

    def engines(self, loaded: LoadedModel, tell: Callable[[str], None] = note) -> Backend:
        """What runs a model, as the options say; `tell` gets one line where the choice needs a word."""
        from skipdecode.engine.opening import open_engines

        return open_engines(loaded.model, self.engine, tell, self.quantization)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(SamplingOptions):
    """How the next token is chosen."""

    seed: int = option("of sampling; a row's draws depend on this and its row number, not on its batch", default=0)
    exact: bool = option(
        "the tokens of full depth: the schedule drafts them, and full depth checks the drafts, where that is faster",
        default=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_effect()

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of `skipdecode.engine.Sampling`."""
        return {f.name: getattr(self, f.name) for f in fields(SamplingOptions)}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """Which schedule: a file, a nominal speed-up, or the model's own; and what prompts run."""

    schedule: str | None = option(
        "schedule file (JSON; skipdecode plan and calibrate write one; a skipdecode.fit beside it is used too), or the "
        "name of a bundled one with a fit: smollm2-135m-1.2x, smollm2-135m-1.4x, smollm2-135m-1.2x-p22; without it and "
        "--nominal-speedup: the one that the model's checkpoint carries, else full depth",
        default=None,
        parse=schedule_file,
        path=Reads(),
    )
    nominal_speedup: float | None = option(
        "the paper's schedule for this ratio of all layers to the mean layers run; the gain in time is lower (see "
        "skipdecode plan); 1 is full depth",
        default=None,
        least=1,
    )
    seq_len: int | None = option(
        "positions over which --nominal-speedup lowers the depth; best near the real length of the output (default: as "
        "many as are generated at most)",
        default=None,
        least=1,
    )
    prompt_layers: str | None = option(
        f"layers that prompt tokens run, whatever the schedule says: {layer_order.PROMPT_SETS}; in layers that "
        "generated tokens run beyond these, prompts leave keys and values and compute nothing else",
        default=None,
    )
    flat: bool = option(
        "use the constant schedule of the same mean depth; with --prompt-layers max_exit every token runs the same "
        "layers, and skipdecode export can write the model",
        default=False,
    )


class ScheduleChoice(NamedTuple):
    """The schedule to use, and where it is from in words."""

    schedule: Schedule
    origin: str


def named_schedule(options: ScheduleOptions) -> ScheduleChoice | None:
    """What --schedule names, read; refuses, before a model is loaded, options that contradict each other."""
    if options.schedule is not None and options.nominal_speedup is not None:
        raise UsageError("--schedule and --nominal-speedup both name a schedule: give one of them")
    if options.seq_len is not None and options.nominal_speedup is None:
        raise UsageError("--seq-len belongs to --nominal-speedup: give both, or neither")
    if options.schedule is None:
        return None
    return ScheduleChoice(Schedule.load(options.schedule), f"from {options.schedule}")


def choose_schedule(
    options: ScheduleOptions, num_layers: int, *, carried: Schedule | None, default_seq_len: int, own: str = ""
) -> ScheduleChoice:
    """The schedule that the options name for a model of `num_layers` layers, whose checkpoint (or `own`) has `carried`.

    `default_seq_len` are the positions for --nominal-speedup without --seq-len. Raises UsageError if the options
    contradict each other, ScheduleError if the schedule does not fit the model.
    """
    if (named := named_schedule(options)) is not None:
        chosen = named
    elif options.nominal_speedup is not None:
        seq_len = default_seq_len if options.seq_len is None else options.seq_len
        schedule = Schedule.from_speedup(num_layers, options.nominal_speedup, seq_len)
        chosen = ScheduleChoice(schedule, f"the paper's, over {seq_len} positions")
    elif carried is not None:
        chosen = ScheduleChoice(carried, own or "the checkpoint's own")
    else:
        origin = "the checkpoint carries no schedule; name one with --schedule or --nominal-speedup"
        chosen = ScheduleChoice(Schedule.full(num_layers), origin)
    chosen.schedule.check_fits(num_layers)
    return adjusted_schedule(options, *chosen)


def adjusted_schedule(options: ScheduleOptions, schedule: Schedule, origin: str) -> ScheduleChoice:
    """The choice as --flat and --prompt-layers say; raises ScheduleError if the schedule cannot have the prompt set."""
    if options.flat and not schedule.is_flat:
        schedule = schedule.flattened()
    text = options.prompt_layers
    if text is None:
        return ScheduleChoice(schedule, origin)
    prompt = layer_order.prompt_set(text, schedule.num_layers)
    return ScheduleChoice(schedule.with_prompt(prompt), f"{origin}; prompts as --prompt-layers {text} says")


def read_cost(path: str) -> CostModel:
    """The cost model of a JSON file, one of its own or the output of skipdecode plan; raises DataError naming it."""
    values = read_json(Path(path))
    plan = values.get("cost") if isinstance(values, dict) else None
    try:
        return CostModel.from_dict(values if plan is None else plan)
    except DataError as e:
        raise DataError(f"{path}: {e}") from None


def stop_text(text: str) -> str:
    """`with_breaks` of a text that is not empty."""
    if not text:
        raise ValueError("a text that is not empty")
    return with_breaks(text)


def with_breaks(text: str) -> str:
    r"""`text` with \n and \t read as line end and tab, which are hard to type in a shell."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
