"""Length-grouped batches whose responses are aligned: prompts are padded on the left to one column.

All responses then start at the same column, so the tokens that run a layer are an exact slice of the batch (a skipped
token costs nothing, no row computes another row's tokens) and the logits of the prompt need not be computed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skipdecode.data.examples import Example

IGNORE = -100
"""Label of a column that is not response."""
_POOL = 100  # batches that are sorted by length together: enough to pad little, few enough to stay random
_TENSORS = ("input_ids", "attention_mask", "position_ids", "labels")


@dataclass
class Batch:
    # (rows, columns) of int64. Labels are `IGNORE` on prompt and padding and stand under their own token: the logits of
    # the column before predict them.
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor
    prompt_length: int  # the column at which every response starts
    ids: tuple[str, ...]  # what the records are called

    @property
    def targets(self) -> Tensor:
        """Labels of the response columns, (rows, response columns)."""
        return self.labels[:, self.prompt_length :]

    @property
    def response_tokens(self) -> int:
        """Tokens that carry a loss."""
        return int((self.labels != IGNORE).sum())

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses without padding."""
        return int(self.attention_mask.sum())

    def to(self, device: torch.device) -> Batch:
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS})

    def parts(self, most: int) -> Iterator[Batch]:
        """The same rows in batches of at most `most` tokens with their padding, or of one row."""
        count = max(1, most // self.input_ids.shape[1])
        if count >= len(self.input_ids):  # nothing is read back from a device
            yield self
            return
        for first in range(0, len(self.input_ids), count):
            rows = slice(first, first + count)
            used = self.attention_mask[rows].any(0).nonzero()
            start, end = int(used[0]), int(used[-1]) + 1
            tensors = {name: getattr(self, name)[rows, start:end] for name in _TENSORS}
            yield replace(self, prompt_length=self.prompt_length - start, ids=self.ids[rows], **tensors)


def collate(examples: Sequence[Example]) -> Batch:
    """Aligned batch of examples: prompts padded on the left, responses on the right.

    The padding is token 0, which every model has and no token attends to; a tokenizer's may have no row.
    """
    prompt = max(len(e.prompt) for e in examples)
    columns = prompt + max(len(e.response) for e in examples)
    input_ids = torch.zeros((len(examples), columns), dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORE)
    for row, example in enumerate(examples):
        start, end = prompt - len(example.prompt), prompt + len(example.response)
        input_ids[row, start:end] = torch.tensor((*example.prompt, *example.response))
        mask[row, start:end] = 1
        labels[row, prompt:end] = torch.tensor(example.response)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return Batch(input_ids, mask, positions, labels, prompt, tuple(e.id for e in examples))


def batches_of(examples: Sequence[Example], batch_size: int) -> list[Batch]:
    """Batches of `batch_size` examples each, in the order of the examples; the last batch may be smaller."""
    return [collate(examples[first : first + batch_size]) for first in range(0, len(examples), batch_size)]


class GroupedBatches:
    """Endless stream of batches of indices, records of like length together; each epoch has every record once.

    A batch sampler for a DataLoader. Batch number n depends on `seed` and n only, so a run goes on at any batch.

    `batch_size`: records in a batch; the last batch of an epoch may hold fewer. `start`: number of the first batch.
    """

    drop_last = False

    def __init__(self, examples: Sequence[Example], batch_size: int, *, seed: int, start: int = 0) -> None:
        self.batch_size = batch_size
        self._lengths = [(len(e.prompt), len(e.response)) for e in examples]
        self._seed = seed
        self._start = start

    def epoch(self, number: int) -> list[list[int]]:
        rng = random.Random(f"{self._seed}/{number}")
        order = list(range(len(self._lengths)))
        rng.shuffle(order)
        pool = self.batch_size * _POOL
        batches = [b for first in range(0, len(order), pool) for b in self._grouped(order[first : first + pool])]
        rng.shuffle(batches)
        return batches

    def _grouped(self, records: list[int]) -> list[list[int]]:
        """Batches of records that are alike in both lengths: bands of like responses, by prompt within a band."""
        bands = max(1, round(math.sqrt(len(records) / self.batch_size)))
        band = -(-len(records) // (bands * self.batch_size)) * self.batch_size
        by_response = sorted(records, key=lambda i: (self._lengths[i][1], self._lengths[i][0], i))
        batches: list[list[int]] = []
        for first in range(0, len(records), band):
            by_prompt = sorted(by_response[first : first + band], key=lambda i: (self._lengths[i], i))
            batches += [by_prompt[i : i + self.batch_size] for i in range(0, len(by_prompt), self.batch_size)]
        return batches

    def __iter__(self) -> Iterator[list[int]]:
        number, skipped = divmod(self._start, -(-len(self._lengths) // self.batch_size))
        while True:
            yield from self.epoch(number)[skipped:]
            number, skipped = number + 1, 0
