"""Fitted linear maps for skipped work: bridges over skipped layers, and prompt maps for keys and values.

Both are maps of one token's state, divided by its root mean square. A prompt map may also take the states of the tokens
just before, the *taps*. So layer sets stay nested, the cache does not grow, and results do not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EPSILON = 1e-6


def normed(hidden: Tensor) -> Tensor:
    """States (…, hidden_size) divided by their root mean square, in fp32 (fp64 stays)."""
    hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + EPSILON)


def prompt_features(
    hidden: Tensor, text: Tensor | None, context: Tensor | None, context_tokens: int
) -> tuple[Tensor, Tensor]:
    """The inputs of a `PromptMap`: normed states, each with those of the `context_tokens` columns before it.

    `hidden`: (rows, columns, hidden_size). `text`: (rows, columns), bool; False marks padding, which counts as zeros.
    None: all columns are text. `context`: (rows, context_tokens, hidden_size), normed states in front of the first
    column; None: zeros.

    Returns the features (rows, columns, (context_tokens + 1) * hidden_size), and `context` for the next columns.
    """
    states = normed(hidden)
    if text is not None:
        states = states * text.unsqueeze(-1)
    if context is None:
        context = states.new_zeros(states.shape[0], context_tokens, states.shape[2])
    longer, columns = torch.cat((context, states), 1), states.shape[1]
    shifted = [longer[:, start : start + columns] for start in range(context_tokens, -1, -1)]
    return torch.cat(shifted, -1), longer[:, columns:]


class Bridge(nn.Module):
    """The map that replaces a skipped layer: it adds ``up @ down @ normed(h) + bias`` to a token's state h.

    `down` and `up`: (rank, hidden_size) and (hidden_size, rank); with rank 0 the bias is all. `bias`: (hidden_size,).
    """

    def __init__(self, down: Tensor, up: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.down, self.up, self.bias = (nn.Parameter(t, requires_grad=False) for t in (down, up, bias))

    def forward(self, hidden: Tensor) -> Tensor:
        """The states (…, hidden_size) after the bridge, in their own dtype."""
        added = normed(hidden) @ self.down.float().T @ self.up.float().T + self.bias.float()
        return (hidden.float() + added).to(hidden.dtype)


class PromptMap(nn.Module):
    """Maps prompt tokens to keys and values of a layer that they skip, before rotary positions and a norm of keys.

    `weight`: (keys + values, (context_tokens + 1) * hidden_size): columns of the token's own normed state first, then
    of the taps. `bias` and `first`: (keys + values,); `first` replaces the map at the first token of a text, whose
    state is an outlier.
    """

    def __init__(self, weight: Tensor, bias: Tensor, first: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.first = (nn.Parameter(t, requires_grad=False) for t in (weight, bias, first))

    def forward(self, features: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each (rows, columns, width), from `prompt_features`.

        `is_first` (rows, columns) marks the first tokens of texts.
        """
        outputs = features @ self.weight.float().T + self.bias.float()
        outputs = torch.where(is_first[..., None], self.first.float(), outputs)
        keys, values = outputs.chunk(2, -1)
        return keys, values
