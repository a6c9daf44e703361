"""Predictions of a schedule at each token of a given text, by its exact parallel form.

On full depth's output: the distance from full depth. On a record's reference: the loss that `skipdecode calibrate`
predicts and `skipdecode tune` lowers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skipdecode.common.bootstrap import Table
from skipdecode.evaluation.scores import table_of
from skipdecode.models.attach import Attachment
from skipdecode.schedule import Schedule


def teacher_forced(
    model: Any, schedule: Schedule, prompts: Sequence[Sequence[int]], full: Sequence[Sequence[int]]
) -> dict[str, Table]:
    """Fidelity of one batch on the full-depth output, without gradients.

    Parameters
    ----------
    model : transformers causal LM
        With nothing attached.
    schedule : Schedule
        Token j of an output runs `schedule.layers(j)`, as in cached decoding.
    prompts, full : sequence of sequence of int
        Token ids of each prompt and of full depth's output.

    Returns
    -------
    dict of str to ndarray, shape (rows, 2)
        Tables of top1_agreement and kl.
    """
    rows = token_fidelity(model, schedule, prompts, full)
    return {name: table_of([[row[name].sum(), len(row[name])] for row in rows]) for name in ("top1_agreement", "kl")}


def token_fidelity(
    model: Any,
    schedule: Schedule,
    prompts: Sequence[Sequence[int]],
    full: Sequence[Sequence[int]],
    teacher: Any = None,
) -> list[dict[str, NDArray[np.float64]]]:
    """top1_agreement and kl at every token of each row's output; see `teacher_forced`.

    `teacher` is the model whose full depth gives the expected distribution, by default the model itself.
    """
    batch = _Batch(prompts, full, model.device)
    with torch.inference_mode(), Attachment(model, schedule) as attachment:
        if teacher is None or teacher is model:
            with attachment.paused():
                output = model(**batch.call)
        else:
            with Attachment(teacher, Schedule.full(schedule.num_layers)):
                output = teacher(**batch.call)
        shallow = model(**batch.call, prompt_length=batch.prompt_lengths)
        pairs = zip(batch.log_probabilities(output), batch.log_probabilities(shallow), strict=True)
        return [
            {
                "top1_agreement": (got.argmax(-1) == expected.argmax(-1)).double().cpu().numpy(),
                "kl": (expected.exp() * (expected - got)).sum(-1).double().cpu().numpy(),
            }
            for expected, got in pairs
        ]


def reference_loss(
    model: Any, schedule: Schedule, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> dict[str, Table]:
    """The table of loss: cross-entropy of one batch on its references, each with its end token.

    Arguments and table are as those of `teacher_forced`.
    """
    rows = token_losses(model, schedule, prompts, references)
    return {"loss": table_of([[row.sum(), len(row)] for row in rows])}


def token_losses(
    model: Any, schedule: Schedule, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[NDArray[np.float64]]:
    """Cross-entropy at every token of each row's text, in nats; arguments as those of `teacher_forced`."""
    batch = _Batch(prompts, texts, model.device)
    with torch.inference_mode(), Attachment(model, schedule):
        output = model(**batch.call, prompt_length=batch.prompt_lengths)
        guesses = zip(batch.log_probabilities(output), batch.outputs, strict=True)
        return [-guess.gather(-1, ids[:, None]).squeeze(-1).double().cpu().numpy() for guess, ids in guesses]


class _Batch:
    """Texts of prompt and output, padded on the right."""

    def __init__(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: Any) -> None:
        # The last token of an output predicts nothing that is compared, so it is not fed.
        texts = [[*prompt, *output[:-1]] for prompt, output in zip(prompts, outputs, strict=True)]
        columns = max(map(len, texts))
        first = min(map(len, prompts)) - 1
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.outputs = [torch.tensor(output, dtype=torch.int64, device=device) for output in outputs]
        self.call = {
            "input_ids": torch.tensor([text + [0] * (columns - len(text)) for text in texts], device=device),
            "attention_mask": torch.tensor([[1] * len(t) + [0] * (columns - len(t)) for t in texts], device=device),
            "use_cache": False,
            "logits_to_keep": columns - first,
        }
        self._starts = [len(prompt) - 1 - first for prompt in prompts]

    def log_probabilities(self, output: Any) -> Iterator[Tensor]:
        """Of the next token at each place of a row's output, (tokens, vocabulary), row by row to spare memory."""
        for logits, start, ids in zip(output.logits, self._starts, self.outputs, strict=True):
            yield torch.log_softmax(logits[start : start + len(ids)].float(), dim=-1)
