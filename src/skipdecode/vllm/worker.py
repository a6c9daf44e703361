"""vLLM's workers, with a model runner that skips layers. vLLM makes them by the names that `activate` gives it."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from skipdecode.vllm.runner import adopt
from skipdecode.vllm.settings import KEY, Settings

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class SkipWorker(Worker):  # type: ignore[misc]
    """The worker of this platform."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        super().init_device(*args, **kwargs)
        settings = Settings.from_dict(self.vllm_config.additional_config[KEY])
        adopt(self.model_runner, settings, self.vllm_config)
