"""The options that name the engine, the same for every verb that generates text."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode.cli.options.option import option
from skipdecode.engine.base import ENGINES, WEIGHTS

__all__ = ["EngineOptions"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Base of a verb's `Config`."""

    engine: str = option(
        "what runs the model; fast: the package's own engine (CPUs, CUDA GPUs; Llama, Mistral, OPT, Qwen2, Qwen3); "
        "auto: fast where it covers the model, else transformers",
        default="auto",
        choices=ENGINES,
    )
    weights: str = option(
        "type of the weights as the fast engine reads them; int8, int4: quantised after loading, less exact and faster "
        "(CPUs only)",
        default="model",
        choices=WEIGHTS,
    )
