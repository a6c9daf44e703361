"""What a schedule says at each token of a given text, by its exact parallel form.

Along full depth's output: how far from full depth it is. Along a record's reference: the loss that `skipdecode
calibrate` predicts and `skipdecode tune` lowers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skipdecode.evaluation.fidelity import table_of
from skipdecode.models.attach import attach
from skipdecode.schedule import Schedule

__all__ = ["reference_loss", "teacher_forced"]

Table = NDArray[np.float64]


def teacher_forced(
    model: Any, schedule: Schedule, prompts: Sequence[Sequence[int]], full: Sequence[Sequence[int]]
) -> dict[str, Table]:
    """Fidelity of one batch along the full-depth output, without gradients.

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
        Tables of `skipdecode.evaluation.fidelity.TEACHER_FORCED`.
    """
    batch = _Batch(prompts, full, model.device)
    with torch.inference_mode(), attach(model, schedule) as attachment:
        with attachment.paused():
            expected = batch.log_probabilities(model(**batch.call))
        got = batch.log_probabilities(model(**batch.call, prompt_length=batch.prompt_lengths))
    divergence = (expected.exp() * (expected - got)).sum(-1)
    same = got.argmax(-1) == expected.argmax(-1)
    return {"top1_agreement": _sums(same, batch.kept), "kl": _sums(divergence, batch.kept)}


def reference_loss(
    model: Any, schedule: Schedule, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> dict[str, Table]:
    """Cross-entropy of one batch along given texts, without gradients.

    Parameters
    ----------
    model : transformers causal LM
        With nothing attached.
    schedule : Schedule
        Token j of a reference runs `schedule.layers(j)`.
    prompts, references : sequence of sequence of int
        Token ids, each reference with its end token.

    Returns
    -------
    dict of str to ndarray, shape (rows, 2)
        The table of `skipdecode.evaluation.fidelity.LIKELIHOOD`.
    """
    batch = _Batch(prompts, references, model.device)
    with torch.inference_mode(), attach(model, schedule):
        guess = batch.log_probabilities(model(**batch.call, prompt_length=batch.prompt_lengths))
    return {"loss": _sums(-guess.gather(-1, batch.targets[..., None]).squeeze(-1), batch.kept)}


class _Batch:
    """Texts of prompt and output, padded on the right, and where in the logits the outputs are predicted.

    `targets` are the outputs, (rows, longest output), `kept` where they are no padding.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: Any) -> None:
        # The last token of an output predicts nothing that is compared, so it is not fed.
        texts = [[*prompt, *output[:-1]] for prompt, output in zip(prompts, outputs, strict=True)]
        columns = max(map(len, texts))
        first = min(map(len, prompts)) - 1
        width = max(map(len, outputs))
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.call = {
            "input_ids": torch.tensor([text + [0] * (columns - len(text)) for text in texts], device=device),
            "attention_mask": torch.tensor([[1] * len(t) + [0] * (columns - len(t)) for t in texts], device=device),
            "use_cache": False,
            "logits_to_keep": columns - first,
        }
        offsets = torch.arange(width, device=device)
        lengths = torch.tensor([len(output) for output in outputs], device=device)
        self.kept = offsets < lengths[:, None]
        self.targets = torch.tensor([[*o, *[0] * (width - len(o))] for o in outputs], device=device)
        self._columns = (self.prompt_lengths[:, None] - 1 - first + offsets).clamp(max=columns - first - 1)

    def log_probabilities(self, output: Any) -> Tensor:
        """Of the next token at each place of the outputs, (rows, longest output, vocabulary)."""
        rows = torch.arange(len(self.kept), device=self.kept.device)[:, None]
        return torch.log_softmax(output.logits[rows, self._columns].float(), dim=-1)


def _sums(values: Tensor, kept: Tensor) -> Table:
    return table_of(torch.stack([(values.double() * kept).sum(1), kept.sum(1).double()], dim=1).tolist())
