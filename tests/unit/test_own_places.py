"""Tasks and strategies in a user's own files, packages and modules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from covering import first
from tiny import task as tiny_task

import hocket
from hocket.app import cli
from hocket.run import loading
from hocket.strategies import strategy

DATA = """
import torch
inputs = torch.randn(24, 4)
samples = inputs, (inputs[:, 0] > 0).long()
"""
TRAIN = """
import torch
import hocket
from .data import samples
task = hocket.Task(model=lambda: torch.nn.Linear(4, 2), data=(samples, samples), batch=4, epochs=1)
"""
RUNS = '\nif __name__ == "__main__":\n    print(hocket.fit(task, engine="ENGINE", progress=False).task)\n'
STRATEGY = """
from dataclasses import dataclass
from hocket.core.worker import Strategy, strategy

@strategy("my-own")
@dataclass(frozen=True)
class MyOwn(Strategy):
    \"\"\"Average the gradients.\"\"\"

    every: int = 2

    @property
    def needs(self):
        return frozenset({"collectives"})

    def worker(self, w):
        while (g := (yield)) is not None:
            w.average(g)
            w.descend(g)
        w.average_buffers()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package, one without __init__.py, and a file with a strategy; what is imported is forgotten."""
    for folder in ("pkg_of_test", "bare_of_test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.py").write_text(DATA)
        (tmp_path / folder / "train.py").write_text(TRAIN + RUNS)
    (tmp_path / "pkg_of_test/__init__.py").write_text("")
    (tmp_path / "own_of_test.py").write_text(STRATEGY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    known = dict(strategy._classes)
    yield tmp_path
    strategy._classes = known
    for name in set(sys.modules) - before:
        if "of_test" in name:
            del sys.modules[name]


def fit(task: str | hocket.Task, **settings: object) -> hocket.Result:
    return hocket.fit(task, **{"engine": "threads", "progress": False} | settings)  # type: ignore[arg-type]


class TestTasks:
    @pytest.mark.parametrize("name", ["pkg_of_test.train:task", "pkg_of_test/train.py:task"])
    @pytest.mark.parametrize("engine", ["threads", "sim"])
    def test_in_a_package(self, here: Path, name: str, engine: str) -> None:
        assert fit(name, engine=engine).task == f"{here}/pkg_of_test/train.py:task"
        assert "pkg_of_test.train" in sys.modules, "a part of its package"

    def test_in_a_package_without_init(self, here: Path) -> None:
        assert fit("bare_of_test.train:task").task == "bare_of_test.train:task"

    def test_in_the_package_itself(self, here: Path) -> None:
        (here / "pkg_of_test/__init__.py").write_text("from .train import task")
        assert fit("pkg_of_test:task").task == f"{here}/pkg_of_test/__init__.py:task"
        assert fit("pkg_of_test.train:task").verdict == "finished"

    @pytest.mark.parametrize("engine", first(1, ["torch", "mpi"]))
    def test_in_a_package_by_fresh_processes(self, here: Path, engine: str) -> None:
        assert fit("pkg_of_test.train:task", engine=engine).verdict == "finished"

    @pytest.mark.parametrize(
        ("package", "engine", "name"),
        [
            ("pkg_of_test", "mpi", "{here}/pkg_of_test/train.py:task"),
            ("bare_of_test", "torch", "bare_of_test.train:task"),
        ],
    )
    def test_run_as_a_module(self, here: Path, package: str, engine: str, name: str) -> None:
        path = here / package / "train.py"
        path.write_text(path.read_text().replace("ENGINE", engine))
        done = subprocess.run([sys.executable, "-m", f"{package}.train"], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == name.format(here=here), done.stderr

    def test_a_top_level_fit_is_not_run_again(self, here: Path) -> None:
        (here / "pkg_of_test/train.py").write_text(TRAIN + "hocket.fit(task)\nafter = 1\n")
        module = loading.load_place("pkg_of_test.train", 0)
        assert hasattr(module, "task") and not hasattr(module, "after")

    @pytest.mark.parametrize(
        ("name", "line"),
        [
            ("pkg_of_test.train:nothing", "nothing in .*train.py does not exist; write there"),
            ("pkg_of_test.data:samples", "samples in .*data.py is not a hocket.Task"),
            ("pkg_of_test.nothing:task", "pkg_of_test.nothing is not a module that can be found from"),
            ("nothing_here:task", "nor a module that can be found from"),
            ("bare_of_test/train.py:task", "put an __init__.py into its folder, or name it as a module"),
            ("math:pi", "not a task or strategy of Hocket's, nor a module"),
            ("pkg_of_test/train.py", "say which task of"),
        ],
    )
    def test_what_cannot_be_found(self, here: Path, name: str, line: str) -> None:
        with pytest.raises(hocket.UserError, match=line) as caught:
            fit(name)
        assert "\n" not in str(caught.value)

    def test_two_packages_of_one_name(self, here: Path) -> None:
        fit("pkg_of_test.train:task")
        other = here / "elsewhere/pkg_of_test"
        other.mkdir(parents=True)
        for name, text in (("__init__.py", ""), ("data.py", DATA), ("train.py", TRAIN)):
            (other / name).write_text(text)
        with pytest.raises(hocket.UserError, match=r"another module called pkg_of_test\.train is in use"):
            fit(f"{other}/train.py:task")

    def test_a_fit_in_what_is_imported(self, here: Path) -> None:
        (here / "pkg_of_test/data.py").write_text(DATA + "import hocket\nhocket.fit('digits')\n")
        with pytest.raises(hocket.UserError, match=r"does not exist|calls hocket\.fit while it is imported"):
            fit("pkg_of_test.train:task")


class TestStrategies:
    @pytest.mark.parametrize(
        "text",
        ["own_of_test.py:my-own", "own_of_test.py:MyOwn:every=3", "own_of_test:my-own", "./own_of_test.py:MyOwn"],
    )
    def test_on_any_task(self, here: Path, text: str) -> None:
        result = fit(tiny_task(), strategy=text)
        assert result.strategy.startswith(f"{here}/own_of_test.py:")
        allreduce = fit(tiny_task())
        assert all(tensor.equal(allreduce.state[name]) for name, tensor in result.state.items())

    def test_in_fresh_processes(self, here: Path) -> None:
        assert fit("digits", strategy="own_of_test:my-own", steps=2, engine="torch").verdict == "finished"

    def test_in_compare(self, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        args = ["compare", "digits", "-s", "./own_of_test.py:my-own:every=1", "-s", "serial", "--steps", "2"]
        assert cli.run([*args, "--seeds", "1", "--engine", "threads", "--out", "out"]) == 0
        assert "own_of_test.py:my-own:every=1 " in capsys.readouterr().out
        assert (here / "out/own_of_test.py-my-own-every1-2-seed0").is_dir()

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("own_of_test.py:other", "other in .* is no strategy; write @strategy"),
            ("own_of_test.py:my-own:evry=2", "no option of strategy .* is called 'evry'; did you mean every"),
            ("nothing.py:my-own", "there is no file .*nothing.py"),
            ("nothing_here:own", "nor a module that can be found"),
        ],
    )
    def test_what_cannot_be_found(self, here: Path, text: str, line: str) -> None:
        with pytest.raises(hocket.UserError, match=line):
            fit(tiny_task(), strategy=text)

    def test_a_name_that_is_taken(self, here: Path) -> None:
        (here / "own_of_test.py").write_text(STRATEGY.replace("my-own", "allreduce"))
        with pytest.raises(hocket.UserError, match="two strategies are called allreduce; give yours another name"):
            fit(tiny_task(), strategy="own_of_test.py:MyOwn")


class TestWhatIsNoTask:
    @pytest.mark.parametrize("given", [5, None, hocket.Task, object(), ["digits"]])
    def test_is_said_in_one_line(self, given: object) -> None:
        with pytest.raises(hocket.UserError, match=r"task must be a hocket\.Task, or text"):
            fit(given)  # type: ignore[arg-type]

    def test_in_resume(self, tmp_path: Path) -> None:
        with pytest.raises(hocket.UserError, match=r"task must be a hocket\.Task"):
            hocket.resume(tmp_path, task=5)  # type: ignore[arg-type]


def test_a_task_without_a_name_goes_on(tmp_path: Path) -> None:
    fit(tiny_task(), epochs=1, checkpoint_every=1, out=tmp_path / "run")
    with pytest.raises(hocket.UserError, match=r"has no name; give it: hocket\.resume\('.*run', task=\.\.\.\)"):
        hocket.resume(tmp_path / "run", epochs=2, progress=False)
    on = hocket.resume(tmp_path / "run", task=tiny_task(), epochs=2, progress=False)
    assert on.epochs == 2
    whole = fit(tiny_task(), epochs=2)
    assert all(on.state[name].equal(whole.state[name]) for name in whole.state)
