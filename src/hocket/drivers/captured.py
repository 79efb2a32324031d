"""A call that is repeated on a GPU, as one CUDA graph: to launch that takes less than to launch each of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[Tensor], Tensor]
"""Always with an argument of one shape, and on the same memory for the rest."""

WARM_UPS = 3
"""Calls before the capture, as PyTorch asks for: libraries make their handles and choose their kernels in them."""


def captured(call: Call, example: Tensor) -> Call:
    """`call` as a graph; itself where something in it cannot be captured, such as a look at a value."""
    argument, graph = example.clone(), torch.cuda.CUDAGraph()
    aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            call(argument)
    torch.cuda.current_stream().wait_stream(aside)
    try:
        with torch.cuda.graph(graph):
            found = call(argument)
    except RuntimeError:
        torch.cuda.synchronize()
        return call

    def replay(other: Tensor) -> Tensor:
        argument.copy_(other)
        graph.replay()
        return found.clone()  # the next replay writes there

    return replay
