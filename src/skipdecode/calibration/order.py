"""Drop orders from data: greedily by measured loss, and by block influence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.data.prompts import Example
from skipdecode.models.attach import Attachment
from skipdecode.models.families import decoder_layers
from skipdecode.tuning.collate import IGNORE, batches_of
from skipdecode.tuning.objective import response_logits

Measure = Callable[[Sequence[tuple[int, ...]]], Sequence[float]]


class Round(NamedTuple):
    """One layer goes: `losses` are those of each layer tried on top of the ones `gone`, `base` is the loss of none."""

    gone: tuple[int, ...]
    base: float
    losses: dict[int, float]
    dropped: int


def greedy_order(
    measure: Measure, layers: Sequence[int], drops: int, candidates: int, prior: Mapping[int, float]
) -> list[Round]:
    """Drop `drops` layers one after the other.

    The first round tries every layer. Later ones try the `candidates` layers whose loss rose least when they were last
    tried; a layer that is tried and turns out worse makes room for the next, so none is out for good.

    Parameters
    ----------
    measure : callable
        Gives the loss of each of several sets of layers that are left out.
    layers : sequence of int
        Layers that may go.
    prior : mapping of int to float
        A cheaper ranking (block influence) that decides between equals, the lowest first.
    """
    rises = dict.fromkeys(layers, 0.0)
    base = measure([()])[0]
    rounds: list[Round] = []
    for number in range(drops):
        gone = tuple(r.dropped for r in rounds)
        ranked = sorted(rises, key=lambda layer: (rises[layer], prior[layer], layer))
        tried = ranked if number == 0 else ranked[:candidates]
        losses = dict(zip(tried, measure([(*gone, layer) for layer in tried]), strict=True))
        rises |= {layer: loss - base for layer, loss in losses.items()}
        best = min(tried, key=lambda layer: (losses[layer], prior[layer], layer))
        rounds.append(Round(gone, base, losses, best))
        del rises[best]
        base = losses[best]
    return rounds


def greedy_trials(layers: int, drops: int, candidates: int) -> int:
    """How many sets `greedy_order` measures, that of none included."""
    return 1 + sum(layers if number == 0 else min(candidates, layers - number) for number in range(drops))


def block_influence(attachment: Attachment, examples: Sequence[Example], *, batch_size: int) -> tuple[float, ...]:
    """How much each layer turns the hidden states, from one full-depth pass; 0 for a layer that changes nothing.

    Source: ShortGPT (arXiv 2403.03853), section 3.2: 1 - cosine between a layer's input and output, averaged over
    tokens; here over the response tokens that are fed.
    """
    model, totals, tokens = attachment.model, dict[int, float](), 0
    layers = list(decoder_layers(model))
    fed = torch.zeros(0)  # marks the tokens of a batch that count

    def watch(index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before: Tensor = args[0] if args else kwargs["hidden_states"]
        after: Tensor = output[0] if isinstance(output, tuple) else output
        cosines = functional.cosine_similarity(before[fed].double(), after[fed].double(), dim=-1)
        totals[index] = totals.get(index, 0.0) + float(cosines.sum())

    handles = [layer.register_forward_hook(partial(watch, i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        with torch.inference_mode(), attachment.paused():
            for each in batches_of(sorted(examples, key=by_length), batch_size):
                batch = each.to(model.device)
                # A token is fed where the next column has a target; column 0 of the targets belongs to the prompt.
                fed = functional.pad(batch.targets[:, 1:] != IGNORE, (batch.prompt_length, 0))
                tokens += int(fed.sum())
                response_logits(model, batch, attached=False)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(1 - totals.get(index, 0.0) / max(1, tokens) for index in range(len(layers)))


def by_length(example: Example) -> tuple[int, int, str]:
    """The order of records in batches."""
    return len(example.response), len(example.prompt), example.id
