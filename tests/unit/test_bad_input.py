"""A user's mistake is one line that says what to do, exit status 2, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import enter, refusal

from hocket.app import cli
from hocket.tasks import mnist

FILES = {
    "broken.toml": "task = = 1",
    "key.toml": 'task = "digits"\nworkrs = 2',
    "text.toml": 'task = "digits"\nworkers = "two"',
    "bool.toml": 'task = "digits"\nworkers = true',
    "fraction.toml": 'task = "digits"\nworkers = 2.5',
    "number.toml": "task = 5",
    "infinite.toml": 'task = "digits"\nlr = inf',
    "empty.toml": "",
    "sim-key.toml": 'task = "digits"\nengine = "sim"\n[sim]\ncomput = "2ms"',
    "sim-number.toml": 'task = "digits"\nsim = 5',
    "raises.py": "x = 1\n1 / 0",
    "two_lines.py": 'raise ValueError("one\\ntwo")',
    "exits.py": "raise SystemExit(3)",
    "wordless.py": "class E(Exception):\n    def __str__(self): return 5\nraise E",
    "syntax.py": "x = 1\ndef (",
    "imports.py": "import nosuchmodule",
    "lacks.py": "x = 1",
    "number.py": "task = 5",
    "own.py": (
        "import torch, hocket\n"
        "data = torch.zeros(64, 2), torch.zeros(64, dtype=torch.long)\n"
        "def task(model=lambda: torch.nn.Linear(2, 2), data=(data, data)):\n"
        "    return hocket.Task(model=model, data=data, batch=4)\n"
        "no_data = task(data=5)\n"
        "no_samples = task(data=((data[0][:0], data[1][:0]), data))\n"
        "uneven = task(data=((data[0], data[1][:3]), data))\n"
        "no_model = task(model=lambda: 5)\n"
        "no_parameters = task(model=torch.nn.ReLU)\n"
    ),
    "deep.toml": 'task = "digits"\nx = ' + "[" * 20_000,
    "huge.toml": 'task = "digits"\nworkers = 1' + "0" * 5000,
    "large.toml": 'task = "digits"\nworkers = 1' + "0" * 500,
    "zero.toml": 'task = "digits"\ndata = "a\\u0000b"',
    **{
        f"{wrong.partition('=')[0]}.py": (
            "import torch, hocket\n"
            "data = torch.zeros(64, 2), torch.zeros(64, dtype=torch.long)\n"
            f"task = hocket.Task(model=lambda: torch.nn.Linear(2, 2), data=(data, data), {wrong})\n"
        )
        for wrong in ("epochs='two'", "batch=0", "lr=None", "optimizer=5")
    },
    "a-file": "",
    "a-folder/kept": "",
}

DIGITS = ["train", "digits", "--steps", "2"]
SIM = ["train", "digits", "--steps", "2", "--sim"]


CASES = [
    # Names, with the nearest one.
    (["trian", "digits"], "Did you mean 'train'?"),
    (["train", "digits", "--worker", "2"], "--workers"),
    (["train"], "hocket train digits"),
    (["train", "digit"], "did you mean digits?"),
    (["train", "something-else"], "there are: blobs, digits, factorization, logistic, mnist-cnn, mnist-mlp, svm"),
    (["train", "x" * 300], "no task is called"),
    (["train", "blobs:nose=1"], "did you mean noise?"),
    (["train", "blobs:noise=0"], "noise must be a number above 0"),
    ([*DIGITS, "--strategy", "alreduce"], "did you mean allreduce?"),
    ([*DIGITS, "--strategy", "local-sgd:evry=2"], "did you mean every?"),
    ([*DIGITS, "--strategy", "local-sgd:every"], "write every=VALUE"),
    ([*DIGITS, "--strategy", "local-sgd:every=often"], "every must be a whole number; got 'often'"),
    ([*DIGITS, "--strategy", "local-sgd:every=0"], "every and between must be 1 or more"),
    ([*DIGITS, "--strategy", "local-sgd:group=3"], "2 workers cannot form groups of 3"),
    ([*DIGITS, "--strategy", "local-sgd:post_local=-1"], "post_local must be 0 or more"),
    ([*DIGITS, "--strategy", "diloco:every=0"], "every must be 1 or more"),
    ([*DIGITS, "--strategy", "diloco:every=4,delay=4"], "delay must be at least 0 and less than every (4)"),
    ([*DIGITS, "--strategy", "diloco:momentum=1"], "momentum must be at least 0 and less than 1"),
    ([*DIGITS, "--strategy", "allreduce:algorithm=rung"], "must be one of auto, native, ring, halving, tree"),
    ([*DIGITS, "--strategy", "gossip", "--workers", "1"], "gossip needs 2 or more workers"),
    ([*DIGITS, "--strategy", "gossip:graph=torus", "--workers", "5"], "5 workers form no torus"),
    ([*DIGITS, "--warmup", "-1"], "warmup must be 0 or more epochs"),
    ([*DIGITS, "--strategy", "server:mode=ssp,slack=-1"], "slack must be 0 or more"),
    ([*DIGITS, "--strategy", "server:servers=0"], "servers must be 1 or more"),
    ([*DIGITS, "--strategy", "server:stale=gap"], "nothing is stale in mode=sync"),
    ([*DIGITS, "--strategy", "server", "--optimizer", "lars"], "a server cannot run optimizer lars"),
    ([*DIGITS, "--strategy", "local-sgd:momentum=kept"], "one of keep, average, reset"),
    ([*DIGITS, "--engine", "thread"], "did you mean threads?"),
    ([*DIGITS, "--engine", "sim:ltency=2us"], "did you mean latency?"),
    ([*DIGITS, "--optimizer", "adm"], "did you mean adam?"),
    ([*DIGITS, "--optimizer", "adamw:weight_decy=1"], "did you mean weight_decay?"),
    ([*DIGITS, "--optimizer", "adamw:weight_decay=much"], "weight_decay must be a number; got 'much'"),
    ([*DIGITS, "extra"], "KEY=VALUE, got 'extra'"),
    ([*DIGITS, "wrkers=2"], "did you mean workers?"),
    ([*DIGITS, "sim=2ms"], "sim must be a table"),
    # Numbers.
    ([*DIGITS, "--workers", "0"], "workers must be 1 or more, got 0"),
    ([*DIGITS, "--workers", "-3"], "workers must be 1 or more, got -3"),
    ([*DIGITS, "--workers", "two"], "--workers"),
    ([*DIGITS, "--batch", "0"], "batch must be 1 or more"),
    ([*DIGITS, "--batch", "719"], "shard of 718 samples (1437 samples, 2 workers); use --batch 718"),
    (["train", "digits", "--steps", "0"], "steps must be 1 or more"),
    (["train", "digits", "--epochs", "-1"], "epochs must be 1 or more"),
    ([*DIGITS, "--epochs", "2"], "epochs or steps, not both"),
    ([*DIGITS, "--lr", "nan"], "lr must be finite"),
    ([*DIGITS, "--lr", "inf"], "lr must be finite"),
    ([*DIGITS, "lr=nan"], "lr must be finite"),
    ([*DIGITS, "--lr", "0"], "lr must be greater than 0"),
    ([*DIGITS, "--lr", "-0.1"], "lr must be greater than 0, got -0.1"),
    ([*DIGITS, "--momentum", "1"], "momentum must be at least 0 and less than 1"),
    ([*DIGITS, "--momentum", "0.9", "--optimizer", "adam"], "leave --momentum out"),
    ([*DIGITS, "--target", "nan"], "target must be finite"),
    ([*DIGITS, "--seed", "-1"], "seed must be 0 or more"),
    ([*DIGITS, "--deadline", "0"], "deadline must be greater than 0"),
    ([*DIGITS, "--trace", "-1"], "trace must be 0 or more"),
    ([*DIGITS, "--device", "gpu"], "device must be cpu or cuda"),
    ([*DIGITS, "--strategy", "serial", "--workers", "2"], "use --workers 1, or --strategy allreduce"),
    ([*DIGITS, "--lr", "1e308"], "lr must be at most 1e+38"),
    ([*DIGITS, "--lr", "1e38", "--scale-lr"], "lr must be at most 1e+38"),
    ([*DIGITS, "--warmup", "1e308"], "warmup must be 0 or more epochs"),
    ([*DIGITS, "--deadline", "1e12"], "deadline must be greater than 0 and at most 1e+08 seconds"),
    (["train", "digits", "--epochs", "9" * 300], "epochs must be at most 2**53, got a number of 300 digits"),
    ([*DIGITS, "--checkpoint-every", "often"], "checkpoint_every: cannot read 'often'; write whole epochs like 2"),
    ([*DIGITS, "--checkpoint-every", "0"], "checkpoint_every: cannot read '0'"),
    ([*DIGITS, "--checkpoint-every", "0.5"], "checkpoint_every: cannot read '0.5'"),
    ([*DIGITS, "--checkpoint-every", "-2"], "checkpoint_every: cannot read '-2'"),
    ([*DIGITS, "--checkpoint-every", "0s"], "checkpoint_every: cannot read '0s'"),
    # The simulator.
    ([*SIM, "workers=-1"], "no option of sim is called 'workers'"),
    ([*SIM, "latency=1e308s"], "latency: '1e308s' is too long"),
    # Engines.
    ([*DIGITS, "--engine", "threads", "--hosts", "a:2"], "--hosts has no meaning on engine threads"),
    ([*DIGITS, "--engine", "sim", "--mpiexec", "here"], "--mpiexec has no meaning on engine sim"),
    ([*DIGITS, "--engine", "mpi", "--mpiexec", "/nope"], "cannot find /nope"),
    ([*DIGITS, "--engine", "mpi", "--mpiexec", "a-file"], "cannot find a-file"),
    ([*DIGITS, "--engine", "threads", "--sim", "compute=2ms"], "add --engine sim"),
    ([*SIM, "compute"], "--sim must be KEY=VALUE"),
    ([*SIM, "comput=2ms"], "did you mean compute?"),
    ([*SIM, "compute=2parsecs"], "write it like 2ms"),
    ([*SIM, "compute=-2ms"], "write it like 2ms"),
    ([*SIM, "compute=lognormal:2ms:wide"], "cannot read 'wide'"),
    ([*SIM, "latency=fast"], "latency: cannot read 'fast'"),
    ([*SIM, "bandwidth=10"], "write it like 10Gbit"),
    ([*SIM, "bandwidth=0Gbit"], "write it like 10Gbit"),
    ([*SIM, "stragglers=3"], "two workers, each 3 times slower"),
    ([*SIM, "stragglers=1x0"], "two workers, each 3 times slower"),
    ([*SIM, "ties=no"], "ties must be a whole number"),
    ([*SIM, "stragglers=5x3"], "makes 5 workers slow, but there are 2"),
    ([*SIM, "compute=1e999s"], "compute"),
    ([*SIM, "compute=lognormal:2ms:9999"], "compute"),
    # Spec files.
    (["train", "--spec", "none.toml"], "there is no spec file none.toml"),
    (["train", "--spec", "a-folder"], "cannot read a-folder"),
    (["train", "--spec", "broken.toml"], "broken.toml is not valid TOML"),
    (["train", "--spec", "empty.toml"], "no task is named"),
    (["train", "--spec", "key.toml"], "key.toml: no setting is called 'workrs'; did you mean workers?"),
    (["train", "--spec", "text.toml"], "text.toml: workers must be a whole number; got 'two'"),
    (["train", "--spec", "bool.toml"], "workers must be a number; got True"),
    (["train", "--spec", "fraction.toml"], "workers must be a whole number; got 2.5"),
    (["train", "--spec", "number.toml"], "task must be text; got 5"),
    (["train", "--spec", "infinite.toml"], "lr must be finite"),
    (["train", "--spec", "sim-key.toml"], "did you mean compute?"),
    (["train", "--spec", "sim-number.toml"], "sim must be a table"),
    (["train", "--spec", "deep.toml"], "deep.toml is not valid TOML"),
    (["train", "--spec", "huge.toml"], "huge.toml is not valid TOML"),
    (["train", "--spec", "large.toml"], "workers must be at most 2**53"),
    (["train", "--spec", "zero.toml"], "data must be UTF-8 text without zero bytes"),
    (["train", "--spec", "x" * 300], "cannot read x"),
    (["train", "--spec", "\udcff.toml"], "there is no spec file"),
    # Users' files.
    (["train", "gone.py:task"], "there is no file"),
    (["train", "lacks.py"], "say which task of lacks.py to train"),
    (["train", "lacks.py:task"], "task = hocket.Task(model=..., data=...)"),
    (["train", "number.py:task"], "is not a hocket.Task"),
    (["train", "raises.py:task"], "raises.py, line 2: ZeroDivisionError: division by zero"),
    (["train", "imports.py:task"], "No module named 'nosuchmodule'"),
    (["train", "own.py:no_data"], "Task.data must be (train, test)"),
    (["train", "own.py:no_samples"], "train has no samples"),
    (["train", "own.py:uneven"], "train has 64 inputs but 3 targets"),
    (["train", "syntax.py:task"], "syntax.py, line 2: SyntaxError"),
    (["train", "two_lines.py:task"], "ValueError: one"),
    (["train", "exits.py:task"], "exits.py"),
    (["train", "wordless.py:task"], "wordless.py, line 3: E: its own __str__ raises"),
    (["train", "own.py:no_model"], "Task.model must give a torch.nn.Module"),
    (["train", "own.py:no_parameters"], "no trainable parameters"),
    (["train", "epochs.py:task"], "epochs.py, line 3: Task.epochs must be a whole number, 1 or more; got 'two'"),
    (["train", "batch.py:task"], "Task.batch must be a whole number, 1 or more; got 0"),
    (["train", "lr.py:task"], "Task.lr"),
    (["train", "optimizer.py:task"], "Task.optimizer"),
    (["train", "x" * 300 + ".py:task"], "there is no file"),
    (["train", "\udcff.py:task"], "task must be UTF-8 text"),
    # torch's own refusals of an optimizer's options.
    ([*DIGITS, "--optimizer", "adam:eps=-1"], "eps"),
    ([*DIGITS, "--optimizer", "sgd:nesterov=true", "--momentum", "0"], "Nesterov"),
    ([*DIGITS, "--engine", "mpi", "--hosts", "a:many"], "hosts"),
    ([*DIGITS, "--engine", "threads:deadline=-1"], "deadline"),
    # Where to write.
    ([*DIGITS, "--out", "a-folder"], "a-folder exists already"),
    ([*DIGITS, "--out", "a-file"], "a-file exists already"),
    ([*DIGITS, "--out", "a-file", "--force"], "cannot write to a-file"),
    ([*DIGITS, "--out", "a-file/run"], "cannot write to a-file/run: Not a directory"),
    ([*DIGITS, "--out", "x" * 300], "cannot write to x"),
    ([*DIGITS, "--out", "x" * 300, "--force"], "cannot write to x"),
    ([*DIGITS, "--out", "\udcff"], "the name of the folder must be UTF-8 text"),
    ([*DIGITS, "--data", "\udcff"], "data must be UTF-8 text"),
    # Data.
    (["train", "mnist-mlp", "--data", "nowhere"], "--data nowhere: there is no such directory"),
    # Launching.
    (["launch"], "Missing argument"),
    (["launch", "gone.py"], "there is no script gone.py"),
    (["launch", "--bogus", "lacks.py"], "hocket launch has no option --bogus; its options come before the script"),
    (["launch", "-m", "lacks.py"], "lacks.py is a file: leave out -m"),
    (["launch", "a-folder"], "there is no script a-folder"),
    (["launch", "-n", "0", "lacks.py"], "workers must be 1 or more"),
    (
        ["launch", "--engine", "thread", "lacks.py"],
        "did you mean threads?",
    ),
    (["launch", "--sim", "compute", "lacks.py"], "--sim must be KEY=VALUE"),
    (
        ["launch", "--sim", "stragglers=5x3", "lacks.py"],
        "makes 5 workers slow, but there are 2",
    ),
    (
        ["launch", "--deadline", "nan", "lacks.py"],
        "deadline must be finite",
    ),
    (["launch", "x" * 300], "there is no script"),
    (["launch", "--engine", "threads", "--hosts", "a:2", "lacks.py"], "--hosts has no meaning on engine threads"),
    (["launch", "--deadline", "1e12", "lacks.py"], "deadline must be greater than 0"),
    (["demo", "--engine", "thread"], "did you mean threads?"),
    (["demo", "--svg", "nowhere/table.svg"], "cannot write to nowhere/table.svg"),
    (["demo", "--svg", "a-folder"], "cannot write to a-folder"),
    # Resuming.
    (["resume", "nowhere"], "nowhere is no run's folder"),
    (["resume", "x" * 300], "is no run's folder"),
    (["resume", "a-folder", "epochs"], "a change must be KEY=VALUE, got 'epochs'"),
]


@pytest.fixture(autouse=True)
def _in_a_folder_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, monkeypatch)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)


@pytest.mark.parametrize(("args", "fragment"), CASES, ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else "")
def test_refused(args: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fragment in refusal(args, capsys)


@pytest.mark.parametrize(
    ("size", "fragment"),
    [(1000, "truncated: 1000 of 9912422 bytes"), (9_912_422, "wrong checksum"), (9_912_423, "too long")],
)
def test_damaged_data_is_refused(size: int, fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open(mnist.FILES[0].name, "wb") as file:
        file.truncate(size)
    line = refusal(["train", "mnist-mlp", "--data", "."], capsys)
    assert fragment in line and mnist.FILES[0].name in line


def test_data_that_is_nowhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(mnist, "MIRRORS", ())
    monkeypatch.delenv("HOCKET_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    line = refusal(["train", "mnist-cnn"], capsys)
    assert "--data DIR" in line and all(f.name in line for f in mnist.FILES)


def test_the_batch_it_suggests_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "use --batch 718 " in refusal([*DIGITS, "--batch", "1000"], capsys)
    assert cli.run([*DIGITS, "--batch", "718", "--json"]) == 0


def test_more_workers_than_samples_need_fewer_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--batch" not in refusal([*DIGITS, "--workers", "2000"], capsys)
