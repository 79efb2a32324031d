"""Laws over strategies and compressors: each pair runs, and goes on from a checkpoint bit for bit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering, first
from test_saved_runs import MADE, NAMES, TEXTS, same, task, usable

import hocket
from hocket.compress import compressor
from hocket.core.errors import UserError
from hocket.strategies import strategy

EARLY = [text for text in TEXTS if strategy.make(text).sends_early]
SENDING = [text for text in TEXTS if strategy.make(text).sends and text not in EARLY]
SILENT = [text for text in TEXTS if text not in (*SENDING, *EARLY)]
SCHEMES = [name for name in compressor if name != "none"] + ["topk:0.1+qsgd:bits=2", "randomk:0.2,feedback=on"]
FEW = ["int8", "topk:0.1+qsgd:bits=4", "powersgd:rank=1", "dgc"]
"""One of each way to travel, and the one with the most to remember."""
SIM = {"compute": "lognormal:1ms:0.4", "stragglers": "1x2"}


def fit(text: str, compress: str, workers: int = 3, made: hocket.Task = MADE, **settings: Any) -> hocket.Result:
    return hocket.fit(
        made, strategy=text, compress=compress, workers=workers, engine="sim", sim=SIM, seed=5, progress=False,
        **settings,
    )  # fmt: skip


@pytest.mark.parametrize(("text", "scheme"), covering([text for text in NAMES if text in SENDING], SCHEMES))
def test_every_strategy_that_sends_runs_with_every_compressor(text: str, scheme: str) -> None:
    result = fit(text, scheme, epochs=1)
    assert result.test_loss is not None and math.isfinite(result.test_loss)
    assert result.bytes_sent > 0


@pytest.mark.parametrize(("text", "scheme"), covering(SENDING, FEW))
def test_a_compressed_run_that_was_saved_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, text: str, scheme: str
) -> None:
    if not usable(text, 3):
        return
    whole = fit(text, scheme, out=tmp_path / "whole", checkpoint_every="1")
    names = sorted(p.name for p in (tmp_path / "whole/checkpoints").iterdir())
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    (tmp_path / "cut/checkpoints" / names[1]).unlink()  # what is left was taken before the last epoch
    same(whole, hocket.resume(tmp_path / "cut", task=MADE, progress=False))


@pytest.mark.parametrize("text", first(len(NAMES), [*NAMES, *sorted({*TEXTS} - {*NAMES})]))
def test_no_compression_is_as_if_there_were_no_such_option(text: str) -> None:
    workers = min(3, strategy.make(text).most_workers)
    plain = hocket.fit(MADE, strategy=text, workers=workers, engine="sim", sim=SIM, seed=5, progress=False, epochs=1)
    same(plain, fit(text, "none", workers, epochs=1))


@pytest.mark.parametrize("text", SILENT)
def test_what_sends_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="sends nothing that could be compressed"):
        fit(text, "topk", min(3, strategy.make(text).most_workers))


def test_a_lone_worker_sends_nothing_and_loses_nothing() -> None:
    plain, lossy = (fit("allreduce", scheme, 1, epochs=1) for scheme in ("none", "topk"))
    assert all(torch.equal(plain.state[name], lossy.state[name]) for name in plain.state)


def test_powersgd_is_refused_for_a_model_that_has_no_such_matrix() -> None:
    with pytest.raises(UserError, match="rank 9 is more than the model's matrices have; use 5 or less"):
        fit("allreduce", "powersgd:rank=9")


def test_training_that_diverges_says_so() -> None:
    with pytest.raises(hocket.RankFailed, match="NaN or infinity in it, and was not sent"):
        hocket.fit(
            task(epochs=4), strategy="allreduce", compress="topk", workers=2, engine="sim", lr=1e30, progress=False
        )
