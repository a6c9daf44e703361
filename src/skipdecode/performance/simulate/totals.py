"""What the simulator counts, over all workers. Memory does not grow with the requests. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipdecode.performance.simulate.histogram import LogHistogram

__all__ = ["Totals"]


@dataclass
class Totals:
    """What happened, summed over workers.

    Parameters
    ----------
    finished, new_tokens, prompt_tokens, steps : int
        Requests finished, tokens put out, tokens of prompts run, decode steps.
    row_steps, token_layers, layer_reads : int
        Tokens fed back; layers run on them; layers that decode steps ran for any row.
    prompt_seconds, decode_seconds, last_end : float
        Busy time of each kind, and the end of the last request.
    row_seconds : float
        Sum over requests of the time that they held a row.
    first_token, between_tokens, whole : LogHistogram
        Seconds from arrival to the first token, between tokens of a request, from arrival to the last token.
    """

    finished: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    token_layers: int = 0
    layer_reads: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    last_end: float = 0.0
    row_seconds: float = 0.0
    first_token: LogHistogram = field(default_factory=LogHistogram)
    between_tokens: LogHistogram = field(default_factory=LogHistogram)
    whole: LogHistogram = field(default_factory=LogHistogram)
