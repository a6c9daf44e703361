"""A short calibration on the machine at hand: what a decode step of a model costs, by the number of layers that run.

Times real `generate` steps of a transformers causal LM under constant schedules, depth after depth in turn, so that a
change of the machine's speed meets all of them. The prompt's keys and values are made up, not computed: only how many
there are matters to the time. Results are kept per model, dtype, batch, machine and versions in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from skipdecode.bench.machine import synchronize
from skipdecode.cost import CostModel
from skipdecode.environment import cpu_model, usable_cores
from skipdecode.errors import DataError, OutputError, UsageError
from skipdecode.files import write_whole
from skipdecode.geometry import ModelGeometry
from skipdecode.models.attach import Attachment, attach
from skipdecode.models.cache import SkipCache
from skipdecode.models.families import unwrap
from skipdecode.models.plan import PROMPT
from skipdecode.paths import cache_dir
from skipdecode.schedule import Schedule

__all__ = ["cost_key", "measure_cost"]

_ENGINE = "transformers"
_LONGER = 512
_VOLATILE = ("_name_or_path", "transformers_version", "skipdecode")


def measure_cost(
    model: Any,
    *,
    batch: int = 1,
    prompt_len: int = 64,
    repeats: int = 3,
    steps: int = 8,
    reuse: bool = True,
    progress: bool = False,
) -> CostModel:
    """The cost model of a transformers causal LM's decode step on this machine.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        A causal LM of a supported family, on its device, in its dtype; nothing attached.
    batch : int
        Rows of a step.
    prompt_len : int
        Cached tokens of a row when a run begins.
    repeats, steps : int
        Runs of each depth, and timed steps of a run. The median over all of them counts.
    reuse : bool
        Return the figures of an earlier calibration of the same model, batch, machine and versions, if there are any.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    CostModel
        With `residual`, the largest relative distance between the fit and a measured depth.

    Raises
    ------
    UsageError
        A number is out of range, the text does not fit the model's context, or the figures make no sense.
    UnsupportedModelError, AlreadyAttachedError
        The model cannot be gated.
    """
    for name, value in {"batch": batch, "prompt_len": prompt_len, "repeats": repeats, "steps": steps}.items():
        if value < 1:
            raise UsageError(f"{name}={value} is not accepted: give 1 or more")
    inner = unwrap(model)
    key = cost_key(inner, batch)
    path = cache_dir() / "costs" / f"{_digest(key)}.json"
    if reuse and (kept := _read(path, key)) is not None:
        return kept
    cost = _measured(inner, batch, prompt_len, repeats, steps, progress)
    with contextlib.suppress(OutputError):  # A cache that cannot be written costs the next run a calibration, no more.
        write_whole(path, json.dumps({"key": key, "cost": cost.to_dict()}, indent=1))
    return cost


def cost_key(model: Any, batch: int) -> dict[str, Any]:
    """All that a calibration holds for: the model's sizes and kernels, dtype, batch, machine, threads and versions."""
    config = model.config
    settings = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE}
    return {
        "model": hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest(),
        "attention": str(config._attn_implementation),
        "dtype": str(model.dtype),
        "batch": batch,
        "engine": _ENGINE,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _read(path: Path, key: dict[str, Any]) -> CostModel | None:
    """The cost model kept at `path`, if there is one for this key that can be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return CostModel.from_dict(data["cost"]) if data["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None


# ---------------------------------------------------------------------- measuring


def _measured(model: Any, batch: int, prompt_len: int, repeats: int, steps: int, progress: bool) -> CostModel:
    geometry = ModelGeometry.from_config(model.config)
    depths = _depths(geometry.num_layers)
    longer = prompt_len + min(_LONGER, _room(model, prompt_len + steps + 2))
    runs = [(depth, prompt_len) for depth in depths]
    if longer > prompt_len:
        runs.append((geometry.num_layers, longer))
    timings: dict[tuple[int, int], list[float]] = {run: [] for run in runs}
    bar = tqdm(total=(repeats + 1) * len(runs), desc="calibrating", unit="run", disable=None if progress else True)
    with bar, attach(model, Schedule.full(geometry.num_layers)) as attachment, torch.inference_mode():
        for attempt in range(repeats + 1):
            for depth, tokens in runs:
                seconds = _decode(attachment, depth, batch, tokens, steps)
                if attempt:  # The first of each warms up.
                    timings[depth, tokens] += seconds
                bar.update()
    medians = {run: statistics.median(seconds) for run, seconds in timings.items()}
    # Step k of a run finds the prompt, the first token and the k tokens before it in the cache.
    grown = (steps + 1) / 2 + 1
    return CostModel.fitted(
        geometry.num_layers,
        batch,
        {depth: medians[depth, prompt_len] for depth in depths},
        kv_tokens=prompt_len + grown,
        longer=(longer + grown, medians[geometry.num_layers, longer]) if longer > prompt_len else None,
        geometry=geometry,
    )


def _depths(num_layers: int) -> list[int]:
    """Full, half and few layers."""
    if num_layers < 2:
        raise UsageError("a model of one layer has nothing to skip: give a model with 2 layers or more")
    return sorted({num_layers, (num_layers + 1) // 2, max(1, num_layers // 8)}, reverse=True)


def _room(model: Any, tokens: int) -> int:
    """Tokens that still fit the model's context after `tokens`."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is None:
        return _LONGER
    if tokens > context:
        raise UsageError(
            f"the model's context is {context} tokens, but the calibration takes {tokens}: lower prompt_len"
        )
    return int(context) - tokens


def _decode(attachment: Attachment, depth: int, batch: int, tokens: int, steps: int) -> list[float]:
    """Seconds of each of `steps` decode steps of `depth` layers, on a cache with `tokens` tokens a row."""
    model = attachment.model
    attachment.schedule = Schedule.constant(attachment.schedule.num_layers, depth, warmup_layers=0)
    ids = torch.zeros(batch, tokens + 1, dtype=torch.long, device=model.device)
    cache = _filled_cache(attachment, ids[:, :1], tokens)
    clock = _Clock(model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=steps + 1,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
        num_beams=1,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return [after - before for before, after in pairwise(clock.times)]


def _filled_cache(attachment: Attachment, first: Tensor, tokens: int) -> SkipCache:
    """A cache with `tokens` prompt tokens a row: those of the first, over and over."""
    cache = attachment.new_cache()
    attachment.model(first, past_key_values=cache, use_cache=True)
    more = tokens - 1
    if more:
        for index, layer in enumerate(cache.layers):
            cache.update(*(part.expand(-1, -1, more, -1) for part in (layer.keys, layer.values)), index)
        cache.advance([PROMPT] * more)
    return cache


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time after every token."""

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self._device = device

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        synchronize(self._device)
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
