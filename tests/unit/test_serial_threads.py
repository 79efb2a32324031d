"""Implicit parallelism: one worker, and PyTorch's own threads inside each operation."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor, nn

import hocket


def test_the_worker_computes_with_as_many_threads_as_it_was_given() -> None:
    seen: set[int] = set()

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled():
                seen.add(torch.get_num_threads())
            return super().forward(x)

    before = torch.get_num_threads()
    result = tiny.fit(tiny.task(model=lambda: Looking(4, 2)), strategy="serial:threads=3", workers=1)
    assert 3 in seen
    assert result.verdict == "finished"
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_bad_numbers_are_refused(threads: int) -> None:
    with pytest.raises(hocket.UserError, match="threads must be from 1 to 1024"):
        tiny.fit(tiny.task(), strategy=f"serial:threads={threads}", workers=1)
