"""What generates a batch: token ids in, token ids out. Knows nothing of text, files or prompts' origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from skipdecode.errors import UsageError

__all__ = ["ENGINES", "WEIGHTS", "Backend", "BatchResult", "FinishReason", "GenerationSettings", "StopCheck"]

FinishReason = Literal["eos", "length", "stop"]
ENGINES = ("auto", "fast", "transformers")
WEIGHTS = ("model", "int8", "int4")
StopCheck = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class GenerationSettings:
    """How tokens are chosen, and how many.

    Parameters
    ----------
    max_new_tokens : int
        Most new tokens of a row, 1 or more.
    temperature : float
        0: the likeliest token (greedy). Above: sampling.
    top_k : int
        Sample from the k likeliest tokens only; 0: from all.
    top_p : float
        Sample from the likeliest tokens that together have this probability, in (0, 1].
    seed : int
        Of the sampling. A row's draws depend on this and on the row's key only, not on its batch.
    ignore_eos : bool
        Go on after an end token, to `max_new_tokens` (for measurements).

    Raises
    ------
    UsageError
        A value is out of range.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, value, fine, accepted in (
            ("max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top-k", self.top_k, self.top_k >= 0, "1 or more, or 0 for all"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "a number above 0, up to 1"),
        ):
            if not fine:
                raise UsageError(f"--{name} {value} is not accepted: give {accepted}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise UsageError("--top-k and --top-p act on sampling only: give --temperature too, such as 0.7")


@dataclass(frozen=True)
class BatchResult:
    """What a batch gave and what it cost.

    Parameters
    ----------
    tokens : list of list of int
        New tokens of each row, its end token included.
    finish_reasons : list of {"eos", "length", "stop"}
    steps : int
        Decode steps after the prompt; each fed one token of every row.
    step_layers : int
        Layers that ran, summed over those steps.
    prefill_s, decode_s : float
        Seconds for the prompts up to the first token, and for the steps.
    kv_bytes, kv_bytes_full : int
        Most bytes of keys and values held at a time, and what full depth would hold.
    """

    tokens: list[list[int]]
    finish_reasons: list[FinishReason]
    steps: int
    step_layers: int
    prefill_s: float
    decode_s: float
    kv_bytes: int
    kv_bytes_full: int


class Backend(Protocol):
    """Generates batches with one model, under one schedule or at full depth.

    Attributes
    ----------
    num_layers : int
        Decoder layers of the model.
    end_tokens : tuple of int
        A row ends after any of them.
    """

    num_layers: int
    end_tokens: tuple[int, ...]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        row_keys: Sequence[int],
        should_stop: StopCheck | None = None,
    ) -> BatchResult:
        """New tokens for each prompt.

        Parameters
        ----------
        prompts : sequence of sequence of int
            Token ids, not padded, none empty.
        settings : GenerationSettings
        row_keys : sequence of int
            One for each row; with the seed they fix its sampling.
        should_stop : callable, optional
            Asked with a row's new tokens after each step; True ends the row with reason "stop".
        """
        ...
