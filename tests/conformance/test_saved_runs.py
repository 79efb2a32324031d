"""Law: k steps, save, load, the rest = uninterrupted, bit for bit. On `sim` for every strategy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import THOROUGH
from torch import nn

import hocket
from hocket.strategies import strategy

VARIANTS = {
    "allreduce": ["allreduce:overlap=on,bucket=1"],
    "local-sgd": ["local-sgd:every=3,momentum=average", "local-sgd:every=2,post_local=4"],
    "diloco": ["diloco:every=4", "diloco:every=5,fragments=3", "diloco:every=5,fragments=3,delay=2"],
    "gossip": [f"gossip:kind={kind}" for kind in ("adpsgd", "sgp", "pull", "push", "push,together=true")],
    "server": [
        "server:mode=async", "server:mode=ssp,slack=1", "server:mode=dssp", "server:mode=async,servers=2,stale=tail",
        "server:mode=async,push_every=2,fetch_every=3", "server:mode=async,stale=delay-compensated",
        "server:mode=async,pipeline=1", "server:mode=async,pipeline=1,servers=2,stale=gap",
    ],
    "elastic": ["elastic:every=3,order=round-robin", "elastic:every=2,stale=gap"],
    "hogwild": ["hogwild:every=3", "hogwild:stale=gap"],
    "leashed": ["leashed:persistence=1,stale=tail"],
    "mutex": ["mutex:stale=delay-compensated,backoff=exponential"],
}  # fmt: skip
TEXTS = sorted({*strategy, *(text for texts in VARIANTS.values() for text in texts)})
NAMES = [text for text in TEXTS if text in strategy]


def usable(text: str, workers: int) -> bool:
    chosen = strategy.make(text)
    return chosen.fewest_workers <= workers <= chosen.most_workers


def task(**settings: Any) -> hocket.Task:
    """With BatchNorm, whose statistics are no gradients, and dropout, which draws at random."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(118, 5, generator=g)
    y = (x @ torch.randn(5, 3, generator=g)).argmax(-1)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    return hocket.Task(model=model, data=((x, y), (x, y)), batch=4, lr=0.05, momentum=0.9, lr_decay=0.9, **settings)


MADE = task(epochs=4)


def fit(text: str, workers: int, out: Path, sim: dict[str, str] | None = None, **settings: Any) -> hocket.Result:
    times = {"compute": "lognormal:1ms:0.4", "stragglers": "1x2"} if workers > 1 else {}
    return hocket.fit(
        MADE, strategy=text, workers=workers, engine="sim", sim=times | (sim or {}), seed=5, out=out, progress=False,
        checkpoint_every="1", **settings,
    )  # fmt: skip


def same(a: hocket.Result, b: hocket.Result) -> None:
    for name, tensor in a.state.items():
        assert torch.equal(tensor, b.state[name]), name
    assert a.curve == b.curve
    assert (a.virtual_seconds, a.bytes_sent, a.steps) == (b.virtual_seconds, b.bytes_sent, b.steps)
    assert a.staleness == b.staleness
    for mine, other in zip(a.per_worker, b.per_worker, strict=True):
        assert mine == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        pytest.param(text, workers, marks=() if text in NAMES or workers == 3 else THOROUGH)
        for text in TEXTS
        for workers in (1, 2, 3, 5)
        if usable(text, workers)
    ],
)
def test_a_run_that_was_saved_goes_on_as_if_nothing_had_happened(tmp_path: Path, text: str, workers: int) -> None:
    goes_on(tmp_path, fit(text, workers, tmp_path / "whole"))


@pytest.mark.parametrize("text", ["mutex", "rwlock", "hogwild", "leashed"])
def test_so_does_one_whose_workers_wait_for_memory(tmp_path: Path, text: str) -> None:
    slow = {"domains": "2", "memory": "400KB", "controller": "500KB", "block": "16"}
    goes_on(tmp_path, fit(text, 5, tmp_path / "whole", sim=slow))


def goes_on(tmp_path: Path, whole: hocket.Result) -> None:
    """Cut a run after its first checkpoint, resume it, and look for what differs."""
    names = sorted(p.name for p in (tmp_path / "whole/checkpoints").iterdir())
    assert len(names) == 2
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    (tmp_path / "cut/checkpoints" / names[1]).unlink()  # what is left was taken before the last epoch
    same(whole, hocket.resume(tmp_path / "cut", task=MADE, progress=False))


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=() if text in NAMES else THOROUGH) for text in TEXTS if usable(text, 3)]
)
def test_a_finished_run_can_be_made_longer(tmp_path: Path, text: str) -> None:
    whole = fit(text, 3, tmp_path / "whole")
    fit(text, 3, tmp_path / "short", epochs=2)
    longer = hocket.resume(tmp_path / "short", task=MADE, progress=False, epochs=4)
    for name, tensor in whole.state.items():
        assert torch.equal(tensor, longer.state[name]), name
