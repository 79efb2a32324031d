"""A user's own loop under every launcher: as DDP trains it, under every strategy, and with every mistake noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import as_ddp
import own_every
import pytest
from covering import covering, first

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent
LAUNCHERS = {
    "mpiexec": [BIN / "mpiexec", "-n", "{n}", sys.executable],
    "torchrun": [BIN / "torchrun", "--nproc-per-node", "{n}"],
    **{
        engine: [sys.executable, "-m", "hocket", "launch", "--engine", engine, "-n", "{n}", "--out", "{out}"]
        for engine in ("threads", "sim", "mpi", "torch")
    },
}


def run(launcher: str, ranks: int, out: Path, script: str, *args: str | Path) -> str:
    words = [str(word).format(n=ranks, out=out) for word in LAUNCHERS[launcher]]
    command = [*words, str(HERE / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out: Path = tmp_path_factory.mktemp("ddp") / "parameters"
    run("torchrun", as_ddp.SIZE, out, "as_ddp.py", out, "ddp")
    found: list[float] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("launcher", first(1, ["mpi", "torchrun", "threads", "torch", "mpiexec"]))
def test_it_ends_where_ddp_ends(launcher: str, of_ddp: list[float], tmp_path: Path) -> None:
    """AdamW, cosine schedule, clipping, accumulation, BatchNorm and bfloat16 under `allreduce`."""
    run(launcher, as_ddp.SIZE, tmp_path / "run", "as_ddp.py", tmp_path / "parameters")
    found = json.loads((tmp_path / "parameters").read_text())
    assert found == pytest.approx(of_ddp, rel=1e-3, abs=2e-4)
    before = [float(v) for p in as_ddp.net().parameters() for v in p.detach().flatten()]
    assert max(abs(x - y) for x, y in zip(found, before, strict=True)) > 0.05, "it has trained"


@pytest.mark.parametrize("launcher", first(3, ["sim", "torch", "mpiexec", "threads", "mpi", "torchrun"]))
def test_every_strategy_runs_and_every_mistake_is_noticed(launcher: str, tmp_path: Path) -> None:
    launched = ["launch"] if launcher in ("threads", "sim", "mpi", "torch") else []
    run(launcher, 3, tmp_path / "run", "own_every.py", tmp_path / "found", *launched)
    found = json.loads((tmp_path / "found").read_text())
    gloo = launcher in ("torch", "torchrun")
    for text in own_every.TEXTS:
        if gloo and text in ("gossip:kind=adpsgd", "gossip:kind=push"):  # Gloo cannot ask whether something has come
            assert "needs polling; start the ranks on engine" in found[text]
            continue
        assert found[text]["seen"] == [[3], 48], (text, found[text])
        assert found[text]["loss"] < 1.2 and found[text]["steps"] > 0, text
    for how, said in own_every.MISUSES.items():
        assert not launched or said in found[how.__name__]


MISTAKES = {
    "leaves": (2, "rank 1 has left the block after 4 steps, and others have not"),
    "meets": (1, "rank 1 in barrier"),
    "sums": (2, "team.all_reduce takes a tensor or a number"),
    "misnames": (2, "no strategy is called 'nosuch'"),
    "loads": (2, "own_mistaken.py is damaged, or no checkpoint of Hocket's"),
}


@pytest.mark.parametrize(("launcher", "mistake"), covering(["mpi", "torch", "mpiexec", "torchrun"], MISTAKES))
def test_a_mistake_is_said_once_and_at_once(launcher: str, mistake: str, tmp_path: Path) -> None:
    """Long before the deadline, which is 10 minutes: nobody waits for a rank that does something else."""
    words = [str(word).format(n=3, out=tmp_path / "run") for word in LAUNCHERS[launcher]]
    launched = "hocket" in words
    command = [*words, *(["--deadline", "600"] if launched else []), str(HERE / "own_mistaken.py"), mistake]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    status, line = MISTAKES[mistake]
    assert done.returncode == (1 if launcher == "torchrun" else status)  # which has but one
    said = [one for one in done.stderr.splitlines() if line in one]
    assert len(said) == 1 and said[0].startswith("hocket: "), done.stderr
    assert mistake != "meets" or "in all_reduce of 16 float32" in said[0]
    assert not launched or status == 1 or "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", first(2, ["sim", "mpi", "threads", "torch"]))
def test_a_rank_that_never_comes_is_named_at_once(engine: str, tmp_path: Path) -> None:
    words = [str(word).format(n=3, out=tmp_path / "run") for word in LAUNCHERS[engine]]
    command = [*words, "--deadline", "600", str(HERE / "own_mistaken.py"), "never comes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    said = "rank 1 has come to the end of the script, and rank "  # whoever of the others came first
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["verdict"] == "crashed" and said in result["error"]


@pytest.mark.parametrize("launcher", first(1, ["mpiexec", "torchrun"]))
def test_what_cannot_be_trained_is_refused_once_for_all_ranks(launcher: str) -> None:
    words = [str(word).format(n=3) for word in LAUNCHERS[launcher]]
    done = subprocess.run([*words, "-m", "hocket", "train", "nosuch"], capture_output=True, text=True, timeout=150)
    assert done.returncode == (2 if launcher == "mpiexec" else 1)  # torchrun has but one
    assert done.stderr.count("no task is called 'nosuch'") == 1


def test_a_launch_leaves_a_record(tmp_path: Path) -> None:
    said = run("sim", 2, tmp_path / "run", "own_joined_once.py")
    assert f"record in {tmp_path / 'run'}" in said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["verdict"] == "finished" and result["virtual_seconds"] > 0 and result["task"] == "own_joined_once"
    assert result["out"] == str(tmp_path / "run")
    assert len(result["curve"]) == 2 and result["test_mse"] == result["curve"][-1]["test_mse"]
    assert (tmp_path / "run" / "curve.csv").read_text().count("\n") == 3
    assert (tmp_path / "run" / "model.safetensors").exists()
