"""Checks a request when it comes in, in vLLM's front end, where a refusal is the client's answer (HTTP 400)."""

from __future__ import annotations

import functools
from typing import Any

from skipdecode.errors import SkipDecodeError, UnsupportedFeatureError
from skipdecode.vllm.settings import KEY, Settings


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
        extra = self.vllm_config.additional_config
        if isinstance(extra, dict) and KEY in extra:
            try:
                _admit(request, _settings(self))
            except SkipDecodeError as e:
                # The error that vLLM's server answers with HTTP 400.
                raise VLLMValidationError(str(e)) from e
        return request

    checked.checks_schedules = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = checked


def _settings(processor: Any) -> Settings:
    if "skipdecode_settings" not in processor.__dict__:
        processor.skipdecode_settings = Settings.from_dict(processor.vllm_config.additional_config[KEY])
    found: Settings = processor.skipdecode_settings
    return found


def _admit(request: Any, settings: Settings) -> None:
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
    extra = (request.sampling_params and request.sampling_params.extra_args) or {}
    schedule = settings.schedules[settings.index(extra.get(KEY))]
    depth = schedule.prompt_layers()
    if len(depth) < schedule.num_layers:
        request.cache_salt = f"{request.cache_salt or ''}|skipdecode prompt layers {depth}"
