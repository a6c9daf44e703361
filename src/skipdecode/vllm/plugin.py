"""vLLM's entry point (`vllm.general_plugins`): from here on, vLLM asks us about every model config it meets.

vLLM lets each architecture bring a class that checks and changes the engine's config. `register` puts such a class in
front of every architecture's. For a model that carries a schedule it turns the plugin on, or refuses the engine in one
line; others it leaves alone. Requests are checked where they come in, in vLLM's front end: there a refusal is the
client's answer (HTTP 400).
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from packaging.version import Version

from skipdecode.errors import RefusedEngineError, SkipDecodeError, UnsupportedFeatureError
from skipdecode.vllm.gates import check_architecture, check_projects
from skipdecode.vllm.projection import checkpoint_fit
from skipdecode.vllm.settings import KEY, PluginSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.config import VerifyAndUpdateConfig
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

_OLDEST, _UP_TO = Version("0.27"), Version("0.33")
"""vLLM versions whose interfaces the plugin was written against: from the first up to before the second."""

_WORKER = "skipdecode.vllm.runner.SkipWorker"
_SCHEDULERS = {False: "skipdecode.vllm.scheduler.SkipScheduler", True: "skipdecode.vllm.scheduler.SkipAsyncScheduler"}
_set_by_us: dict[str, str] = {}


def register() -> None:
    """Called by vLLM in each of its processes, maybe several times."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for architecture in ModelRegistry.get_supported_archs():
        known = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        MODELS_CONFIG_MAP[architecture] = _looking_for_schedule(known)


@functools.cache
def _looking_for_schedule(base: type[VerifyAndUpdateConfig]) -> type[VerifyAndUpdateConfig]:
    if "looks_for_schedule" in base.__dict__:
        return base

    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        base.verify_and_update_config(vllm_config)
        _activate_or_refuse(vllm_config)

    body = {"verify_and_update_config": staticmethod(verify_and_update_config), "looks_for_schedule": True}
    return type(base.__name__, (base,), body)


def _activate_or_refuse(vllm_config: VllmConfig) -> None:
    """Change an engine's config so that layers are skipped; leaves it alone where there is no schedule.

    Raises RefusedEngineError if the schedule does not fit, or the engine is asked for something that would give wrong
    text.
    """
    _undo_environment()
    try:
        _activate(vllm_config)
    except SkipDecodeError as e:
        # vLLM's config classes turn a ValueError into pages; this one reaches the user as it is.
        raise RefusedEngineError(f"skipdecode: {e}") from None


