"""Checks a request when it comes in, in vLLM's front end, where a refusal is the client's answer (HTTP 400)."""

from __future__ import annotations

import functools
from typing import Any

from skipdecode.errors import SkipDecodeError, UnsupportedFeatureError
from skipdecode.vllm.settings import PluginSettings


def check_requests() -> None:
    """Have vLLM's input processor check requests for engines that skip; may be called again."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    if hasattr(process, "checks_schedules"):
        return

    @functools.wraps(process)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        if (settings := _settings(self)) is not None:
            try:
                _admit(request, settings)
            except SkipDecodeError as e:
                # The error that vLLM's server answers with HTTP 400.
                raise VLLMValidationError(str(e)) from e
        return request

    checked.checks_schedules = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = checked


def _settings(processor: Any) -> PluginSettings | None:
    if "skipdecode_settings" not in processor.__dict__:
        processor.skipdecode_settings = PluginSettings.of_engine(processor.vllm_config)
    found: PluginSettings | None = processor.skipdecode_settings
    return found


def _admit(request: Any, settings: PluginSettings) -> None:
    """Refuse what cannot be right; keep prompts of different depth apart in the prefix cache.

    Raises
    ------
    ScheduleError
        An unknown schedule.
    UnsupportedFeatureError
        A request whose prompt goes on after its answer.
    """
    if getattr(request, "resumable", False):
        raise UnsupportedFeatureError(
            "streaming input does not work with skipped layers: send the whole text as a new prompt"
        )
    schedule = settings.schedules[settings.index_of(request)]
    depth = schedule.prompt_layers()
    if len(depth) < schedule.num_layers:
        request.cache_salt = f"{request.cache_salt or ''}|skipdecode prompt layers {depth}"
