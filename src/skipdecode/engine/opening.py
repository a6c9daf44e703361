"""Loads a model by its name, and chooses its engine: the fast one if it supports the model, else transformers' forward.

For a model wrapped by PEFT the fast engine uses a copy with the adapter merged. The copy computes the same function,
but its weights are rounded once more to their dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from skipdecode.common.environment import isolated_torch, multiplies_bf16, read_in_turn
from skipdecode.common.types import PreTrainedModel, Tokenizer
from skipdecode.engine.base import ENGINES, QUANTIZATIONS, Engine
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.fast_model import FastModel, open_model
from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.kernels.native import native_kernels
from skipdecode.engine.kernels.weights import QUANTIZATIONS as KERNEL_QUANTIZATIONS
from skipdecode.engine.model_reader import READERS
from skipdecode.engine.requests import Sampling
from skipdecode.engine.rules import rules_line, rules_of, stop_strings
from skipdecode.engine.scheduler import PROMPT_TOKENS, REFILL_BELOW
from skipdecode.errors import UnfitModelError, UsageError
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.checkpoint import Checkpoint, LoadedModel, open_checkpoint
from skipdecode.models.loading.hub import choose_device, configured_ends, load_model
from skipdecode.models.loading.stored import one_line
from skipdecode.models.recipe import ran_in_bf16
from skipdecode.schedule import Schedule


@isolated_torch()
def load(
    name: str | Path | Checkpoint,
    *,
    dtype: str = "auto",
    device: str | None = None,
    engine: str = "auto",
    require_tokenizer: bool = True,
    base: str | Path | None = None,
) -> LoadedModel:
    """A causal LM by name, with its tokenizer, its schedule and its fit.

    Raises ModelLoadError (unknown name, hub not reachable, files broken or incomplete, no decoder-only causal LM),
    ScheduleError or FitError (a schedule or fit that is broken or for another model),
    DataError (broken recipe.json), UsageError (`dtype`, `device`, several fits, a `base` for a model without adapter).

    Parameters
    ----------
    name : str, Path or Checkpoint
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
    checkpoint = open_checkpoint(name, base, dtype=dtype)
    chosen = running_dtype(checkpoint, dtype, choose_device(device), engine)
    return load_model(checkpoint, dtype=chosen, device=device, require_tokenizer=require_tokenizer)


def running_dtype(checkpoint: Checkpoint, dtype: str, device: torch.device, engine: str = "auto") -> str:
    """Return `dtype`, with an exception for "auto": bf16 or fp32, by what the device multiplies.

    The exception holds for ``smollm2-135m``, for models of `tune --full` in bf16, whose fp32 weights are the
    optimizer's, and, on CPUs, for weights that are stored in bf16. bf16 is taken if the device multiplies it in
    hardware. On other CPUs the kernels of the fast engine multiply bf16 about as fast as fp32, and read half of the
    bytes; torch emulates bf16 there, so the transformers engine takes fp32.
    """
    if dtype != "auto":
        return dtype
    on_cpu = device.type == "cpu"
    stored = str(getattr(checkpoint.config.get_text_config(decoder=True), "dtype", None)).removeprefix("torch.")
    in_bf16 = checkpoint.base == smollm2.NAME or ran_in_bf16(Path(checkpoint.base).expanduser())
    if not in_bf16 and not (on_cpu and stored == "bfloat16"):
        return dtype
    fast = on_cpu and engine != "transformers" and checkpoint.config.model_type in READERS
    if multiplies_bf16(device.type) or (fast and native_kernels(device, torch.bfloat16)[0] is not None):
        return "bfloat16"
    return "float32"


