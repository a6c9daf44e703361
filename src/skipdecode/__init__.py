"""Layer-skipping decoding for language models that keeps batching and KV caching intact (SkipDecode, arXiv 2307.02628).

>>> import skipdecode
>>> llm = skipdecode.LLM("e2e-smollm2-135m")                                      # doctest: +SKIP
>>> llm.generate({"mr": "name[The Eagle], food[French]"})[0].text                 # doctest: +SKIP
>>> schedule = skipdecode.Schedule.from_speedup(num_layers=30, nominal_speedup=2, seq_len=64)
>>> with skipdecode.attach(model, schedule):                                      # doctest: +SKIP
...     model.generate(**inputs, max_new_tokens=64)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skipdecode.errors import SkipDecodeError
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.cost.plan import plan
    from skipdecode.engine.opening import load
    from skipdecode.evaluation.evaluate import evaluate
    from skipdecode.generation.llm import LLM, generate
    from skipdecode.learning.calibrate import calibrate
    from skipdecode.learning.prepare import prepare
    from skipdecode.learning.tune import tune
    from skipdecode.models.attach import Attachment, attach, detach
    from skipdecode.models.loading.card import push_to_hub
    from skipdecode.models.loading.export import export

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Attachment",
    "Schedule",
    "SkipDecodeError",
    "__version__",
    "attach",
    "calibrate",
    "detach",
    "evaluate",
    "export",
    "generate",
    "load",
    "plan",
    "prepare",
    "push_to_hub",
    "tune",
]

_MODULES = {
    **dict.fromkeys(("Attachment", "attach", "detach"), "models.attach"),
    **dict.fromkeys(("LLM", "generate"), "generation.llm"),
    "calibrate": "learning.calibrate",
    "evaluate": "evaluation.evaluate",
    "export": "models.loading.export",
    "load": "engine.opening",
    "plan": "cost.plan",
    "prepare": "learning.prepare",
    "push_to_hub": "models.loading.card",
    "tune": "learning.tune",
}


def __getattr__(name: str) -> Any:
    # torch and transformers are imported on first use, so that the command line's --help stays quick.
    if name in _MODULES:
        return getattr(importlib.import_module(f"skipdecode.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'skipdecode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
