"""vLLM's entry point (`vllm.general_plugins`): from here on, vLLM asks us about every model config it meets.

vLLM lets each architecture bring a class that checks and changes the engine's config. `register` puts such a class in
front of every architecture's; for a model without a schedule it does nothing more than look for one.
"""

from __future__ import annotations

import functools
from typing import Any


def register() -> None:
    """Called by vLLM in each of its processes, maybe several times."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for architecture in ModelRegistry.get_supported_archs():
        known: Any = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        MODELS_CONFIG_MAP[architecture] = _looking_for_schedule(known)


@functools.cache
def _looking_for_schedule(base: Any) -> Any:
    if "looks_for_schedule" in base.__dict__:
        return base

    def verify_and_update_config(vllm_config: Any) -> None:
        from skipdecode.vllm.activation import activate

        base.verify_and_update_config(vllm_config)
        activate(vllm_config)

    body = {"verify_and_update_config": staticmethod(verify_and_update_config), "looks_for_schedule": True}
    return type(base.__name__, (base,), body)