def _activate(vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    settings = PluginSettings.of_engine(vllm_config, getattr(model.hf_config, KEY, None))
    if settings is None or not settings.skips:
        return
    import vllm

    if not _OLDEST <= Version(vllm.__version__) < _UP_TO:
        raise SkipDecodeError(
            f"vLLM {vllm.__version__} is not supported: install one from {_OLDEST} up to before {_UP_TO}"
        )
    check_architecture(model.architecture)
    layers = model.hf_text_config.num_hidden_layers
    settings.schedules[0].check_fits(layers)
    check_projects(settings.schedules, model.architecture, model.quantization)
    checkpoint_fit(model)  # refuses one that cannot be used
    if (refusal := _refusal(vllm_config)) is not None:
        raise SkipDecodeError(refusal)
    _change(vllm_config, settings)


def _refusal(config: VllmConfig) -> str | None:
    """The first thing that the engine is asked for and that cannot be right with skipped layers."""
    parallel, cache, scheduling = config.parallel_config, config.cache_config, config.scheduler_config
    speculation = config.speculative_config
    refused = {
        "a KV connector (--kv-transfer-config)": config.kv_transfer_config is not None,
        "KV offloading (--kv-offloading-size)": getattr(cache, "kv_offloading_size", None) is not None,
        "--kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "LoRA (--enable-lora; merge the adapter into the checkpoint)": config.lora_config is not None,
        "microbatches (--enable-dbo)": parallel.enable_dbo,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "a mixture of experts over several data-parallel ranks": parallel.data_parallel_size > 1
        and config.model_config.is_moe,
        "a pooling model": config.model_config.runner_type != "generate",
        "speculative decoding other than ngram": speculation is not None and speculation.method != "ngram",
        "speculative decoding of a model with recurrent layers": speculation is not None
        and config.model_config.is_hybrid,
        "asynchronous scheduling with speculative decoding": speculation is not None
        and bool(scheduling.async_scheduling),
        "a worker class of your own (--worker-cls)": parallel.worker_cls not in ("auto", _WORKER),
        "a scheduler class of your own (--scheduler-cls)": scheduling.scheduler_cls
        not in (None, *_SCHEDULERS.values()),
        "model runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)": os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1",
    }
    for feature, is_requested in refused.items():
        if is_requested:
            return f"{feature} does not work with skipped layers: start vLLM without it"
    return None


def _change(config: VllmConfig, settings: PluginSettings) -> None:
    from vllm.platforms import current_platform

    parallel, scheduling = config.parallel_config, config.scheduler_config
    config.additional_config = dict(config.additional_config or {}) | {KEY: settings.to_dict()}
    if hasattr(config.compilation_config, "fast_moe_cold_start"):
        config.compilation_config.fast_moe_cold_start = False  # It counts layers as they are called.
    if "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:  # else the user has set it; vLLM's processes read it
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = _set_by_us["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    parallel.worker_cls = _WORKER
    if config.model_config.is_hybrid:
        config.cache_config.enable_prefix_caching = False  # Recurrent states would be kept at the ends of blocks.
    if config.speculative_config is not None:
        scheduling.async_scheduling = False
    pipelined = parallel.pipeline_parallel_size > 1
    synchronous = scheduling.async_scheduling is False or current_platform.is_cpu() or pipelined
    if synchronous:
        scheduling.async_scheduling = False
    scheduling.scheduler_cls = _SCHEDULERS[not synchronous]
    _check_requests()


def _undo_environment() -> None:
    """The next engine of this process may be another model's."""
    for name, value in _set_by_us.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _set_by_us.clear()


def _check_requests() -> None:
    """Have vLLM's input processor check requests for engines that skip; may be called again."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    if hasattr(process, "checks_schedules"):
        return

    @functools.wraps(process)
    def checked(self: InputProcessor, *args: object, **kwargs: object) -> EngineCoreRequest:
        request = process(self, *args, **kwargs)
        if (settings := _settings_of(self)) is not None:
            try:
                _admit(request, settings)
            except SkipDecodeError as e:
                # The error that vLLM's server answers with HTTP 400.
                raise VLLMValidationError(str(e)) from e
        return request

    checked.checks_schedules = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = checked


def _settings_of(processor: InputProcessor) -> PluginSettings | None:
    if "skipdecode_settings" not in processor.__dict__:
        processor.skipdecode_settings = PluginSettings.of_engine(processor.vllm_config)
    settings: PluginSettings | None = processor.skipdecode_settings
    return settings


def _admit(request: EngineCoreRequest, settings: PluginSettings) -> None:
    """Refuse what cannot be right; keep prompts of different depth apart in the prefix cache.

    Raises ScheduleError: an unknown schedule; UnsupportedFeatureError: a request whose prompt goes on after its answer.
    """
    if getattr(request, "resumable", False):
        raise UnsupportedFeatureError(
            "streaming input does not work with skipped layers: send the whole text as a new prompt"
        )
    schedule = settings.schedules[settings.index_of(request)]
    depth, bridged = schedule.prompt_layers(), schedule.prompt == "max_exit"
    if len(depth) < schedule.num_layers:
        # Its blocks hold keys and values of the layers that prompts run, and of those that they project; whether its
        # tokens took bridges shows in all of them.
        prompt_key = f"skipdecode prompt layers {depth} {schedule.projected}{' bridged' if bridged else ''}"
        request.cache_salt = f"{request.cache_salt or ''}|{prompt_key}"