class Backend:
    """Opener of a model's engines, for any number of schedules, which all share the model's weights.

    `fast`: the model's fast path; default: transformers' forward with gates.

    Attributes `name`: that of the engines. `weights`: the type in which the engines read the weights. `sampling`,
    `stop`: how tokens are chosen and the strings that end a text, where a request says nothing else: greedy without
    rules, and none.
    """

    def __init__(self, model: PreTrainedModel, fast: FastModel | None = None, name: str | None = None) -> None:
        self.model, self.fast = model, fast
        self.sampling, self.stop = Sampling(), tuple[str, ...]()
        self.name = name or (GatedEngine.name if fast is None else fast.name)
        self.num_layers = len(decoder_layers(unwrap(model)))
        quantization = None if fast is None else fast.quantization
        self.weights = quantization or str(unwrap(model).dtype).removeprefix("torch.")

    @property
    def rules(self) -> dict[str, Any]:
        """What a generation config changes of texts: sampling that is not greedy, stop strings. JSON-ready."""
        return self.sampling.active | ({"stop_strings": [*self.stop]} if self.stop else {})

    def engine(
        self,
        schedule: Schedule | None = None,
        *,
        max_rows: int = 8,
        refill_below: float = REFILL_BELOW,
        in_order: bool = False,
        prefix_cache: bool = False,
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> Engine:
        """Make an engine; `schedule` None is full depth, and the other arguments are as in `FastEngine`.

        Engines of transformers have no prefix cache and run prompts whole.
        """
        schedule = Schedule.full(self.num_layers) if schedule is None else schedule
        if self.fast is None:
            return GatedEngine(self.model, schedule, max_rows=max_rows, in_order=in_order)
        return FastEngine(
            self.fast,
            schedule,
            max_rows=max_rows,
            refill_below=refill_below,
            in_order=in_order,
            prefix_cache=prefix_cache,
            prompt_tokens=prompt_tokens,
        )


@isolated_torch()
def open_engines(
    model: PreTrainedModel,
    engine: str,
    note: Callable[[str], None],
    quantization: str = "none",
    *,
    generation_config: bool = True,
) -> Backend:
    """Open a model's backend; see `open_fast`. Requests follow the model's generation config, which a note says."""
    backend, config = Backend(model, open_fast(model, engine, note, quantization)), unwrap(model).generation_config
    if generation_config:
        backend.sampling, backend.stop = Sampling(**rules_of(config).active), stop_strings(config)
        if (line := rules_line(config)) is not None:
            note(line)
    return backend


def open_fast(
    model: PreTrainedModel, engine: str, note: Callable[[str], None], quantization: str = "none"
) -> FastModel | None:
    """Open the fast path of a model; None if the model should run through transformers.

    The model's projection weights may be fused in place; it stays usable. The engine "auto" is fast if it supports the
    model and the C++ kernels can run, else transformers, with a note of the reason. The weights of the fast engine are
    the model's own, or quantised copies (see `kernels.weights`).

    Raises UsageError: `engine` or `quantization` is unknown, or not possible for this model.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine {engine!r} is not known: accepted are {', '.join(ENGINES)}")
    if quantization not in QUANTIZATIONS:
        raise UsageError(f"quantization {quantization!r} is not known: accepted are {', '.join(QUANTIZATIONS)}")
    kind = next((kind for kind in KERNEL_QUANTIZATIONS if kind == quantization), None)
    if engine == "transformers":
        if kind:
            raise UsageError(f"quantization {kind} needs the fast engine, not transformers: leave out one of them")
        return None
    try:
        return open_model(_merged_copy(model) if hasattr(model, "get_base_model") else unwrap(model), kind)
    except UnfitModelError as e:
        if engine == "fast":
            raise UsageError(f"the engine fast cannot run this model here: {e}; give the engine auto") from None
        if kind:
            raise UsageError(f"quantization {kind} needs the fast engine, which cannot run here: {e}") from None
        slower = ", several times slower than the fast engine" if unwrap(model).device.type == "cpu" else ""
        note(f"decoding through transformers{slower}: {e}")
        return None


def _merged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The base model with a PEFT adapter added to its weights; weights without an adapter are shared with `model`."""
    if unwrap(model).device.type != "cpu":  # `unwrap` refuses prompt learning, which has no weights to merge.
        return unwrap(model)  # which the fast engine refuses: no copy is made for it
    adapted = {id(p) for module in model.modules() if hasattr(module, "base_layer") for p in module.parameters()}
    copies = {}
    for _, p in read_in_turn(model.named_parameters()):
        value = p.detach().clone() if id(p) in adapted else p.detach()
        copies[id(p)] = torch.nn.Parameter(value, requires_grad=p.requires_grad)
    try:
        twin = copy.deepcopy(model, copies)
    except RuntimeError as e:  # of PEFT's matrices that are views of others, such as with `ensure_weight_tying`
        raise UnfitModelError(f"its adapter cannot be copied to be merged ({one_line(e)})") from None
    try:
        return merge_adapter(twin)
    except UsageError as e:
        raise UnfitModelError(str(e)) from None


def end_tokens(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """End tokens: those of the model's generation config and of the tokenizer."""
    return frozenset(t for t in (*configured_ends(model), tokenizer.eos_token_id) if t is not None)
