"""A tuning run, from a loaded model to a saved one.

Built on accelerate: one process or many, by its launcher. Everything that a step depends on besides the weights (batch,
learning rate, schedule) is a function of the step's number, so a resumed run repeats an unbroken one to the bit on one
device, and the same seed gives the same result twice.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, gather_object, parse_flag_from_env, set_seed
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from skipdecode.common.environment import keep_freed_memory, memory_gib, multiplies_bf16, return_freed_memory
from skipdecode.common.files import copy_files
from skipdecode.common.progress import note, progress_bar
from skipdecode.common.types import PreTrainedModel, Tokenizer
from skipdecode.data.batches import Batch, GroupedBatches, collate
from skipdecode.data.examples import Example
from skipdecode.errors import DivergedError
from skipdecode.learning.checkpoint import CHECKPOINTS, Checkpoints, RunLog
from skipdecode.learning.distributions import load_distributions
from skipdecode.learning.objective import Objective, StepReport, Teacher, TrainStep, dev_loss
from skipdecode.learning.settings import TuneConfig
from skipdecode.models.attach import Attachment
from skipdecode.models.fit import fit_of, fit_state, trainable_fit
from skipdecode.models.loading.adapter import with_lora
from skipdecode.models.loading.saving import merge_saved, save_tuned
from skipdecode.schedule import Schedule

DIVERGED_FILE = "diverged.json"
_PROBE = 8  # steps that show whether there is something to learn
_RISE = 0.02  # of the dev loss: more is not noise
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of attention: gradients of cuDNN's can be NaN under a mask (PyTorch 2.11 on an H200; pytorch issue 196678)."""


@dataclass(frozen=True)
class TuneResult:
    """Result of a tuning run. Losses are cross-entropy per response token; tokens count prompts and responses."""

    steps: int
    best_step: int
    best_dev_loss: float
    tokens: int
    seconds: float
    tokens_per_s: float
    precision: str


