"""What a result says of itself."""

from __future__ import annotations

import pytest
import tiny
from torch import nn

import hocket


@pytest.mark.parametrize(("name", "known"), [("accuracy", True), ("mse", False)])
def test_only_an_accuracy_is_called_one(name: str, known: bool) -> None:
    x, _ = tiny.samples(12)
    data = (x, x[:, :1])
    loss = nn.functional.mse_loss
    made = hocket.Task(lambda: nn.Linear(4, 1), (data, data), loss, loss, metric_name=name, batch=4, epochs=1)
    result = tiny.fit(made, workers=2)
    assert result.test_metric is not None
    assert result.test_accuracy == (result.test_metric if known else None)
    assert result.to_json()[f"test_{name}"] == result.test_metric
