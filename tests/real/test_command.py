"""The command as a user runs it: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from covering import THOROUGH, first
from safetensors.torch import load_file

HOCKET = [sys.executable, "-m", "hocket"]


def hocket(*args: str, cwd: Path, check: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*HOCKET, *args], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == check, done.stderr
    return done


def ranks_of(out: Path) -> list[int]:
    """Processes whose command line or environment belongs to the run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(out).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("engine", first(2, ["mpi", "sim", "torch", "threads"]))
def test_json_is_all_that_stdout_holds_and_the_folder_reproduces_the_run(tmp_path: Path, engine: str) -> None:
    first = hocket("train", "digits", "--engine", engine, "--epochs", "2", "--json", "--out", "a", cwd=tmp_path)
    result = json.loads(first.stdout)
    assert first.stdout.count("\n") == 1
    assert result == json.loads((tmp_path / "a/result.json").read_text())
    assert result["verdict"] == "finished"
    assert result["workers"] == 2
    assert result["startup_seconds"] > 0.5  # PyTorch alone takes as long
    assert result["staleness"] == {"mean": 0.0, "max": 0, "histogram": {"0": 2 * result["steps"]}}
    # Every step, each of the two ranks sends half of the vector twice.
    assert result["bytes_sent"] == result["steps"] * 2 * 4 * result["parameters"]
    for worker in result["per_worker"]:
        parts = ("computing", "sending", "transferring", "waiting", "locks")
        assert sum(worker[part] for part in parts) == pytest.approx(worker["seconds"], rel=0.01)
    events = [json.loads(line) for line in (tmp_path / "a/events.jsonl").read_text().splitlines()]
    assert {e["rank"] for e in events} == {0, 1}
    assert sum(e["event"] == "gradient" for e in events) == 2 * result["steps"]
    assert len((tmp_path / "a/curve.csv").read_text().splitlines()) == 3
    assert (result["virtual_seconds"] is not None) == (engine == "sim")

    hocket("train", "--spec", "a/spec.toml", "--json", "--out", "b", cwd=tmp_path)
    a, b = (load_file(tmp_path / run / "model.safetensors") for run in "ab")
    assert all(a[name].equal(b[name]) for name in a)


ENDINGS = [("mpi", signal.SIGTERM), ("torch", signal.SIGINT), ("threads", signal.SIGHUP)]
ENDINGS += [pytest.param(engine, signal.SIGINT, marks=THOROUGH) for engine in ("mpi", "threads", "sim")]