class Tuner:
    """One tuning run.

    `model` is trained in place; unless `config.full`, only its LoRA adapter: a PeftModel's own, else a fresh one. `out`
    gets the log, checkpoints while it runs, and the best model with its `tokenizer` at the end. A saved adapter names
    its base `base_name`; a merged model has the type `dtype` that the checkpoint had before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        train: Sequence[Example],
        dev: Sequence[Example],
        schedule: Schedule,
        config: TuneConfig,
        out: Path,
        base_name: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._dtype = dtype
        self._tokenizer, self._train, self._config = tokenizer, train, config
        self._schedule, self._out, self._base_name = schedule, out, base_name
        self._checkpoint_dir = out / CHECKPOINTS
        self._curriculum = config.curriculum(schedule)
        self._accelerator = make_accelerator(config, schedule, fitted=config.train_fit and fit_of(model) is not None)
        self._set_up(model)
        groups = GroupedBatches(dev, config.batch_size, seed=0).epoch(0)
        self._dev_batches = [collate([dev[i] for i in indices]) for indices in groups]

    def run(self, *, resume: bool = False, record: Callable[[TuneResult], None] = lambda _: None) -> TuneResult:
        """Train, keep the best weights on the dev records, and save them to `out`.

        `resume`: go on from the newest checkpoint in `out`, if there is one. `record`: called in the main process with
        the result, once the model lies in `out` and before the checkpoints go.

        Raises DivergedError if the loss or its gradient is not finite; step and records are in `out`/diverged.json.
        """
        self._out.mkdir(parents=True, exist_ok=True)
        if resume:
            self._checkpoints.resume()
        else:
            self._checkpoints.remove()
        try:
            with sdpa_kernel(_KERNELS):
                self._train_all()
                result = self._result()
        finally:
            self._attachment.detach()
            self._context.close()
        self._finish(result, record)
        return result

    def _set_up(self, model: PreTrainedModel) -> None:
        config = self._config
        keep_freed_memory()
        set_seed(config.seed)
        learned = config.full or hasattr(model, "get_base_model")  # tuning changes the initial weights themselves
        needs_copy = learned and config.distill_weight > 0
        frozen = copy.deepcopy(model).eval().requires_grad_(False) if needs_copy else None
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        lora = (config.rank, config.lora_alpha, config.lora_dropout, config.lora_targets)
        model = model.requires_grad_(True) if config.full else with_lora(model, *lora)
        self._adapter = None if config.full else model
        self._context = contextlib.ExitStack()
        if config.train_fit:
            self._context.enter_context(trainable_fit(model))
        if self._adapter is not None:
            from peft.helpers import disable_input_dtype_casting

            # PEFT casts what adapters read; mixed precision casts on its own.
            self._context.enter_context(disable_input_dtype_casting(model, self._is_mixed))
        self._attachment = Attachment(model, self._schedule)
        self._model, self._optimizer = self._accelerator.prepare(model, make_optimizer(model, config))
        self._model.train()
        if frozen is not None:
            frozen.to(self._accelerator.device)
        sharded = self._accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        top_k = 0 if sharded else config.teacher_top_k
        file = config.distributions if top_k and config.distill_weight > 0 else None
        teacher = Teacher(
            self._attachment,
            # Processes ask a keeping teacher at different steps: a wrapper that synchronizes them would wait forever.
            self._accelerator.unwrap_model(self._model),
            adapter=self._adapter,
            copy=frozen,
            arithmetic=self._accelerator.autocast,
            top_k=top_k,
            known=None if file is None else load_distributions(Path(file)),
        )
        objective = Objective(teacher, config.distill_weight)
        self._step = TrainStep(self._accelerator, self._model, self._optimizer, objective, config.clip)
        longest, memory = max(map(len, self._train)), memory_gib() or math.inf
        need = longest * self._step.token_bytes / 2**30
        if need > memory and self._accelerator.device.type == "cpu" and not config.gradient_checkpointing:
            note(
                f"the longest record has {longest:,} tokens, whose activations take about {need:.1f} GiB of the "
                f"{memory:.1f} here: cut it (truncate and max_prompt_tokens of a task file), or set "
                "gradient_checkpointing in a --recipe"
            )
        self._checkpoints = Checkpoints(self._accelerator, self._checkpoint_dir, self._adapter)
        self._start = None
        # All weights take much memory, and one part of several is not put back alone.
        if self._adapter is not None and self._accelerator.distributed_type == DistributedType.NO:
            self._start = [p.detach().clone() for p in self._trainable()]

    @property
    def _is_mixed(self) -> bool:
        return str(self._accelerator.mixed_precision) == "bf16"

    def _trainable(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _train_all(self) -> None:
        config, progress = self._config, self._checkpoints.progress
        main, device = self._accelerator.is_main_process, self._accelerator.device
        world, rank = self._accelerator.num_processes, self._accelerator.process_index
        first = progress.step * config.accumulation * world
        numbers = GroupedBatches(self._train, config.batch_size, seed=config.seed, start=first)
        mine = islice(numbers, rank, None, world)
        log = RunLog(self._out, keep_steps=progress.step, is_main=main)
        start = time.perf_counter() - progress.clock
        shown_bar = progress_bar(None, "step", name="tune", done=progress.step, shown=main)
        with contextlib.closing(log), shown_bar as bar:
            if progress.step == 0:  # so that tuning never ends with worse weights than it began with
                self._log_dev(log)
                progress.clock = time.perf_counter() - start
            while progress.step < (total := self._steps()):
                bar.total = total if config.minutes is None else None
                groups = [next(mine) for _ in range(config.accumulation)]
                batches = [collate([self._train[i] for i in indices]).to(device) for indices in groups]
                report, row = self._train_step(batches, total)
                if progress.step % 32 == 0:  # shapes leave gaps in the heap: 0.2 GB a step at a vocabulary of 262,144
                    return_freed_memory()
                bar.update()
                shown = {"loss": f"{report.loss:.4f}", "dev": f"{progress.best_loss:.4f}"}
                shown["tokens_per_s"] = row["tokens_per_s"]
                if config.minutes is not None:  # of the clock: the first steps say little of how many there will be
                    shown["minutes_left"] = f"{max(0.0, config.minutes - progress.clock / 60):.1f}"
                bar.set_postfix(**shown)
                log.write("train", progress.step, row)
                progress.clock = time.perf_counter() - start
                if self._is_due():
                    self._log_dev(log)
                    progress.clock = time.perf_counter() - start
                if progress.step % config.checkpoint_every == 0 and progress.step < self._steps():
                    self._checkpoints.save()

    def _is_due(self) -> bool:
        """Whether an evaluation follows."""
        config, progress = self._config, self._checkpoints.progress
        first = 0 if config.early_stop is None else progress.begun + _PROBE
        is_regular = progress.step >= first and (progress.step - first) % config.eval_every == 0
        return is_regular or progress.step == self._steps()

    def _log_dev(self, log: RunLog) -> None:
        losses = self._evaluate()
        log.write("dev", self._checkpoints.progress.step, losses)
        self._judge(losses["cross_entropy"])

    def _judge(self, loss: float) -> None:
        """Go back to the initial weights if the loss rises from there, or end a run that no longer gains."""
        config, progress = self._config, self._checkpoints.progress
        before, progress.last_loss = progress.last_loss, loss
        if progress.best_step:
            self._start = None  # its memory
        is_worse = progress.best_step == 0 and loss > (1 + _RISE) * progress.best_loss
        if is_worse and self._start is not None and 2 * progress.step < self._steps():
            self._go_back(self._start)
        elif config.early_stop is not None:
            progress.is_over = loss > (1 - config.early_stop) * before

    def _go_back(self, start: Sequence[torch.Tensor]) -> None:
        """Begin again from the initial weights, with half of the learning rate."""
        progress = self._checkpoints.progress
        with torch.no_grad():
            for parameter, value in zip(self._trainable(), start, strict=True):
                parameter.copy_(value)
        self._optimizer.state.clear()
        note(
            f"the dev loss rose from {progress.best_loss:.4f} to {progress.last_loss:.4f}: back to the initial "
            "weights, with half of the learning rate"
        )
        progress.halvings += 1
        progress.begun, progress.last_loss = progress.step, progress.best_loss

    def _steps(self) -> int:
        """Total steps; with `minutes`, extrapolated from the speed so far."""
        progress, minutes = self._checkpoints.progress, self._config.minutes
        if progress.is_over:
            return progress.step
        if minutes is None or not progress.step:
            return self._config.steps
        seconds = torch.tensor(progress.clock, device=self._accelerator.device)
        share = float(self._accelerator.reduce(seconds, reduction="mean")) / (60 * minutes)
        return progress.step if share >= 1 else max(progress.step + 1, round(progress.step / share))

    def _train_step(self, batches: Sequence[Batch], total: int) -> tuple[StepReport, dict[str, Any]]:
        progress = self._checkpoints.progress
        schedule = self._attachment.schedule = self._curriculum.schedule_at(progress.step)
        rate = self._config.learning_rate_at(progress.step, total) / 2**progress.halvings
        start = time.perf_counter()
        report = self._step(batches, rate)
        seconds = time.perf_counter() - start
        row = asdict(report) | {
            "learning_rate": rate,
            "tokens_per_s": round(report.tokens / seconds),
            "schedule": schedule.name,
            "mean_budget": schedule.mean_budget(),
            "minutes": round(progress.clock / 60, 3),
        }
        if not report.is_finite:
            self._stop(batches, row)
        progress.step += 1
        progress.tokens += report.tokens
        progress.seconds += seconds
        return report, row

    def _stop(self, batches: Sequence[Batch], row: dict[str, Any]) -> None:
        step = self._checkpoints.progress.step + 1
        ids = gather_object([name for batch in batches for name in batch.ids])
        path = self._out / DIVERGED_FILE
        if self._accelerator.is_main_process:
            # Text, because JSON has no NaN.
            values = {name: str(value) if isinstance(value, float) else value for name, value in row.items()}
            path.write_text(json.dumps({"step": step, "ids": ids, **values}, indent=1) + "\n", encoding="utf-8")
        raise DivergedError(
            f"loss {row['loss']:g} with gradient norm {row['gradient_norm']:g} at step {step}: stopped before the "
            f"update; the records are named in {path}; lower `learning_rate` or mend them"
        )

    def _evaluate(self) -> dict[str, float]:
        """Dev losses by schedule and their mean, `cross_entropy`; saves the weights if it is the best so far."""
        progress = self._checkpoints.progress
        losses = dev_loss(self._accelerator, self._model, self._attachment, self._curriculum.goals, self._dev_batches)
        mean = sum(losses.values()) / len(losses)
        if not math.isfinite(mean):
            raise DivergedError(
                f"the loss on the dev records is {mean:g} after step {progress.step}: lower `learning_rate`; the best "
                f"weights before, where there were any, are in {self._checkpoint_dir / 'best'}"
            )
        if mean < progress.best_loss:
            progress.best_loss, progress.best_step = mean, progress.step
            weights = self._accelerator.get_state_dict(self._model)
            if self._accelerator.is_main_process:
                save_tuned(
                    self._accelerator.unwrap_model(self._model),
                    self._tokenizer,
                    self._schedule,
                    self._checkpoint_dir / "best",
                    base_name=self._base_name,
                    state_dict=weights,
                    adapter_dtype=self._config.adapter_dtype,
                )
        return {"cross_entropy": mean, **losses}

    def _result(self) -> TuneResult:
        progress = self._checkpoints.progress
        return TuneResult(
            steps=progress.step,
            best_step=progress.best_step,
            best_dev_loss=progress.best_loss,
            tokens=progress.tokens,
            seconds=round(progress.seconds, 3),
            tokens_per_s=progress.tokens / progress.seconds,
            precision="bf16" if self._is_mixed else "fp32",
        )

    def _finish(self, result: TuneResult, record: Callable[[TuneResult], None]) -> None:
        """Put the best model into `out` and record it; the checkpoints go last, so a kill in here loses nothing."""
        if self._accelerator.is_main_process:
            best = self._checkpoint_dir / "best"
            if self._config.merge:
                merged = merge_saved(self._adapter, best).to(self._dtype)
                best = self._checkpoint_dir / "merged"
                save_tuned(merged, self._tokenizer, self._schedule, best)
            copy_files(best, self._out)
            record(result)
        self._accelerator.wait_for_everyone()
        self._checkpoints.remove()


def make_optimizer(model: nn.Module, config: TuneConfig) -> torch.optim.AdamW:
    """AdamW over the trainable weights, with weight decay on matrices only.

    The `share` of a parameter group multiplies the learning rate of a step.
    """
    weights, fitted = fit_state({name: p for name, p in model.named_parameters() if p.requires_grad})
    trainable = [*weights.values(), *fitted.values()]
    groups = [
        {"params": [p for p in part.values() if (p.dim() >= 2) == decays], "weight_decay": decay, "share": share}
        for part, share in ((weights, 1.0), (fitted, config.fit_learning_rate / config.learning_rate))
        for decays, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    # One pass over the weights where there is a kernel for it: a quarter of the unfused update's time on a CPU.
    fused = all(p.device.type in ("cpu", "cuda") for p in trainable)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=fused)


def process_state() -> PartialState:
    """This process among those that the launcher started."""
    # Asked for first, the state would else not see that the launcher wants several processes on the CPU.
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def make_accelerator(config: TuneConfig, schedule: Schedule, *, fitted: bool) -> Accelerator:
    """accelerate's Accelerator for a run; the launcher's devices, the precision and accumulation of `config`.

    `fitted`: a fit is trained.
    """
    # Layers that not even the prompt runs, and maps of a fit that no token needs, get no gradient, which several
    # devices must be told.
    some = fitted or len(schedule.last_prompt_layers()) < schedule.num_layers
    unused = DistributedDataParallelKwargs(find_unused_parameters=some)
    device, requested = process_state().device, config.precision
    bf16 = multiplies_bf16(device.type) if requested == "auto" else requested == "bf16"
    # It is one for the process and keeps the first run's precision; a later run may want another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision="bf16" if bf16 else "no",
        # As a plugin, because the launcher's environment goes before the plain number.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=config.accumulation),
        kwargs_handlers=[unused],
    )
    if (deepspeed := accelerator.state.deepspeed_plugin) is not None:
        # It wants the batch size, which it would else read from a data loader, and clips and accumulates on its own.
        deepspeed.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": config.batch_size,
            "gradient_accumulation_steps": config.accumulation,
            "gradient_clipping": config.clip,
        }
    return accelerator
