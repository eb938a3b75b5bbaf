"""CUDA graphs: a pass that is captured once and replayed without a launch from Python for each of its kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Replay"]


class Replay:
    """A function of a tensor as a CUDA graph: captured once, then replayed on new contents of the same memory.

    run: leaves its results in memory that outlives it, and may keep none of its own.  pool: of memory that graphs share, as only one of
    them runs at a time.
    """

    def __init__(self, run: Callable[[Tensor], list[Tensor]], given: Tensor, pool: Any) -> None:
        self._given, self._device = given.clone(), given.device
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run(self._given)  # libraries choose their kernels and allocate their workspaces before the capture
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._results = run(self._given)

    def __call__(self, given: Tensor) -> list[Tensor]:
        self._given.copy_(given)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._results
