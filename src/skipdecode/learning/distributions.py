"""A teacher's next-token distributions over texts: its top-k tokens at each position of a response.

Whoever answers in a teacher's place keeps them, so that the teacher need not run again where its answers are learned.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from skipdecode.common.files import write_whole
from skipdecode.errors import DataError

TextKey = tuple[int, ...]


class TeacherTopK(NamedTuple):
    """A teacher's top-k tokens at each position with their log-probabilities, both (positions, k)."""

    log_probabilities: Tensor
    top_tokens: Tensor

    @classmethod
    def of_steps(cls, steps: Sequence[Sequence[tuple[int, float]]]) -> TeacherTopK:
        """Of the top tokens with their log-probabilities at each position, as many at all of them."""
        pairs = torch.tensor(steps, dtype=torch.float64)
        return cls(pairs[..., 1].half(), pairs[..., 0].int())

    def to_text(self) -> list[str]:
        """JSON-ready."""
        return [base64.b64encode(part.numpy().tobytes()).decode() for part in self]

    @classmethod
    def from_text(cls, text: Sequence[str], positions: int) -> TeacherTopK:
        """What `to_text` returned."""
        parts = zip(text, (torch.float16, torch.int32), strict=True)
        return cls(*(torch.frombuffer(bytearray(base64.b64decode(t)), dtype=d).view(positions, -1) for t, d in parts))


def text_key(prompt: Sequence[int], response: Sequence[int]) -> TextKey:
    """The key of a text; ids of records may repeat."""
    return len(response), *prompt, *response


def save_distributions(path: Path, texts: Mapping[TextKey, TeacherTopK]) -> None:
    """Write the distributions of at least one text. Raises WriteError."""
    tensors = {
        "keys": torch.tensor([number for key in texts for number in key], dtype=torch.int32),
        "key_lengths": torch.tensor([len(key) for key in texts], dtype=torch.int32),
        "log_probabilities": torch.cat([taught.log_probabilities for taught in texts.values()]),
        "top_tokens": torch.cat([taught.top_tokens for taught in texts.values()]),
    }
    write_whole(path, save(tensors))


def load_distributions(path: Path) -> dict[TextKey, TeacherTopK]:
    """What `save_distributions` wrote; raises DataError if it cannot be read."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as e:
        raise DataError(f"cannot read the distributions {path} ({e}): leave out `distributions`") from None
    keys = [tuple(key.tolist()) for key in torch.split(tensors["keys"], tensors["key_lengths"].tolist())]
    positions = [key[0] for key in keys]
    parts = (torch.split(tensors[name], positions) for name in TeacherTopK._fields)
    return dict(zip(keys, map(TeacherTopK, *parts), strict=True))
