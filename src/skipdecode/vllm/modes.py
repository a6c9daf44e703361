"""Which of the two ways to skip costs less in a step, by the cost model.

*Nested* runs a layer on the rows that need it, and asks the backend for metadata of every different selection. *Where*
runs a layer on all rows as soon as one needs it, with the metadata that is there. Both give the same tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.machine import Machine, measure_machine
from skipdecode.vllm.settings import Mode, PluginSettings
from skipdecode.vllm.step_rows import NONE, StepRows

__all__ = ["ModeChoice"]

_BUILD_SECONDS = 6e-5
"""One cut and build of metadata in Python; `metadata_build_s` of results/vllm-exact-smollm2-135m.json."""


class ModeChoice:
    """Chooses for every step.

    Attributes
    ----------
    mode : {"auto", "nested", "where"}
        Anything but "auto" settles the matter; may be set between steps.
    builders : int
        Metadata builders that each selection of rows takes.
    """

    def __init__(self, settings: PluginSettings, vllm_config: Any, device: torch.device) -> None:
        self.mode: Mode = settings.mode
        self.builders = 1
        model = vllm_config.model_config
        self._shards = vllm_config.parallel_config.tensor_parallel_size
        self._geometry = ModelGeometry.from_config(model.hf_config, model.dtype.itemsize)
        self._machine = Machine(*(settings.machine or _measured(device, model.dtype)))

    def puts_back(self, step: StepRows) -> bool:
        """Whether a step runs layers on all rows and puts back those that sit them out."""
        if self.mode != "auto":
            return self.mode == "where"
        all_rows = self._layer_seconds(step.num_rows)
        more = sum(
            all_rows - self._layer_seconds(step.rows_of(i)) for i, kind in enumerate(step.layers) if kind != NONE
        )
        return more < len(step.parts) * self.builders * _BUILD_SECONDS

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - lives as long as the runner
    def _layer_seconds(self, rows: int) -> float:
        shards = self._shards
        return self._machine.seconds(
            self._geometry.layer_bytes(rows) / shards, rows * self._geometry.layer_flops() / shards
        )


def _measured(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bandwidth and operations a second of the first process's device: all processes must choose alike."""
    from vllm.distributed import get_world_group

    group = get_world_group()
    figures = None
    if group.rank_in_group == 0:
        machine = measure_machine(device, dtype)
        figures = (machine.bandwidth, machine.flops)
    return tuple(group.broadcast_object(figures, src=0)) if group.world_size > 1 else figures  # type: ignore[return-value]
