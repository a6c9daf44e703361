"""Calls whose shapes and addresses never change, captured on their first run and repeated as one launch after that.

On a GPU a decode step of a small batch is hundreds of kernels of a few microseconds each, and Python takes longer to
launch them than they run. A CUDA graph repeats them with one launch, and reads and writes the very addresses that it
was captured with: what goes in and comes out must lie in tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

__all__ = ["MOST_GRAPHS", "CudaGraphCapture", "GraphCapture", "StepGraphs", "capture_for"]

# Each holds the nodes of a whole step in the driver's memory. Steps beyond these run kernel by kernel.
MOST_GRAPHS = 256

Step = Callable[[], None]


class GraphCapture(Protocol):
    """Makes a step repeatable."""

    def capture(self, step: Step) -> Step:
        """Run `step` once, and return what repeats it."""


class CudaGraphCapture:
    """CUDA graphs in one memory pool, which they can share because one runs at a time and nothing stays in it.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step) -> Step:
        """See `GraphCapture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # Libraries set themselves up on a first run, which must not be captured. It also does the step's work:
            # capturing does none.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                step()
            torch.cuda.current_stream().wait_stream(self._stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step()
        return graph.replay


def capture_for(device: torch.device) -> Callable[[], GraphCapture] | None:
    """What makes the capture of steps on a device; None where they can only run as they are."""
    return (lambda: CudaGraphCapture(device)) if device.type == "cuda" else None


class StepGraphs:
    """Steps by key.

    Parameters
    ----------
    new_capture : callable or None
        Makes what captures steps. None: they run as they are.
    """

    def __init__(self, new_capture: Callable[[], GraphCapture] | None) -> None:
        self._new_capture = new_capture
        self._capture: GraphCapture | None = None
        self._captured: dict[Hashable, Step] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, step: Step) -> None:
        """Run `step`; of a key seen before, by repeating what was captured."""
        if key in self._captured:
            self._captured[key]()
        elif self._new_capture is None or len(self._captured) >= MOST_GRAPHS:
            step()
        else:
            self._capture = self._capture or self._new_capture()
            self._captured[key] = self._capture.capture(step)

    def clear(self) -> None:
        """Forget all: needed when a tensor that steps use has moved."""
        self._captured.clear()
        # With its pool, which cannot be taken up again once its last graph is gone.
        self._capture = None
