"""Tasks that users write, and data that they bring: a mistake is one line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.core.errors import UserError
from hocket.tasks import Task, footprint, task
from hocket.tasks.base import compiled


class OwnKernel(nn.Module):
    """A user's module, which happens to have a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kernel


def test_a_users_kernel_is_no_compiled_gradient() -> None:
    data = torch.randn(16, 2), torch.zeros(16, dtype=torch.long)
    made = Task(OwnKernel, (data, data), batch=4, epochs=1)
    result = hocket.fit(made, strategy="hogwild", engine="threads", workers=2, progress=False)
    assert result.verdict == "finished" and set(result.state) == {"kernel"}


def test_the_models_that_bring_a_compiled_gradient() -> None:
    for name in ("svm", "logistic", "factorization"):
        made = task.make(name).make(0, None)
        assert compiled(made.build_model(0), made.loss, made.load()[0]) is not None
        assert compiled(made.build_model(0), nn.functional.l1_loss, made.load()[0]) is None


DATA = (torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))


def own(**settings: object) -> Task:
    return Task(**{"model": lambda: nn.Linear(2, 2), "data": (DATA, DATA)} | settings)  # type: ignore[arg-type]


class TestFields:
    """A mistake in a user's task is one line that names the field."""

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("model", None), ("model", "net"),
            ("model", torch.zeros(9, 9)), ("loss", "mse"), ("metric", 0.5), ("metric_name", None),
            ("metric_name", ""), ("metric_name", "a\nb"), ("metric_name", "loss"), ("optimizer", torch.optim.SGD),
            ("lower_is_better", "yes"), ("target", "high"), ("target", float("nan")), ("target", True),
            ("epochs", 0), ("epochs", 10**400), ("lr", 10**400),
            ("epochs", "10"), ("epochs", 2.5), ("epochs", None), ("epochs", True), ("batch", 0),
            ("batch", 32.0), ("lr", 0), ("lr", -1.0), ("lr", "0.1"), ("lr", float("inf")), ("lr", [0.1]),
            ("lr_decay", 0.0), ("lr_decay", 1.5), ("momentum", 1.0), ("momentum", -0.1), ("momentum", None),
        ],
    )  # fmt: skip
    def test_refused(self, field: str, value: object) -> None:
        with pytest.raises(UserError, match=f"Task.{field} must") as caught:
            own(**{field: value})
        assert "\n" not in str(caught.value)

    def test_numbers_of_numpy_become_pythons(self) -> None:
        made = own(epochs=np.int64(3), lr=np.float32(0.5), target=np.float64(0.25), momentum=0, lr_decay=1)
        values = (made.epochs, made.lr, made.target, made.momentum, made.lr_decay)
        assert values == (3, 0.5, 0.25, 0.0, 1.0)
        assert [type(v) for v in values] == [int, float, float, float, float]

    def test_a_given_model_is_not_untied_by_its_copy(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight.data = model[0].weight.data.t()
        with pytest.raises(UserError, match=r"0\.weight and 1\.weight share memory"):
            own(model=model).build_model(0)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (DATA, "train is one tensor"),
            ((torch.tensor(0.0), torch.tensor(0.0)), "train is one tensor"),
            (((torch.tensor(0.0), torch.tensor(0.0)), DATA), "train must be a Dataset or two tensors"),
            ((DATA, (DATA[0], DATA[1], DATA[1])), "test must be a Dataset or two tensors"),
            ((DATA,), "must be \\(train, test\\)"),
            ((DATA, 5), "test must have a length and take an index"),
        ],
    )
    def test_data_of_another_shape(self, data: object, message: str) -> None:
        with pytest.raises(UserError, match=f"Task.data.*{message}"):
            own(data=data).load()

    def test_a_model_that_cannot_be_copied(self) -> None:
        model = nn.Linear(2, 2)
        model.lock = threading.Lock()
        with pytest.raises(UserError, match="give a function that makes it"):
            own(model=model).build_model(0)


@pytest.mark.parametrize("name", ["blobs", "digits"])
def test_a_task_without_files_takes_no_data(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"task {name} brings its own data; leave --data out"):
        task.make(name).make(0, tmp_path)


class TestMemory:
    def test_too_many_factors(self) -> None:
        made = task.make("factorization:rank=99999999").make(0, None)
        with pytest.raises(UserError, match=r"99999999 factors of 500 users and 300 items .* 960.0 GB a worker"):
            made.build_model(0)

    def test_too_many_columns(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "rows.svm"
        path.write_text("1 1:1\n-1 268435456:1\n" * 5)
        monkeypatch.setattr(footprint, "machine_bytes", lambda: 16 * 10**9)
        with pytest.raises(UserError, match=r"11.8 GB a worker, .* has 16.0 GB; number the columns") as caught:
            task.make("svm").make(0, path).load()
        assert str(path) in str(caught.value) and "column up to 268435456" in str(caught.value)


@pytest.mark.parametrize("name", ["svm", "logistic", "factorization"])
def test_a_pipe_is_no_data_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match=f"{path} is not a regular file"):
            task.make(name).make(0, path).load()


@pytest.mark.parametrize("path", ["x" * 300, "a\x00b", "~nobody-here/x"])
@pytest.mark.parametrize("name", ["svm", "factorization", "mnist-mlp"])
def test_paths_that_no_file_can_have(name: str, path: str) -> None:
    with pytest.raises(UserError, match=r"there is no|cannot read") as caught:
        task.make(name).make(0, Path(path)).load()
    assert len(str(caught.value)) < 450


@pytest.mark.parametrize("text", ["factorization:rank=" + "9" * 400, "factorization:rank=" + "9" * 5000, "9" * 5000])
def test_enormous_options_are_refused_in_a_short_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        task.make(text)
    assert len(str(caught.value)) < 200
