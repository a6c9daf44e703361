"""What an engine has done since it was made. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass
class EngineStats:
    """Totals of an engine since it was made.

    Parameters
    ----------
    steps, prompt_tokens, new_tokens : int
        Decode steps, tokens of prompts run, tokens put out.
    prompt_seconds, decode_seconds, sampling_seconds : float
        Time in prompts' forwards, decode steps' forwards, and the choice of tokens. On a GPU a step's forward is only
        launched, and its time is in that of the choice, which waits for it.
    token_layers : int
        Sum over decoded (fed back) tokens of the layers run.
    layer_reads : int
        Sum over decode steps of the layers that ran at all: what was read from memory.
    kv_bytes_peak : int
        Most bytes of KV pages in use.
    """

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    sampling_seconds: float = 0.0
    token_layers: int = 0
    layer_reads: int = 0
    kv_bytes_peak: int = 0
