"""Options that say how a model is loaded, the same for every verb that takes them."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode.cli.options.option import option

__all__ = ["ModelOptions"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Base of a verb's `Config`."""

    dtype: str = option(
        "of the weights; auto is the checkpoint's own",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
    )
    device: str | None = option("torch device (default: the first GPU if there is one, else cpu)", default=None)
