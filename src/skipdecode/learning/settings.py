"""The settings of calibration, its fit, tuning and preparation, and the schedules of tuning's steps. Pure Python.

The help texts are also the command line's.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from skipdecode.common.files import RunDirectory
from skipdecode.common.options import Options, option, setting
from skipdecode.data.examples import RecordOptions
from skipdecode.engine.requests import BATCH
from skipdecode.errors import UsageError
from skipdecode.evaluation.metrics import EncoderOptions
from skipdecode.generation.self_generated import ABOUT_FILE, SelfGeneratedOptions
from skipdecode.models.recipe import sampled_schedules
from skipdecode.schedule import Schedule

STORE_FILE, PREPARE_LOG, PROMPTS_FILE = "measured.sqlite", "prepare.sqlite", "prompts.jsonl"
CLOCK_FILE = "stage.json"
PREPARE_DIRECTORY = RunDirectory(
    "run of skipdecode prepare",
    {
        PREPARE_LOG: "",
        CLOCK_FILE: "stage",
        PROMPTS_FILE: "prompt",
        f"answers/{ABOUT_FILE}": "settings",
        f"fit/{STORE_FILE}": "",
    },
)
DEFAULT_LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Options):
    """Options of a tuning run; each field's help text is its documentation.

    Raises UsageError if a value is out of range or two options exclude each other.
    """

    steps: int = option("optimizer steps of the whole run", default=200, least=1)
    minutes: float | None = option(
        "train for so many minutes, evaluations included, in place of --steps; the learning rate falls with the clock",
        default=None,
        above=0,
    )
    batch_size: int = option("records in one forward pass, on each process", default=16, least=1)
    accumulation: int = setting("forward passes whose gradients make one optimizer step", default=1, least=1)
    learning_rate: float = option("peak learning rate of AdamW, reached after the warm-up", default=3e-4, above=0)
    warmup_fraction: float = setting(
        "part of the run over which the learning rate rises; then it falls as a cosine", default=0.05, least=0, most=1
    )
    weight_decay: float = setting("weight decay of matrices; vectors (norms, biases) have none", default=0.01, least=0)
    clip: float = setting("largest norm of the gradient; 0 does not clip", default=1.0, least=0)
    seed: int = option("seed of batches, adapters, dropout and sampled budgets", default=0, least=0)

    full: bool = option("tune all weights instead of a LoRA adapter", default=False)
    lora_rank: int | None = option(
        f"rank of the LoRA adapter (default: {DEFAULT_LORA_RANK}; not with --full)", default=None, least=1
    )
    lora_alpha: float | None = setting(
        "LoRA scale: updates are multiplied by alpha / rank (default: 2 x rank)", default=None, above=0
    )
    lora_dropout: float = setting("dropout in front of the LoRA adapter", default=0.0, least=0, below=1)
    lora_targets: tuple[str, ...] = option(
        "names of the modules that get an adapter; all-linear takes every linear layer but the head",
        default=("all-linear",),
    )
    adapter_dtype: Literal["float32", "float16"] = option(
        "numbers of the saved adapter; float16 halves the file and keeps more digits than bfloat16", default="float32"
    )
    train_fit: bool = setting("train the fit of the schedule or checkpoint too, if there is one", default=True)
    fit_learning_rate: float = setting(
        "peak learning rate of the fit, whose maps a rate for adapters destroys in a few steps", default=5e-5, above=0
    )
    merge: bool = option("save the model with the adapter merged in, instead of the adapter alone", default=False)

    distill_weight: float = option(
        "weight w of self-distillation: loss = (1 - w) * cross-entropy + w * KL to the model before tuning at full "
        "depth",
        default=0.0,
        least=0,
        most=1,
    )
    teacher_top_k: int = setting(
        "top-k tokens of full depth that are kept for each position, so that full depth runs once for each record; 0: "
        "all tokens, computed at each step",
        default=64,
        least=0,
    )
    distributions: str | None = setting(
        "full depth's distributions over texts, a file of `prepare`: it does not run for these texts", default=None
    )

    sampled_speedups: tuple[float, ...] = option(
        "each step runs the schedule or one of these nominal speed-ups, drawn at random, with its drop order and "
        "positions, so that one checkpoint serves all of them; one that is given twice is drawn twice as often",
        default=(),
        least=1,
    )
    sampled_prompts: tuple[str, ...] = option(
        "draw also the schedule and each speed-up above 1 with these prompt layers (as :p15 names them)", default=()
    )

    precision: Literal["auto", "fp32", "bf16"] = option(
        "arithmetic of the forward pass; auto takes bf16 only where the device computes it in hardware", default="auto"
    )
    gradient_checkpointing: bool = setting("compute activations twice to store fewer of them", default=False)
    early_stop: float | None = setting(
        "end the run at an evaluation whose dev loss is not lower than the one before by this share; the first "
        "evaluation is after 8 steps (default: never)",
        default=None,
        above=0,
        below=1,
    )
    eval_every: int = option("steps between two evaluations on the dev records", default=50, least=1)
    checkpoint_every: int = option("steps between two checkpoints", default=50, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full and (self.lora_rank is not None or self.merge):
            raise UsageError("`full` tunes all weights: it takes no `lora_rank` and no `merge`")

    @property
    def rank(self) -> int:
        """LoRA rank, 0 when all weights are tuned."""
        return 0 if self.full else (self.lora_rank or DEFAULT_LORA_RANK)

    def learning_rate_at(self, step: int, steps: int | None = None) -> float:
        """Learning rate of optimizer step `step` (0-based) of `steps`: linear warm-up, then a cosine to zero."""
        steps = self.steps if steps is None else steps
        warmup = round(steps * self.warmup_fraction)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    def curriculum(self, target: Schedule) -> Curriculum:
        """The schedules of a run for a target; raises ScheduleError if its order does not allow one."""
        return Curriculum(target, sampled_schedules(target, self.sampled_speedups, self.sampled_prompts), self.seed)


@dataclass(frozen=True)
class Curriculum:
    """Each step the target or one of the others, drawn from (`seed`, step); twice as often where it is there twice."""

    target: Schedule
    others: tuple[Schedule, ...]
    seed: int

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """Schedules that the tuned model is for, the target first; the dev loss is their mean."""
        return tuple(dict.fromkeys((self.target, *self.others)))

    def schedule_at(self, step: int) -> Schedule:
        """The schedule of optimizer step `step` (0-based): a function of the step, so a resumed run repeats it."""
        # A generator of its own per step: no state to save, and no other draw shifts it.
        return random.Random(f"{self.seed}/{step}").choice((self.target, *self.others))


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TuneConfig, SelfGeneratedOptions, RecordOptions):
    """All settings of `skipdecode.tune` that a recipe has: of the run, and of its records."""

    EXCLUDES: ClassVar = RecordOptions.EXCLUDES | {"self": ("train", "dev", "response_field")}
    OF_OWN_ANSWERS: ClassVar[dict[str, Any]] = {"distill_weight": 1.0, "sampled_speedups": (1.0, 1.25)}
    """Other defaults with `self`: answers only teach full depth, and milder schedules lose very little there."""

    dev_records: int | None = option(
        "most records of --dev, from all over it; with --self, most records to hold out",
        default=256,
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings(Options):
    """How prompt layers and depth are learned; each field's help text is its documentation.

    Raises UsageError: names the value that is out of range, or there is not one target.
    """

    target_speedup: float | None = option(
        "wall-clock speed-up of whole requests, prompts included, on texts as long as the records",
        default=None,
        least=1,
    )
    prompt_depths: tuple[str, ...] = option(
        "prompt layers to try for `target_speedup`: full, max_exit (those of the first new token), numbers (the lowest "
        "n), lists such as 0-14,20 (default: the two that promise least loss, and max_exit)",
        default=(),
    )
    nominal_speedup: float | None = option(
        "run as many layers as the paper's schedule of this nominal speed-up would on these records",
        default=None,
        least=1,
    )
    flat: bool = option("the same depth at every position, for servers, in place of a linear decrease", default=False)
    warmup_layers: int = option("first layers that always run", default=1, least=0)
    records: int = option("records to learn from, a random sample by prompt", default=64, least=1)
    batch_size: int = option("records in a forward pass", default=8, least=1)
    batch: int = option("sequences decoded together, for the wall-clock target", default=1, least=1)
    seed: int = option("seed of the sample of records", default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.target_speedup is None) == (self.nominal_speedup is None):
            raise UsageError("give one target: `target_speedup` (wall-clock) or `nominal_speedup` (layers)")
        if self.prompt_depths and not self.whole:
            raise UsageError("`prompt_depths` belongs to `target_speedup`: else prompts are full")

    @property
    def whole(self) -> bool:
        """Whether the target is for whole requests, prompts included."""
        return self.target_speedup is not None


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """Settings of a fit; each field's help text is its documentation."""

    fit: bool = option(
        "replace skipped layers, and the keys and values that prompts do not compute, by linear maps", default=True
    )
    fit_rank: int = option("rank of the maps over skipped layers; 0: a bias alone", default=128, least=0)
    fit_taps: int = option(
        "earlier tokens that a map of a prompt's keys and values sees, each of which costs one more projection a layer",
        default=1,
        least=0,
        most=2,
    )
    fit_records: int = setting("most records for the fit", default=256, least=8)
    fit_depths: int = setting("most depths of a falling schedule for which its maps are fitted", default=4, least=1)
    fit_tokens: int = setting(
        "tokens of prompts and responses after which no more records are taken for the fit, unless its maps need more",
        default=24_000,
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(CalibrationSettings, FitOptions, RecordOptions):
    """Options of `skipdecode.calibrate`; each field's help text is its documentation."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(FitOptions, SelfGeneratedOptions, RecordOptions, EncoderOptions):
    """Options of `skipdecode.prepare`; each field's help text is its documentation."""

    EXCLUDES: ClassVar = RecordOptions.EXCLUDES | {"self": ("train", "dev", "base")}
    TARGET: ClassVar = 1.5
    RATE: ClassVar = 1e-3
    FULL_RATE: ClassVar = 1e-4
    OF_WIDTH: ClassVar = 576  # hidden_size for which these rates were measured

    target_speedup: float | None = option(
        f"wall-clock speed-up of whole requests, prompts included (default: {TARGET:g}; with --keep also less)",
        default=None,
        above=1,
    )
    keep: float | None = option(
        "share of full depth's scores to keep, such as 0.98: the fastest schedule or weights that keep it are "
        "recommended, for batches and for one request at a time",
        default=None,
        above=0,
        most=1,
    )
    quantization: Literal["none", "w8a8"] = option(
        "weights with which target_speedup is to be reached: with w8a8, 8-bit weights and activations, whose gain "
        "counts too, fewer layers are skipped",
        default="none",
    )
    minutes: float = option(
        "minutes of the whole command, from its start to its table; 0: no tuning, and no limit", default=10.0, least=0
    )
    test_records: int = option("most records or prompts to evaluate on, from all over the file", default=64, least=1)
    batch: int = option("sequences decoded together", default=BATCH, least=1)
    order_records: int = setting("records on which drop orders and prompt layers are compared", default=8, least=1)
    prompt_depths: tuple[str, ...] = option(
        "prompt layers to try: full, max_exit (those of the first new token), numbers (the lowest n), lists such as "
        "0-14,20 (default: the two that promise least loss, and max_exit)",
        default=(),
    )
    full: bool = option("tune all weights instead of a LoRA adapter", default=False)
    learning_rate: float | None = option(
        f"peak learning rate of tuning (default: {RATE:g}, with --full {FULL_RATE:g}, less for models wider than "
        f"{OF_WIDTH}); the fit has {TuneConfig.fit_learning_rate:g}",
        default=None,
        above=0,
    )
    distill_weight: float | None = option(
        "weight of the KL to full depth in the loss of tuning; cross-entropy on the responses has the rest "
        "(default: 1 on the model's own answers, 0 on given responses)",
        default=None,
        least=0,
        most=1,
    )
    sampled_speedups: tuple[float, ...] = option(
        "nominal speed-ups that are tuned too, in half of the steps, so that one checkpoint serves them beside the "
        "target; 1: full depth (default: none)",
        default=(),
        least=1,
    )
    seed: int = option("seed of all random choices", default=0, least=0)
    self_temperature: float = option("with --self: temperature of answers; 0 is greedy", default=0.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization != "none" and not self.minutes:
            raise UsageError("`quantization` counts by a measurement, which takes `minutes`: give some")

    def rate(self, width: int) -> float:
        """Peak learning rate for a hidden_size: 1e-3 at 576 and 3e-4 at 896 were best (LoRA), a tenth at the least."""
        full = self.FULL_RATE if self.full else self.RATE
        return self.learning_rate or full * min(1.0, max(0.1, (self.OF_WIDTH / width) ** 2.7))


@dataclass(frozen=True)
class SearchSize:
    """Options of `calibrate` by which a search takes longer or shorter."""

    records: int
    fit_depths: int
    fit_tokens: int = 0


@dataclass(frozen=True)
class EvaluationSize:
    """How much an evaluation measures at most; `tokens` is the share of an own text's tokens that is generated."""

    records: int
    neighbours: bool
    speed_batches: int
    speed_rounds: int
    tokens: float = 1.0


WHOLE = EvaluationSize(records=64, neighbours=True, speed_batches=4, speed_rounds=3)
SHORT = EvaluationSize(records=48, neighbours=False, speed_batches=1, speed_rounds=2, tokens=0.25)
