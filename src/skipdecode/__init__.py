"""Layer-skipping decoding for language models that keeps batching and KV caching intact (SkipDecode, arXiv 2307.02628).

>>> import skipdecode
>>> schedule = skipdecode.Schedule.from_speedup(num_layers=30, nominal_speedup=2, seq_len=64)
>>> with skipdecode.attach(model, schedule):          # doctest: +SKIP
...     model.generate(**inputs, max_new_tokens=64)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skipdecode.errors import SkipDecodeError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.models.attach import Attachment, attach, detach

__version__ = "0.1.0"
__all__ = ["Attachment", "Schedule", "SkipDecodeError", "__version__", "attach", "detach"]

_LAZY = ("Attachment", "attach", "detach")


def __getattr__(name: str) -> Any:
    # torch and transformers are imported on first use, so that the command line's --help stays quick.
    if name in _LAZY:
        from skipdecode.models import attach as module

        return getattr(module, name)
    raise AttributeError(f"module 'skipdecode' has no attribute {name!r}")