@pytest.mark.parametrize(("engine", "number"), ENDINGS)
def test_a_signal_ends_everything_and_leaves_a_finished_folder(
    tmp_path: Path, engine: str, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    command = [*HOCKET, "train", "digits", "--engine", engine, "--epochs", "100000", "--out", str(out), "--json"]
    marked = {**os.environ, "HOCKET_TEST_RUN": str(out)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=marked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    curve = out / "curve.csv"
    limit = time.monotonic() + 60
    while not (curve.exists() and curve.stat().st_size > 200):
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors == "hocket: interrupted\n"
    assert not ranks_of(out)
    result = json.loads((out / "result.json").read_text())
    assert result == json.loads(printed)
    assert result["verdict"] == "interrupted"
    assert result["curve"]
    assert result.keys() >= documented_keys(), "whatever the end, all keys are there"
    assert len((out / "events.jsonl").read_text().splitlines()) > 10


def documented_keys() -> set[str]:
    """The fields of result.json in docs/results.md."""
    page = (Path(__file__).parents[2] / "docs/results.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \| ", page.partition("## `result.json`")[2].partition("###")[0], re.MULTILINE)
    return {name.replace("METRIC", "accuracy") for row in rows for name in re.findall(r"`(\w+)`", row)}


TERMINAL = """
import os, pty, signal, sys, time
child, screen = pty.fork()
if not child:
    os.execv(sys.executable, [sys.executable, "-m", "hocket", *sys.argv[1:]])
seen = b""
while b"samples/s" not in seen:
    seen += os.read(screen, 4096)
os.kill(child, signal.SIGTERM)
while True:
    try:
        seen += os.read(screen, 4096)
    except OSError:
        break
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seen.rfind(b"\\x1b[?25h") > seen.rfind(b"\\x1b[?25l") > -1)
"""


FITS = """
import hocket
hocket.fit("digits", engine="threads", epochs=100000, out="run", progress=False)
"""


def test_a_script_that_fits_still_dies_of_a_signal_but_finishes_its_folder(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", FITS], cwd=tmp_path)
    curve = tmp_path / "run/curve.csv"
    limit = time.monotonic() + 60
    while not (curve.exists() and curve.stat().st_size > 200):
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert json.loads((tmp_path / "run/result.json").read_text())["verdict"] == "interrupted"


def test_a_terminal_gets_its_cursor_back(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TERMINAL, "train", "digits", "--engine", "threads", "--epochs", "100000"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "143 True\n", done.stderr


@pytest.mark.parametrize("engine", first(1, ["mpi", "torch"]))
def test_ranks_end_when_their_starter_is_killed(tmp_path: Path, engine: str) -> None:
    out = tmp_path / "run"
    command = [*HOCKET, "train", "digits", "--engine", engine, "--epochs", "100000", "--out", str(out)]
    marked = {**os.environ, "HOCKET_TEST_RUN": str(out)}
    process = subprocess.Popen(command, cwd=tmp_path, env=marked, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while not (out / "curve.csv").exists() or (out / "curve.csv").stat().st_size < 200:
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    limit = time.monotonic() + 20
    while ranks_of(out) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not ranks_of(out)


@pytest.mark.parametrize(("after", "status"), [(0, 2), (3, 1)])
def test_a_failed_run_is_recorded_and_shows_the_users_lines(tmp_path: Path, after: int, status: int) -> None:
    """Only a rank meets the mistake; where nothing was trained yet, the exit status is that of a mistake."""
    (tmp_path / "bad.py").write_text(
        "import os, torch, hocket\n"
        "class Bad(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        Bad.calls += self.training\n"
        f"        if 'HOCKET_PROGRAM' in os.environ and Bad.calls > {after}: raise RuntimeError('planted')\n"
        "        return super().forward(x)\n"
        "data = (torch.randn(64, 2), torch.zeros(64, dtype=torch.int64))\n"
        "task = hocket.Task(model=lambda: Bad(2, 2), data=(data, data), epochs=1000)\n"
    )
    done = hocket("train", "bad.py:task", "--batch", "4", "--out", "run", "--json", cwd=tmp_path, check=status)
    *frames, ours = done.stderr.splitlines()
    assert ours.startswith("hocket: rank ") and ours.endswith("RuntimeError: planted")
    assert 'bad.py", line 6, in forward' in frames[0] and "src/hocket" not in done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result == json.loads(done.stdout)
    assert result["verdict"] == "crashed"
    assert "planted" in result["error"]
    assert result.keys() >= documented_keys()


@pytest.mark.thorough
def test_divergence_is_a_verdict_and_no_failure(tmp_path: Path) -> None:
    done = hocket("train", "digits", "--lr", "1e30", "--json", "--out", "run", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert result["verdict"] == "diverged"
    assert 1 <= result["diverged_at_step"] <= result["steps"]
    assert result["epochs"] == 1
    assert result["test_loss"] is None
    assert (tmp_path / "run/model.safetensors").exists()


@pytest.mark.thorough
def test_target_stops_early(tmp_path: Path) -> None:
    done = hocket("train", "digits", "--target", "0.9", "--json", "--out", "run", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert result["verdict"] == "reached-target"
    assert result["test_accuracy"] >= 0.9
    assert result["epochs"] < 20
    assert result["time_to_target"] == result["curve"][-1]["seconds"]


SCRIPT = """
import sys, torch, hocket
from torch.nn import functional as F
x = torch.randn(41, 5, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()
with hocket.join(strategy="local-sgd:every=2") as team:
    torch.manual_seed(team.rank)
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = team.prepare(model, optimizer)
    loader = team.shard(torch.utils.data.TensorDataset(x, y), batch_size=4)
    for epoch in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        scheduler.step()
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
total = sum(p.double().sum().item() for p in model.parameters())
print(f"END {team.rank} {team.size} {total} {optimizer.param_groups[0]['lr']}\\n", end="")  # one write
"""


def launchers() -> dict[str, list[str]]:
    beside = Path(sys.executable).parent
    return {
        "hocket-mpi": [*HOCKET, "launch", "-n", "3"],
        "torchrun": [str(beside / "torchrun"), "--nproc-per-node", "3"],
        "mpiexec": [str(beside / "mpiexec"), "-n", "3", sys.executable],
        "hocket-sim": [*HOCKET, "launch", "-n", "3", "--sim", "stragglers=1x3"],
        "hocket-torch": [*HOCKET, "launch", "-n", "3", "--engine", "torch"],
        "hocket-threads": [*HOCKET, "launch", "-n", "3", "--engine", "threads"],
    }


@pytest.mark.parametrize("name", first(2, launchers()))
def test_a_users_own_loop_runs_under_every_launcher(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*launchers()[name], "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ends = sorted(line.split() for line in done.stdout.splitlines() if line.startswith("END"))
    assert [end[1] for end in ends] == ["0", "1", "2"]
    assert len({end[3] for end in ends}) == 1, "replicas end equal"
    assert ends[0][4] == "0.00125"
    failed = subprocess.run([*command, "3"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert failed.returncode != 0


@pytest.mark.parametrize("launcher", first(1, ["mpiexec", "torchrun"]))
def test_train_joins_the_ranks_it_finds(tmp_path: Path, launcher: str) -> None:
    start = launchers()[launcher]
    command = [*(start[:-1] if launcher == "mpiexec" else start), *([] if launcher == "mpiexec" else ["--no-python"])]
    done = subprocess.run(
        [*command, *HOCKET, "train", "digits", "--epochs", "2", "--json", "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["workers"] == 3
    assert result["engine"] == {"mpiexec": "mpi", "torchrun": "torch"}[launcher]
    assert result == json.loads((tmp_path / "run/result.json").read_text())
    assert {json.loads(line)["rank"] for line in (tmp_path / "run/events.jsonl").read_text().splitlines()} == {0, 1, 2}
