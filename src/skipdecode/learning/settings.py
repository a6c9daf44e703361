"""The settings of a calibration and of its fit. Pure Python; the help texts are also the command line's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from skipdecode.common.files import RunDirectory
from skipdecode.common.journal import JOURNAL_KEY
from skipdecode.common.options import Options, option, setting
from skipdecode.data.examples import RecordOptions
from skipdecode.errors import UsageError
from skipdecode.evaluation.metrics import MetricOptions
from skipdecode.generation.self_generated import ABOUT_FILE, SelfGeneratedOptions
from skipdecode.learning.config import TuneConfig

STORE_FILE, PREPARE_JOURNAL, PROMPTS_FILE = "measured.jsonl", "prepare.jsonl", "prompts.jsonl"
CLOCK_FILE = "stage.json"
PREPARE_DIRECTORY = RunDirectory(
    "run of skipdecode prepare",
    {
        PREPARE_JOURNAL: JOURNAL_KEY,
        CLOCK_FILE: "stage",
        PROMPTS_FILE: "prompt",
        f"answers/{ABOUT_FILE}": "settings",
        f"fit/{STORE_FILE}": JOURNAL_KEY,
    },
)
OrderMethod = Literal["greedy", "block-influence"]


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings(Options):
    """How drop order, prompt layers and depth are learned; each field's help text is its documentation.

    Raises UsageError: names the value that is out of range, or there is not one target.
    """

    target_speedup: float | None = option(
        "wall-clock speed-up of whole requests, prompts included, on texts as long as the records",
        default=None,
        least=1,
    )
    prompt_depths: tuple[str, ...] = option(
        "prompt layers to try for `target_speedup`: full, numbers (the lowest n or n evenly spaced ones, whichever "
        "lose less), lists such as 0-14,20 (default: full, and 2/3, 1/2 and 1/3 of the layers)",
        default=(),
    )
    nominal_speedup: float | None = option(
        "run as many layers as the paper's schedule of this nominal speed-up would on these records",
        default=None,
        least=1,
    )
    flat: bool = option("the same depth at every position, for servers, in place of a linear decrease", default=False)
    method: OrderMethod = option(
        "of the drop order: greedy by the measured loss, or block-influence, which takes one pass", default="greedy"
    )
    candidates: int = option("greedy: layers tried in each round after the first", default=6, least=1)
    # By default half of what a flat schedule would run, and no more than the least of the paper's.
    least: int | None = option("layers at which the drop order stops (default: by the target)", default=None, least=1)
    warmup_layers: int = option("first layers that always run", default=1, least=0)
    seq_len: int | None = option(
        "positions over which the paper's depth falls (default: 95th percentile of the responses' lengths)",
        default=None,
        least=1,
    )
    records: int = option("records to learn from, a random sample by prompt", default=64, least=1)
    held_out: int = option("held-out records with other prompts, only for measurements; 0: none", default=64, least=0)
    batch_size: int = option("records in a forward pass", default=8, least=1)
    batch: int = option("sequences decoded together, for the wall-clock target", default=1, least=1)
    seed: int = option("seed of the sample of records", default=0)
    spread_prompts: bool = setting("try evenly spaced prompt layers too", default=True)
    baselines: bool = setting("measure full depth, the paper's schedule and evenly spaced layers too", default=True)

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
class PrepareOptions(FitOptions, SelfGeneratedOptions, RecordOptions, MetricOptions):
    """Options of `skipdecode.prepare`; each field's help text is its documentation."""

    EXCLUDES: ClassVar = RecordOptions.EXCLUDES | {"self": ("train", "dev", "base")}
    TARGET: ClassVar = 1.5
    RATE: ClassVar = 1e-3
    FULL_RATE: ClassVar = 1e-4

    target_speedup: float | None = option(
        f"wall-clock speed-up of whole requests, prompts included (default: {TARGET:g}; with --keep also less)",
        default=None,
        above=1,
    )
    keep: float | None = option(
        "share of full depth's scores to keep, such as 0.98: exact drafts and W8A8 weights are evaluated too, and the "
        "fastest way that keeps it is recommended",
        default=None,
        above=0,
        most=1,
    )
    minutes: float = option(
        "minutes of the whole command, from its start to its table; 0: no tuning, and no limit", default=10.0, least=0
    )
    test_records: int = option("most records or prompts to evaluate on", default=64, least=1)
    batch: int = option("sequences decoded together", default=16, least=1)
    method: OrderMethod = option(
        "drop order by block-influence (one pass) or greedy (the measured loss of about 60 layer sets)",
        default="block-influence",
    )
    order_records: int = setting("records on which drop orders and prompt layers are compared", default=8, least=1)
    prompt_depths: tuple[str, ...] = option(
        "prompt layers to try: full, numbers (the lowest n or n evenly spaced ones, whichever lose less), lists such "
        "as 0-14,20 (default: full, and 2/3, 1/2 and 1/3 of the layers)",
        default=(),
    )
    full: bool = option("tune all weights instead of a LoRA adapter", default=False)
    learning_rate: float | None = option(
        f"peak learning rate of tuning (default: {RATE:g}, with --full {FULL_RATE:g}); the fit has "
        f"{TuneConfig.fit_learning_rate:g}",
        default=None,
        above=0,
    )
    distill_weight: float | None = option(
        "weight of the KL to full depth in the loss of tuning; cross-entropy on the responses has the rest "
        "(default: 1 with --self, 0 without)",
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
