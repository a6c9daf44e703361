"""What a tuning run is told. Plain data; the help texts are also the command line's and say what each value does.

`cli/tune.py` extends this class with file names, so an option has one home. Checked when it is made: a wrong value is a
`UsageError` that names the field and what is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from skipdecode.errors import UsageError

__all__ = ["DEFAULT_LORA_RANK", "TuneConfig"]

DEFAULT_LORA_RANK = 16


def _field(help: str, default: Any, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "parse": str if choices else None})


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Options of a tuning run; each field's help text is its documentation.

    Raises
    ------
    UsageError
        If a value is out of range or two options exclude each other.
    """

    steps: int = _field("optimizer steps of the whole run", 200)
    batch_size: int = _field("records in one forward pass, on each process", 16)
    accumulation: int = _field("forward passes whose gradients make one optimizer step", 1)
    learning_rate: float = _field("peak learning rate of AdamW, reached after the warm-up", 3e-4)
    warmup_fraction: float = _field(
        "part of the run over which the learning rate rises; then it falls as a cosine", 0.05
    )
    weight_decay: float = _field("weight decay of matrices; vectors (norms, biases) have none", 0.01)
    clip: float = _field("largest norm of the gradient; 0 does not clip", 1.0)
    seed: int = _field("seed of batches, adapters, dropout and sampled budgets", 0)

    full: bool = _field("tune all weights instead of a LoRA adapter", False)
    lora_rank: int | None = _field(f"rank of the LoRA adapter (default: {DEFAULT_LORA_RANK}; not with --full)", None)
    lora_alpha: float | None = _field("LoRA scale: updates are multiplied by alpha / rank (default: 2 x rank)", None)
    lora_dropout: float = _field("dropout in front of the LoRA adapter", 0.0)
    lora_targets: tuple[str, ...] = _field(
        "names of the modules that get an adapter; all-linear takes every linear layer but the head", ("all-linear",)
    )
    adapter_dtype: Literal["float32", "float16"] = _field(
        "numbers of the saved adapter; float16 halves the file and keeps more digits than bfloat16",
        "float32",
        ("float32", "float16"),
    )
    merge: bool = _field("save the model with the adapter merged in, instead of the adapter alone", False)

    distill_weight: float = _field(
        "weight w of self-distillation: loss = (1 - w) * cross-entropy + w * KL to the same model at full depth", 0.0
    )
    temperature: float = _field("temperature of both distributions in the distillation term", 1.0)
    teacher: Literal["initial", "current"] = _field(
        "who teaches at full depth: the weights before tuning (with LoRA: adapter off; with --full: a frozen copy) "
        "or the weights of the moment",
        "initial",
        ("initial", "current"),
    )

    curriculum: Literal["none", "lower", "sampled", "random"] = _field(
        "none: the schedule from the first step; lower: from full depth down to it; sampled: each step one of the "
        "schedules of --sampled-speedups, so that one checkpoint serves all of them; random: each step other layers "
        "left out, down to the schedule's last depth, for weights on which calibrate can compare orders",
        "none",
        ("none", "lower", "sampled", "random"),
    )
    curriculum_fraction: float = _field("lower: the part of the run after which the schedule is reached", 0.5)
    sampled_speedups: tuple[float, ...] = _field(
        "sampled: nominal speed-ups next to the schedule's own, with its drop order and positions", (1.0, 2.0, 3.0)
    )

    precision: Literal["auto", "fp32", "bf16"] = _field(
        "arithmetic of the forward pass; auto takes bf16 only where the device computes it in hardware",
        "auto",
        ("auto", "fp32", "bf16"),
    )
    gradient_checkpointing: bool = _field("compute activations twice to store fewer of them", False)
    eval_every: int = _field("steps between two evaluations on the dev records", 50)
    checkpoint_every: int = _field("steps between two checkpoints from which --resume goes on", 50)
    tensorboard: bool = _field("write TensorBoard events to OUT/tensorboard too", False)
    compare_batches: int = _field(
        "batches on which training speed is measured at the end, under the schedule and at full depth in turn; 0: none",
        3,
    )

    def __post_init__(self) -> None:
        for option in fields(TuneConfig):
            _check_kind(option, getattr(self, option.name))
        for name in ("steps", "batch_size", "accumulation", "eval_every", "checkpoint_every"):
            _check(name, getattr(self, name), lambda v: isinstance(v, int) and v >= 1, "a whole number of 1 or more")
        for name in ("compare_batches", "seed"):
            _check(name, getattr(self, name), lambda v: isinstance(v, int) and v >= 0, "a whole number of 0 or more")
        if self.lora_rank is not None:
            _check("lora_rank", self.lora_rank, lambda v: isinstance(v, int) and v >= 1, "a whole number of 1 or more")
        for name in ("learning_rate", "temperature"):
            _check(name, getattr(self, name), lambda v: v > 0, "a finite number above 0")
        if self.lora_alpha is not None:
            _check("lora_alpha", self.lora_alpha, lambda v: v > 0, "a finite number above 0")
        for name in ("weight_decay", "clip"):
            _check(name, getattr(self, name), lambda v: v >= 0, "a finite number of 0 or more")
        for name in ("warmup_fraction", "curriculum_fraction", "distill_weight"):
            _check(name, getattr(self, name), lambda v: 0 <= v <= 1, "a number from 0 to 1")
        _check("lora_dropout", self.lora_dropout, lambda v: 0 <= v < 1, "a number in [0, 1)")
        for value in self.sampled_speedups:
            _check("sampled_speedups", value, lambda v: v >= 1, "finite numbers of 1 or more")
        if self.full and (self.lora_rank is not None or self.merge):
            raise UsageError("--full tunes all weights: it takes no --lora-rank and no --merge")

    @property
    def rank(self) -> int:
        """LoRA rank, 0 when all weights are tuned."""
        return 0 if self.full else (self.lora_rank or DEFAULT_LORA_RANK)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of optimizer step `step` (0-based): linear warm-up, then a cosine to zero."""
        warmup = round(self.steps * self.warmup_fraction)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _check_kind(option: Field[Any], value: Any) -> None:
    """Choices and switches: a command line's are checked when it is read, a recipe's or a caller's are not."""
    choices = option.metadata["choices"]
    if choices is not None and value not in choices:
        raise UsageError(f"{_flag(option.name)} {value!r} is not accepted: give one of {', '.join(choices)}")
    if isinstance(option.default, bool) and not isinstance(value, bool):
        raise UsageError(f"{_flag(option.name)} {value!r} is not accepted: give true or false")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check(name: str, value: Any, good: Callable[[Any], bool], accepted: str) -> None:
    # The type is checked too: values may come from a recipe file.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not good(value):
        raise UsageError(f"{_flag(name)} {value} is not accepted: give {accepted}")
