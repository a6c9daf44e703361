"""Batches through transformers' `generate`: with a schedule attached for the call, or at full depth, untouched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from skipdecode.engine.backend import BatchResult, FinishReason, GenerationSettings, StopCheck
from skipdecode.engine.row_seeds import row_seed
from skipdecode.errors import AttachError
from skipdecode.models.attach import Attachment, attach
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.schedule import Schedule

__all__ = ["TransformersBackend", "end_tokens", "left_pad"]


class TransformersBackend:
    """`skipdecode.engine.backend.Backend` on a transformers causal LM.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
    schedule : Schedule or None
        None, or a schedule at full depth: the model runs untouched.
    end_tokens : sequence of int
        A row ends after any of them.
    pad_token : int
        Fills up shorter rows; masked.
    """

    def __init__(self, model: Any, schedule: Schedule | None, *, end_tokens: Sequence[int], pad_token: int) -> None:
        self._model = unwrap(model)
        self._schedule = None if schedule is None or schedule.is_full else schedule
        self.end_tokens = tuple(end_tokens)
        self._pad_token = pad_token
        self.num_layers = len(decoder_layers(self._model))

    @classmethod
    def of(cls, model: Any, tokenizer: Any, schedule: Schedule | None) -> Self:
        """With the end tokens of the model's generation config and of its tokenizer."""
        pad = tokenizer.pad_token_id
        return cls(model, schedule, end_tokens=end_tokens(model, tokenizer), pad_token=0 if pad is None else pad)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        row_keys: Sequence[int],
        should_stop: StopCheck | None = None,
    ) -> BatchResult:
        width = max(map(len, prompts))
        ids, mask = left_pad(prompts, self._pad_token, self._model.device)
        ends = () if settings.ignore_eos else self.end_tokens
        watch = _Watch(width, len(prompts), ends, should_stop)
        keywords: dict[str, Any] = {
            "generation_config": GenerationConfig(
                max_new_tokens=settings.max_new_tokens,
                do_sample=False,
                eos_token_id=list(ends) or None,
                pad_token_id=self._pad_token,
                return_dict_in_generate=True,
            ),
            "logits_processor": LogitsProcessorList(_sampling(settings, row_keys)),
            "stopping_criteria": StoppingCriteriaList([watch]),
        }
        with torch.inference_mode(), _without_defaults(self._model):
            if self._schedule is None:
                output = self._model.generate(input_ids=ids, attention_mask=mask, **keywords)
                cost = self._full_cost(output, width)
            else:
                with attach(self._model, self._schedule) as attachment:
                    output = self._model.generate(input_ids=ids, attention_mask=mask, **keywords)
                cost = self._skipping_cost(attachment, width, self._schedule)
        steps, step_layers, kv_bytes, kv_bytes_full = cost
        tokens, reasons = watch.rows(output.sequences[:, width:])
        return BatchResult(
            tokens, reasons, steps, step_layers, watch.prefill_s, watch.decode_s, kv_bytes, kv_bytes_full
        )

    def _skipping_cost(self, attachment: Attachment, width: int, schedule: Schedule) -> tuple[int, int, int, int]:
        run = attachment.last_run
        if run is None:
            raise AttachError("the attached model's generate left no statistics: it was replaced by another tool")
        step_layers = run.token_layers - width * len(schedule.prompt_layers())
        return run.forwards - 1, step_layers, run.kv_bytes, run.kv_bytes_full

    def _full_cost(self, output: Any, width: int) -> tuple[int, int, int, int]:
        steps = output.sequences.shape[1] - width - 1
        held = sum(
            part.numel() * part.element_size()
            for layer in output.past_key_values.layers
            for part in (layer.keys, layer.values)
        )
        return steps, steps * self.num_layers, held, held


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a text: those of the model's generation config and the tokenizer's own."""
    configured = unwrap(model).generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({int(t) for t in (*listed, tokenizer.eos_token_id) if t is not None})


def left_pad(prompts: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, each (rows, longest prompt), with the padding on the left."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, mask


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """Called after each token: times the first one, and asks `should_stop`."""

    def __init__(self, width: int, rows: int, ends: Sequence[int], should_stop: StopCheck | None) -> None:
        self._width = width
        self._ends = frozenset(ends)
        self._should_stop = should_stop
        self._open = set(range(rows))
        self._stopped: dict[int, int] = {}
        self._start = self._last = time.perf_counter()
        self._first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self._last = time.perf_counter()
        self._first = self._first or self._last
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        if self._should_stop is not None:
            texts = input_ids[:, self._width :].tolist()
            for row in sorted(self._open):
                if texts[row][-1] in self._ends:
                    self._open.remove(row)
                elif self._should_stop(texts[row]):
                    self._open.remove(row)
                    self._stopped[row] = len(texts[row])
                    done[row] = True
        return done

    @property
    def prefill_s(self) -> float:
        return (self._first or self._last) - self._start

    @property
    def decode_s(self) -> float:
        return self._last - (self._first or self._last)

    def rows(self, new: Tensor) -> tuple[list[list[int]], list[FinishReason]]:
        """New tokens of each row up to its end, and why it ended."""
        tokens: list[list[int]] = []
        reasons: list[FinishReason] = []
        for number, row in enumerate(new.tolist()):
            end = next((i + 1 for i, token in enumerate(row) if token in self._ends), None)
            if number in self._stopped:
                tokens.append(row[: self._stopped[number]])
                reasons.append("stop")
            else:
                tokens.append(row[:end])
                reasons.append("length" if end is None else "eos")
        return tokens, reasons


class _RowSampler(LogitsProcessor):  # type: ignore[misc]
    """Adds Gumbel noise from a generator of the row's own: the likeliest token is then a draw from the distribution.

    Drawn on the CPU, so that a seed gives the same draws on every device and in every batch.
    """

    def __init__(self, seed: int, row_keys: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(row_seed(seed, key)) for key in row_keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty(scores.shape)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_().to(scores.device)


def _sampling(settings: GenerationSettings, row_keys: Sequence[int]) -> Iterator[Any]:
    if settings.temperature == 0:
        return
    yield TemperatureLogitsWarper(float(settings.temperature))
    if settings.top_k:
        yield TopKLogitsWarper(settings.top_k)
    if settings.top_p < 1:
        yield TopPLogitsWarper(settings.top_p)
    yield _RowSampler(settings.seed, row_keys)


@contextlib.contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """The checkpoint's generation defaults (penalties, sampling) put aside: settings are what the caller said."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before
