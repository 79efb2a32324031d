"""Split models together with what else a run can have: compression, clipping, validation, metrics, autocast."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from splitting import apart
from test_layouts import TASK, assert_same, doubled, fit, task
from torch import Tensor, nn

import hocket
from hocket import UserError
from hocket.core.errors import RankFailed

COMMON: dict[str, Any] = {"engine": "threads", "progress": False}
LAYOUTS = ["tensor=2,data=2", "pipeline=2,stages=3+3,microbatches=1,data=2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_compressed_on_the_data_axis(layout: str) -> None:
    """Where each element is rounded by itself, it does not matter which rank has it."""
    whole = fit("", workers=2, compress="fp16")
    found = fit(layout, compress="fp16")
    assert_same(found, whole, 1e-3)
    assert found.bytes_sent < fit(layout).bytes_sent


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compress", ["powersgd:rank=1", "int8", "dgc"])
def test_a_compressed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, layout: str, compress: str) -> None:
    settings: dict[str, Any] = COMMON | {"layout": layout, "compress": compress, "checkpoint_every": 1}
    whole = hocket.fit(TASK, out=tmp_path / "whole", epochs=2, **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    last = sorted((tmp_path / "cut/checkpoints").iterdir())[-1]
    last.unlink()
    found = hocket.resume(tmp_path / "cut", progress=False)
    assert found.steps == whole.steps
    assert all(torch.equal(tensor, whole.state[name]) for name, tensor in found.state.items())


def saved(path: Path, compress: str, **settings: Any) -> Path:
    hocket.fit(TASK, out=path, epochs=1, compress=compress, checkpoint_every=1, **COMMON | settings)
    return path


@pytest.mark.parametrize(
    ("before", "after"), [("tensor=2,data=2", ""), ("", "tensor=2,data=2"), (LAYOUTS[1], "tensor=2")]
)
def test_residuals_go_on_with_another_layout(tmp_path: Path, before: str, after: str) -> None:
    path = saved(tmp_path / "run", "topk:0.5", layout=before, workers=4 if before else 2)
    assert hocket.resume(path, epochs=2, layout=after, workers=4 if after else 2, progress=False).epochs == 2


@pytest.mark.parametrize(
    ("before", "after"), [("tensor=2,data=2", ""), ("", "tensor=2,data=2"), (LAYOUTS[1], "tensor=2")]
)
def test_factors_of_layers_do_not(tmp_path: Path, before: str, after: str) -> None:
    path = saved(tmp_path / "run", "powersgd:rank=1", layout=before, workers=4 if before else 2)
    with pytest.raises(RankFailed, match="what a compressor remembers of other parts of the model"):
        hocket.resume(path, epochs=2, layout=after, workers=4 if after else 2, progress=False)


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2,stages=3+3,microbatches=1"])
@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=3", "server"])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(layout: str, strategy: str) -> None:
    whole = fit("", strategy, workers=2, clip=0.3)
    assert_same(fit(f"{layout},data=2", strategy, clip=0.3), whole)
    assert apart(whole.state["0.weight"], fit("", strategy, workers=2).state["0.weight"]) > 1e-3


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2,stages=3+3"])
def test_the_best_model_is_a_whole_one(layout: str) -> None:
    settings: dict[str, Any] = {"validation": 0.2, "evaluate_every": 0.5}
    if "pipeline" in layout:
        layout += ",microbatches=1"  # or BatchNorm sees other batches
    found, alone = fit(layout, **settings), fit("", "serial", workers=1, **settings)
    assert found.best == pytest.approx(alone.best)
    assert found.best_state.keys() == alone.best_state.keys()
    assert all(apart(t.double(), alone.best_state[n].double()) < 1e-9 for n, t in found.best_state.items())


def spread(model: nn.Module, samples: Any) -> dict[str, float]:
    return {"spread": float(model(doubled()[0]).std())}


def test_what_is_no_mean_over_samples() -> None:
    made = task(evaluate=spread, metric_name="spread")
    alone = hocket.fit(made, strategy="serial", workers=1, **COMMON)
    assert hocket.fit(made, layout="tensor=2", **COMMON).test_metric == pytest.approx(alone.test_metric)
    with pytest.raises(UserError, match=r"Task\.evaluate needs the whole model"):
        hocket.fit(made, layout="pipeline=2", **COMMON)


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2,microbatches=2"])
def test_autocast(layout: str) -> None:
    made = hocket.Task(
        model=lambda: nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3)),
        data=((doubled()[0].float(), doubled()[1]),) * 2, batch=8, epochs=1, lr=0.05,
    )  # fmt: skip
    alone = hocket.fit(made, strategy="serial", workers=1, autocast="bf16", **COMMON)
    found = hocket.fit(made, layout=layout, autocast="bf16", **COMMON)
    assert found.test_loss == pytest.approx(alone.test_loss, rel=0.02)
    assert all(tensor.dtype == torch.float32 for tensor in found.state.values())


def channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(),
        nn.Linear(4 * 5 * 4, 3),
    )  # fmt: skip
    return model.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def images() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(48, 2, 5, 4, generator=g).double()
    return x, x[:, 0, :3].sum(1).argmax(-1) % 3


IMAGES = hocket.Task(model=channels_last, data=(images(), images()), batch=8, momentum=0.9, lr=0.05)


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2,stages=3+3,microbatches=1", "domain=2"])
def test_whatever_order_the_weights_have_in_memory(tmp_path: Path, layout: str) -> None:
    alone = hocket.fit(IMAGES, strategy="serial", workers=1, epochs=2, **COMMON)
    hocket.fit(IMAGES, layout=layout, epochs=1, out=tmp_path / "run", checkpoint_every=1, **COMMON)
    found = hocket.resume(tmp_path / "run", epochs=2, layout="", workers=1, progress=False)
    assert found.state.keys() == alone.state.keys()
    assert all(apart(t.double(), alone.state[n].double()) < 1e-9 for n, t in found.state.items())


def test_a_pipeline_takes_batches_apart_itself() -> None:
    with pytest.raises(UserError, match="leave accumulate and loaders out"):
        fit("pipeline=2", accumulate=2)
    assert fit("tensor=2", accumulate=2).steps
