"""A static KV cache: a batch's keys and values in one tensor of fixed shape, with its decode steps' inputs and outputs.

A batch's row has a *place*, an index into the tensor. Rows of a step are the first places, so that attention reads them
where they lie, without gathering pages. All of these tensors stay where they are, as captured steps need.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from skipdecode.engine.kernels.graphs import GraphCapture, StepGraphs

__all__ = ["GRANULE", "StaticCache", "row_bucket", "token_bucket"]

GRANULE = 64  # tokens


def row_bucket(rows: int) -> int:
    """The next power of two: 1, 2, 4, 8, …"""
    return 1 << (rows - 1).bit_length()


def token_bucket(tokens: int) -> int:
    """A multiple of 64 up to 1024 tokens; then with 8 steps to every doubling, an eighth too much at most."""
    step = max(GRANULE, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


class StaticCache:
    """Places for rows, and the graphs that were captured on them.

    Parameters
    ----------
    shape : tuple of int
        Layers, key/value heads, head_dim.
    vocabulary : int
        Columns of the logits.
    dtype : torch.dtype
        Type of keys, values and activations.
    new_capture : callable or None
        See `StepGraphs`.

    Attributes
    ----------
    kv : torch.Tensor
        (layers, 2, places, kv_heads, capacity, head_dim).
    inputs : torch.Tensor
        (places, 3), int64: of a step's rows, the token, its position, and the column that takes its keys and values.
    active : torch.Tensor
        (layers, places, 1): 1 where a place's row runs a layer in this step, else 0.
    logits : torch.Tensor
        (places, vocabulary), fp32: what a step leaves.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        vocabulary: int,
        dtype: torch.dtype,
        device: torch.device,
        new_capture: Callable[[], GraphCapture] | None,
    ) -> None:
        self._shape, self._vocabulary, self._dtype, self._device = shape, vocabulary, dtype, device
        self.graphs = StepGraphs(new_capture)
        self._loaded: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None  # rows, places, counts
        self._allocate(0, 0)

    @property
    def places(self) -> int:
        """Rows that there is room for."""
        return self.kv.shape[2]

    @property
    def capacity(self) -> int:
        """Columns of a place. The last one takes the keys and values of places without a token, and is never read."""
        return self.kv.shape[4]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        _, heads, dim = self._shape
        return 2 * heads * dim * self.kv.element_size()

    def ensure(self, places: int, tokens: int) -> None:
        """Make room for `places` rows of up to `tokens` tokens; keeps what is held, and forgets the graphs."""
        if places <= self.places and tokens < self.capacity:
            return
        capacity = self.capacity
        if tokens >= capacity:
            # Half as much again at least: rows that come one by one would copy everything each time.
            capacity = token_bucket(max(tokens + 1, capacity + capacity // 2))
        old = self.kv
        self.graphs.clear()
        self._allocate(max(self.places, row_bucket(places)), capacity)
        self.kv[:, :, : old.shape[2], :, : old.shape[4]] = old

    def wipe(self, place: int) -> None:
        """Make ready for a new row: nothing that one before it left (an infinity, in the worst case) may reach it."""
        self.kv[:, :, place] = 0

    def move(self, source: int, target: int) -> None:
        """Copy the row at one place to another."""
        self.kv[:, :, target] = self.kv[:, :, source]

    def load(self, places: list[int], tokens: list[int], positions: list[int], counts: list[int], rows: int) -> None:
        """Set a step's inputs.

        Parameters
        ----------
        places, tokens, positions : list of int
            A value for each row that has a token.
        counts : list of int
            How many of those, from the first, run each layer.
        rows : int
            Places of the step, those without a token too.
        """
        host = torch.tensor([[0, 0, self.capacity - 1]]).repeat(rows, 1)
        host[places] = torch.tensor([tokens, positions, positions]).T
        self.inputs[:rows].copy_(host)
        if (loaded := (rows, tuple(places), tuple(counts))) != self._loaded:
            rank = torch.full((rows,), len(places))
            rank[places] = torch.arange(len(places))
            running = rank < torch.tensor(counts).unsqueeze(1)
            self.active[:, :rows, 0].copy_(running.to(self._dtype))
            self._loaded = loaded

    @torch.inference_mode(False)  # tensors that may be written to inside of inference mode and outside
    def _allocate(self, places: int, capacity: int) -> None:
        layers, heads, dim = self._shape
        dtype, device = self._dtype, self._device
        # Zeros, not what the memory held: zero times a NaN is a NaN.
        self.kv = torch.zeros(layers, 2, places, heads, capacity, dim, dtype=dtype, device=device)
        self.active = torch.zeros(layers, places, 1, dtype=dtype, device=device)
        self.inputs = torch.zeros(places, 3, dtype=torch.int64, device=device)
        self.index = torch.arange(places, device=device)
        self.logits = torch.zeros(places, self._vocabulary, device=device)
        self._loaded = None
