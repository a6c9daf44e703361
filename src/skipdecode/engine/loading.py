"""Loads a model by its name, in the type in which the engine that will run it is fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from skipdecode.common.environment import limit_threads, multiplies_bf16
from skipdecode.models.loading.hub import LoadedModel, checked_name, choose_device, load_model
from skipdecode.models.loading.ref import ModelRef


def load(
    name: str | Path | ModelRef,
    *,
    dtype: str = "auto",
    device: str | None = None,
    engine: str = "auto",
    require_tokenizer: bool = True,
    base: str | Path | None = None,
) -> LoadedModel:
    """A causal LM by name, with its tokenizer, its schedule and its fit.

    Raises ModelLoadError (unknown name, hub not reachable, files broken or incomplete, no decoder-only causal LM),
    ScheduleError or FitError (a schedule or fit that is broken or for another model), MissingExtraError (no peft),
    DataError (broken recipe.json), UsageError (`dtype`, `device`, several fits, a `base` for a model without adapter).

    Parameters
    ----------
    name : str, Path or ModelRef
        A local directory (a checkpoint or a PEFT adapter), a hub id, ``smollm2-135m``, or a bundled adapter on it, such
        as ``e2e-smollm2-135m``. These names take precedence: a directory of such a name is ``./smollm2-135m``.
    dtype : {"auto", "float32", "bfloat16", "float16", "float64"}
        Dtype of the weights; for "auto" see `running_dtype`.
    device : str, optional
        A torch device such as "cpu" or "cuda:1". Default: the first GPU if there is one, else the CPU.
    engine : {"auto", "fast", "transformers"}
        The engine that will run the model; auto: the fast engine if it supports the model.
    require_tokenizer : bool
        Whether a checkpoint without tokenizer is an error. If not, `LoadedModel.tokenizer` is None.
    base : str or Path, optional
        For an adapter: the name of its base model. Default: the one that its directory names.
    """
    limit_threads()
    ref = name if isinstance(name, ModelRef) else ModelRef(checked_name(name))
    ref = ref if base is None else replace(ref, given_base=str(base))
    chosen = running_dtype(ref, dtype, choose_device(device), engine)
    return load_model(ref, dtype=chosen, device=device, require_tokenizer=require_tokenizer)


def running_dtype(ref: ModelRef, asked: str, device: Any, engine: str = "auto") -> str:
    """The dtype `asked`, with an exception for "auto": bf16 or fp32, by what the device multiplies.

    The exception holds for `ModelRef.runs_in_bf16` and, on CPUs, for `ModelRef.stored_in_bf16`. bf16 is taken if the
    device multiplies it in hardware. On other CPUs the kernels of the fast engine multiply bf16 about as fast as fp32,
    and read half of the bytes; torch emulates bf16 there, so the transformers engine takes fp32.
    """
    import torch

    from skipdecode.engine.kernels import native_kernels
    from skipdecode.engine.model_spec import READERS

    on_cpu = device.type == "cpu"
    if asked != "auto" or not (ref.runs_in_bf16 or (on_cpu and ref.stored_in_bf16)):
        return asked
    fast = on_cpu and engine != "transformers" and ref.config.model_type in READERS
    if multiplies_bf16(device.type) or (fast and native_kernels(device, torch.bfloat16)[0] is not None):
        return "bfloat16"
    return "float32"
