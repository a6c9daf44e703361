"""A short calibration on the machine at hand: what a decode step of a model costs, by the number of layers that run.

Times real steps, of the package's own engine or of transformers' `generate`, under constant schedules, depth after
depth in turn, so that a change of the machine's speed meets all of them. The prompt's keys and values are made up, not
computed: only how many there are matters to the time. Results are kept per model, dtype, batch, engine, machine and
versions in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from skipdecode.common.environment import cpu_model, usable_cores
from skipdecode.common.files import write_whole
from skipdecode.common.paths import cache_dir
from skipdecode.engine import kernels
from skipdecode.engine.fast_model import FastModel
from skipdecode.errors import DataError, OutputError, UsageError
from skipdecode.models.attach import attach
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.performance.cost import CostModel
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.step_times import StepTimes, engine_steps, transformers_steps
from skipdecode.schedule import Schedule

__all__ = ["cost_key", "measure_cost"]

_LONGER = 512
_LEAST_SECONDS = 0.1  # timed of each depth
_MOST_REPEATS = 20
_VOLATILE = ("_name_or_path", "transformers_version", "skipdecode")


def measure_cost(
    model: Any,
    fast: FastModel | None = None,
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
    fast : FastModel, optional
        Its fast path: time the package's own engine. Default: transformers' `generate`.
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
    key = cost_key(inner, batch, fast)
    path = cache_dir() / "costs" / f"{_digest(key)}.json"
    if reuse and (kept := _read(path, key)) is not None:
        return kept
    with ExitStack() as stack, torch.inference_mode():
        if fast is None:
            attachment = stack.enter_context(attach(inner, Schedule.full(len(decoder_layers(inner)))))
            times = transformers_steps(attachment, batch, steps)
        else:
            times = engine_steps(inner, fast, batch, steps)
        cost = _measured(inner, times, batch, prompt_len, repeats, steps, progress)
    with contextlib.suppress(OutputError):  # A cache that cannot be written costs the next run a calibration, no more.
        write_whole(path, json.dumps({"key": key, "cost": cost.to_dict()}, indent=1))
    return cost


def cost_key(model: Any, batch: int, fast: FastModel | None = None) -> dict[str, Any]:
    """All that a calibration holds for: sizes and kernels, dtype, batch, engine, machine, threads and versions."""
    config = model.config
    settings = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE}
    return {
        "model": hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest(),
        "attention": str(config._attn_implementation),
        "dtype": str(model.dtype),
        "batch": batch,
        "engine": "transformers"
        if fast is None
        else f"fast, {fast.kernel} kernels {_kernel_version()}, {fast.quantization or 'own'} weights",
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _kernel_version() -> str:
    """Of the engine's kernels: their sources."""
    files = sorted(Path(kernels.__file__).parent.glob("*.*"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


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


def _measured(
    model: Any, times: StepTimes, batch: int, prompt_len: int, repeats: int, steps: int, progress: bool
) -> CostModel:
    geometry = ModelGeometry.from_config(model.config)
    depths = _depths(geometry.num_layers)
    longer = prompt_len + min(_LONGER, _room(model, prompt_len + steps + 2))
    runs = [(depth, prompt_len) for depth in depths]
    if longer > prompt_len:
        runs.append((geometry.num_layers, longer))
    timings: dict[tuple[int, int], list[float]] = {run: [] for run in runs}
    bar = tqdm(total=(repeats + 1) * len(runs), desc="calibrating", unit="run", disable=None if progress else True)
    with bar:
        for attempt in range(_MOST_REPEATS * repeats):
            # Steps of well under a millisecond are timed more often: a single disturbance must not count.
            if attempt > repeats and min(map(sum, timings.values())) >= _LEAST_SECONDS:
                break
            for depth, tokens in runs:
                seconds = times(depth, tokens)
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
