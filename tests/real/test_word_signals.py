"""A run of word2vec that is told to end leaves vectors that can be loaded, and goes on later."""

from __future__ import annotations

import signal
from pathlib import Path

import commands

from hocket.lab.embeddings import Embeddings
from hocket.tasks.madeup import KINDS


def test_a_run_that_is_stopped_leaves_its_vectors(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = commands.hocket("train", "word2vec:dim=32", "--epochs", "300", "--workers", "2", "--out", out)
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
