"""CUDA graphs: a pass that is captured once and replayed without a launch from Python for each of its kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Replay"]


class Replay:
    """A function of tensors as a CUDA graph: captured once, then replayed on new contents of the same memory.

    Its results, and those of others that share its pool of memory, are overwritten by the next call of any of them.
    """

    def __init__(self, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor], pool: Any) -> None:
        self._inputs, self._device = [x.clone() for x in inputs], inputs[0].device
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run(*self._inputs)  # libraries choose their kernels and allocate their workspaces before the capture
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._results = run(*self._inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._results
