"""A run of word2vec that is told to end leaves vectors that can be loaded, and goes on later."""

from __future__ import annotations

import signal
from pathlib import Path

import commands
import pytest

from hocket.lab.embeddings import Embeddings
from hocket.tasks.madeup import KINDS


@pytest.mark.parametrize("engine, strategy", [("threads", "hogwild"), ("mpi", "local-sgd:hogwild=1,every=8")])
def test_a_run_that_is_stopped_leaves_its_vectors(engine: str, strategy: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    how = "--engine", engine, "--strategy", strategy, "--workers", "2", "--scale-lr"
    run = commands.hocket("train", "word2vec:dim=32", "--epochs", "300", *how, "--out", out)
    assert run.until(lambda: commands.points(out) >= 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == 128 + signal.SIGTERM
    found = commands.result(out)
    assert found["verdict"] == "interrupted" and 2 <= found["epochs"] < 300
    days = set(KINDS["DAY"].split())
    assert days >= {word for word, _ in Embeddings.of(out).nearest("monday", 4)}

    commands.finish(commands.hocket("resume", out, f"epochs={int(found['epochs']) + 2}"))
    assert commands.result(out)["verdict"] == "finished"
    assert Embeddings.of(out).words
