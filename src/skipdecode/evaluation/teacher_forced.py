"""What a method would say at each token of the full-depth output, by the exact parallel form of its schedule."""

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

__all__ = ["teacher_forced"]

Table = NDArray[np.float64]


def teacher_forced(
    model: Any, schedule: Schedule, prompts: Sequence[Sequence[int]], full: Sequence[Sequence[int]]
) -> dict[str, Table]:
    """Fidelity of one batch along the full-depth output.

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


class _Batch:
    """Texts of prompt and output, padded on the right, and where in the logits the outputs are predicted."""

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
        self._columns = (self.prompt_lengths[:, None] - 1 - first + offsets).clamp(max=columns - first - 1)

    def log_probabilities(self, output: Any) -> Tensor:
        """Of the next token at each place of the outputs, (rows, longest output, vocabulary)."""
        rows = torch.arange(len(self.kept), device=self.kept.device)[:, None]
        return torch.log_softmax(output.logits[rows, self._columns].float(), dim=-1)


def _sums(values: Tensor, kept: Tensor) -> Table:
    return table_of(torch.stack([(values.double() * kept).sum(1), kept.sum(1).double()], dim=1).tolist())
