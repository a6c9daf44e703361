"""What a calibration is asked for. Pure Python; the help texts are also the command line's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skipdecode.common.options import Options, option
from skipdecode.cost.model import Phase, Use
from skipdecode.errors import UsageError

OrderMethod = Literal["greedy", "block-influence"]


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings(Options):
    """How a calibration is done; each field's help text is its documentation.

    Raises
    ------
    UsageError
        Names the value that is out of range, or there is not one target.
    """

    target_speedup: float | None = option(
        "wall-clock speed-up over full depth, on texts as long as the records; of what, --phase says",
        default=None,
        least=1,
    )
    phase: Phase = option(
        "request: prompts and all that follows, where prompts may run fewer layers too; decode: the steps after the "
        "prompt, which runs at full depth",
        default="request",
    )
    prompt_depths: tuple[str, ...] = option(
        "prompt layers to try for a request's target: full, numbers (the lowest n or n evenly spaced ones, whichever "
        "lose less), lists such as 0-14,20 (default: full, and 2/3, 1/2 and 1/3 of the layers)",
        default=(),
    )
    nominal_speedup: float | None = option(
        "run as many layers as the paper's schedule of this nominal speed-up would on these records",
        default=None,
        least=1,
    )
    use: Use = option(
        "lockstep: all sequences of a batch start together, so the depth falls linearly; continuous: sequences of "
        "mixed ages, so it is flat",
        default="lockstep",
    )
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
    batch_size: int = option("records in a forward pass", default=8, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.target_speedup is None) == (self.nominal_speedup is None):
            raise UsageError("give one target: --target-speedup (wall-clock) or --nominal-speedup (layers)")
        if self.phase == "decode" and self.target_speedup is None:
            raise UsageError("--phase says what --target-speedup is of: give both, or neither")
        if self.prompt_depths and not self.whole:
            raise UsageError(
                "--prompt-depths belongs to --target-speedup of whole requests: else prompts run all layers"
            )

    @property
    def whole(self) -> bool:
        """Whether the target is that of whole requests, prompts included."""
        return self.target_speedup is not None and self.phase == "request"


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """What a fit is made of; each field's help text is its documentation."""

    fit_rank: int = option("rank of the bridges over skipped layers; 0 leaves a bias alone", default=128, least=0)
    fit_taps: int = option(
        "tokens before its own that a map of a prompt's keys and values sees; 1 loses less than 0, and takes two "
        "projections a layer",
        default=1,
        least=0,
        most=2,
    )
    fit_records: int = option("most records for the fit: those to learn from, then others", default=256, least=8)
    fit_tokens: int = option(
        "tokens of prompts and responses after which no more records are taken for the fit, unless bridges need more",
        default=24_000,
        least=1,
    )
