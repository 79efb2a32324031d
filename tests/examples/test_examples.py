"""Every script in examples/ runs, learns, and finds the same with one worker, two and three."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from covering import covering
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import hocket
from hocket.run.launch import launch
from hocket.run.spec import RunSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`hocket launch` in this process, without the seconds that a fresh process takes to import PyTorch.

    On the simulator ranks take turns, so that what they draw from PyTorch's one generator is the same every time.
    """
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name: str, *args: str, ranks: int = 2, engine: str = "sim") -> str:
        spec = RunSpec.from_mapping({"task": "", "workers": ranks, "engine": engine})
        script = str(EXAMPLES / f"{name}.py")
        launch(script, list(args), spec, module=False, out=tmp_path / "run", force=True)
        return capfd.readouterr().out

    return run


def number(pattern: str, text: str) -> float:
    found = re.search(pattern.replace("#", r"(-?[\d.]+)"), text)
    assert found, f"{pattern} is not in: {text}"
    return float(found[1])


def test_every_example_is_tested_and_says_how_to_run_it() -> None:
    source = Path(__file__).read_text()
    for name in SCRIPTS:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert f'run("{name}"' in source, name
        assert 40 <= text.count("\n") <= 120, name
        for how in ("hocket launch -n", "mpiexec -n", "torchrun --nproc-per-node", "    python"):
            assert re.search(rf"{how}[ 0-9]*(python )?examples/{name}\.py", text), (name, how)


def test_image_classifier(run: Run, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "digits.safetensors")
    whole = run("image_classifier", checkpoint, engine="threads")
    assert number("final accuracy #", whole) > 0.95
    again = run("image_classifier", checkpoint, engine="threads")
    assert "epoch" not in again.partition("2 workers")[0], "there is nothing left to train"
    assert number("final accuracy #", again) == number("final accuracy #", whole)


def test_char_transformer(run: Run) -> None:
    said = run("char_transformer")
    assert number("# before", said) > 3.2
    assert number("# after", said) < 0.7
    assert "This is the maiden all" in said or "This is the man all" in said, said


def test_gan(run: Run) -> None:
    said = run("gan")
    assert number("before: # from the circle", said) > 1
    assert number("after: # from the circle", said) < 0.25
    assert number(r"after.* # of it reached", said) > 0.9


@pytest.mark.parametrize("text", ["local-sgd:every=4", "diloco:every=4", "gossip:kind=dpsgd"])
def test_table_regression(run: Run, text: str) -> None:
    assert number("R2 #", run("table_regression", text, ranks=2)) > 0.45


def test_recommender(run: Run) -> None:
    assert number("# after", run("recommender")) < 0.45


def test_recommender_with_a_server(run: Run) -> None:
    """Who comes when is the machine's affair, and changes the third digit: no update is lost, and none counts twice."""
    plain = "server:mode=async,stale=none,lookahead=0"
    simulated = number("# after", run("recommender", plain, ranks=3))
    assert number("# after", run("recommender", plain, ranks=3, engine="threads")) == pytest.approx(simulated, abs=0.03)
    assert simulated < 0.45


def test_fine_tuning(run: Run) -> None:
    said = run("fine_tuning")
    assert number("0 to 4.* accuracy #", said) > 0.9
    assert number("5 to 9: # parameters", said) == 128 * 5 + 5
    assert number("5 to 9.* accuracy #", said) > 0.75


class TestExplicitlyParallel:
    def test_kmeans_is_that_of_one_machine(self, run: Run) -> None:
        said = [run("kmeans", ranks=ranks, engine="threads") for ranks in (1, 2, 3)]
        inertia = number("distances #", said[0])
        for one in said:
            assert number("distances #", one) == pytest.approx(inertia, rel=1e-6)
            assert number("own kind: #", one) == number("own kind: #", said[0]) > 0.6
        assert number("# bytes", said[0]) == 0 < number("# bytes", said[1]) < number("# bytes", said[2])

        import kmeans

        data = load_digits().data
        with hocket.join() as team:
            first = kmeans.far_apart(team.comm, torch.tensor(data), kmeans.CLUSTERS)
        theirs = KMeans(kmeans.CLUSTERS, init=first.numpy(), n_init=1, tol=0, algorithm="lloyd").fit(data)
        assert inertia == pytest.approx(theirs.inertia_, rel=1e-6)

    def test_ca_svm(self, run: Run) -> None:
        import ca_svm

        said = {ranks: run("ca_svm", ranks=ranks, engine="threads") for ranks in (1, 2, 3)}
        digits = load_digits()
        data, odd = digits.data, digits.target % 2
        plain = SVC(C=10.0, gamma=0.02 / 16).fit(data[ca_svm.TEST :], odd[ca_svm.TEST :])
        whole = plain.score(data[: ca_svm.TEST], odd[: ca_svm.TEST])
        assert number("accuracy #", said[1]) == pytest.approx(whole, abs=6e-4), "one worker has the plain SVM"
        for ranks, one in said.items():
            sizes = [int(word) for word in re.findall(r"\d+", re.findall(r"\[.*\]", one)[0])]
            assert len(sizes) == ranks and sum(sizes) == len(data) - ca_svm.TEST and min(sizes) > 0
            assert number("# bytes sent in training", one) == 0
            assert number("accuracy #", one) > whole - 0.03


def test_own_strategy(run: Run) -> None:
    mine, theirs = (run("own_strategy", *text, ranks=3, engine="threads") for text in ((), ("allreduce",)))
    assert number("accuracy #", mine) > 0.95 and number("accuracy #", theirs) > 0.95
    assert number("# bytes", mine) < number("# bytes", theirs) / 3.5
    assert number("accuracy #", run("own_strategy")) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "name"), covering(["mpi", "mpiexec", "torchrun", "python"], SCRIPTS))
def test_every_launcher(launcher: str, name: str, tmp_path: Path) -> None:
    here = Path(sys.executable).parent
    words: dict[str, list[str | Path]] = {
        "mpi": [sys.executable, "-m", "hocket", "launch", "--engine", "mpi", "-n", "2", "--out", tmp_path / "run"],
        "mpiexec": [here / "mpiexec", "-n", "2", sys.executable],
        "torchrun": [here / "torchrun", "--nproc-per-node", "2"],
        "python": [sys.executable],
    }
    done = subprocess.run([*words[launcher], EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d\.\d\d", done.stdout), done.stdout
