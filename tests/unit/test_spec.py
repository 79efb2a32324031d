"""What a run is, from Python, TOML and the command line."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hocket
from hocket.app import cli
from hocket.compress import compressor
from hocket.core.errors import UserError
from hocket.core.registry import Registry, convert
from hocket.drivers.plan import Cadence, Goal, Plan
from hocket.engines.catalogue import engine
from hocket.engines.sim import Sim
from hocket.run import place
from hocket.run.resolve import cadence, resolve, settled
from hocket.run.spec import RunSpec, read_toml
from hocket.strategies import strategy
from hocket.strategies.local_sgd import LocalSGD
from hocket.tasks import task

# Characters beyond 0xFFFF: see test_a_spec_with_an_emoji.
words = st.text(st.characters(min_codepoint=1, max_codepoint=0xFFFF, exclude_categories=["Cs"]), min_size=1).filter(
    lambda s: s != "none"
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
FIELDS = dict(
    task=words,
    strategy=words,
    layout=st.just("") | words,
    compress=words,
    engine=st.none() | words,
    driver=st.sampled_from(["auto", "compiled", "pytorch"]),
    workers=st.none() | st.integers(),
    epochs=st.none() | st.integers(),
    steps=st.none() | st.integers(),
    batch=st.none() | st.integers(),
    lr=st.none() | numbers,
    momentum=st.none() | numbers,
    optimizer=st.none() | words,
    warmup=numbers,
    scale_lr=st.booleans(),
    lr_decay=st.none() | numbers,
    schedule=st.none() | words,
    clip=numbers,
    accumulate=st.integers(),
    autocast=st.sampled_from(["none", "bf16"]),
    loaders=st.integers(),
    seed=st.integers(),
    validation=st.none() | numbers,
    target=st.none() | numbers,
    evaluate_every=st.none() | numbers,
    own_metrics=st.booleans(),
    train_metrics=st.booleans(),
    timeline=st.booleans(),
    data=st.none() | words,
    test_data=st.none() | words,
    device=words,
    deadline=numbers,
    trace=st.integers(),
    checkpoint_every=st.just("") | words,
    hosts=st.just("") | words,
    mpiexec=st.just("") | words,
    bind=st.sampled_from(["auto", "none", "core"]),
    sim=st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Sim)]), words),
)


def through_a_file(spec: RunSpec, folder: Path) -> RunSpec:
    (folder / "spec.toml").write_text(spec.to_toml())
    return RunSpec.from_mapping(read_toml(folder / "spec.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spec")


@settings(max_examples=150)
@given(spec=st.builds(RunSpec, **FIELDS))
def test_a_spec_survives_its_file(spec: RunSpec, folder: Path) -> None:
    assert through_a_file(spec, folder) == spec


def test_the_property_above_sets_every_field() -> None:
    """A field that is added to RunSpec must be added to it."""
    assert {f.name for f in dataclasses.fields(RunSpec)} == set(FIELDS)


def test_a_spec_with_an_emoji(tmp_path: Path) -> None:
    spec = RunSpec("digits", data="/home/\N{GRINNING FACE}")
    assert through_a_file(spec, tmp_path) == spec


class TestConvert:
    @pytest.mark.parametrize(
        ("value", "to", "expected"),
        [
            ("3", int, 3),
            (3.0, int, 3),
            ("0.5", float, 0.5),
            (2, float, 2.0),
            ("True", bool, True),
            (False, bool, False),
            ("none", int | None, None),
            ("7", int | None, 7),
            ("x", str, "x"),
        ],
    )
    def test_accepts(self, value: Any, to: Any, expected: Any) -> None:
        found = convert(value, to, "it")
        assert found == expected and type(found) is type(expected)

    @pytest.mark.parametrize(
        ("value", "to"),
        [("3.5", int), (3.5, int), (True, int), (True, float), ("", int), ("nan", float), (float("inf"), float),
         (10**400, float), ("yes", bool), (1, bool), (3, str), ([], int), ([1], str)],
    )  # fmt: skip
    def test_refuses_and_names_what_it_is(self, value: Any, to: Any) -> None:
        with pytest.raises(UserError, match=r"^the thing must be .*; got"):
            convert(value, to, "the thing")


class TestNames:
    def test_options(self) -> None:
        assert strategy.make("local-sgd:every=16,momentum=reset") == LocalSGD(every=16, momentum="reset")
        assert strategy.make("local-sgd: every = 16 , momentum = reset") == LocalSGD(every=16, momentum="reset")
        assert strategy.make("local-sgd") == strategy.make("local-sgd:") == LocalSGD()

    @pytest.mark.parametrize("registry", [task, strategy, engine, compressor], ids=lambda r: r.plural)
    def test_what_the_list_shows_can_be_pasted_back(self, registry: Registry[Any]) -> None:
        rows = list(registry.lines())
        assert rows
        for name, options, line in rows:
            assert registry.make(f"{name}:{options}") == registry.make(name)
            assert line and "\n" not in line


class TestResolved:
    made = tiny.task(batch=6, epochs=7, lr=0.25, momentum=0.5)

    def resolve(self, **given: Any) -> RunSpec:
        """What the run's folder says: the plan, and what it was made from."""
        spec = RunSpec("t", **given)
        return settled(spec, self.made, resolve(spec, self.made, 24), "threads")

    def test_takes_the_defaults_of_the_task(self) -> None:
        spec = self.resolve()
        assert (spec.workers, spec.epochs, spec.steps, spec.batch) == (2, 7, None, 6)
        assert (spec.lr, spec.momentum, spec.optimizer) == (0.25, 0.5, "sgd")

    def test_keeps_what_was_given(self) -> None:
        given = dict(workers=3, steps=5, batch=2, lr=0.125, momentum=0.0, optimizer="rmsprop", seed=9)
        spec = self.resolve(**given)
        assert {k: getattr(spec, k) for k in given} == given
        assert spec.epochs is None

    def test_is_complete(self) -> None:
        other = tiny.task(batch=1, epochs=1, lr=1.0)
        plan = resolve(self.resolve(), other, 24)
        assert plan == resolve(RunSpec("t"), self.made, 24)
        assert settled(self.resolve(), other, plan, "threads") == self.resolve()

    def test_serial_has_one_worker(self) -> None:
        assert self.resolve(strategy="serial").workers == 1

    def test_an_optimizer_without_momentum_does_not_get_the_tasks(self) -> None:
        assert self.resolve(optimizer="adam").momentum == 0.0


class TestCommand:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def run(self, *args: str) -> None:
        assert cli.run(["train", *args, "--json"]) == 0

    def test_overrides_beat_flags_beat_the_file(self) -> None:
        Path("base.toml").write_text(
            'task = "blobs"\nengine = "sim"\nsteps = 3\nseed = 1\nlr = 0.1\nbatch = 8\n'
            '[sim]\ncompute = "5ms"\nlatency = "1us"\n'
        )
        flags = ["--lr", "0.2", "--batch", "16", "--sim", "latency=2us"]
        self.run("digits", "batch=4", "--spec", "base.toml", *flags, "--out", "run")
        spec = RunSpec.from_mapping(read_toml(Path("run/spec.toml")))
        assert (spec.task, spec.steps, spec.seed) == ("digits", 3, 1)
        assert (spec.lr, spec.batch) == (0.2, 4)
        assert spec.sim == {"compute": "5ms", "latency": "2us"}

    def test_a_flag_given_twice(self, capsys: pytest.CaptureFixture[str]) -> None:
        for command, flag, name, several in (
            ("tune", "-s", "--strategy", "; hocket compare takes several"),
            ("train", "--evaluate-every", "--evaluate-every", ""),
        ):
            assert cli.run([command, "digits", flag, "1", flag, "2"]) == 2
            assert capsys.readouterr().err == f"hocket: {name} is given 2 times; give it once{several}\n"

    def test_an_override_takes_a_setting_back(self) -> None:
        Path("base.toml").write_text('task = "digits"\nengine = "threads"\nepochs = 20\n')
        self.run("--spec", "base.toml", "--steps", "3", "--out", "run", "epochs=none")
        assert json.loads(Path("run/result.json").read_text())["steps"] == 3

    def test_steps_replace_the_epochs_of_a_file(self) -> None:
        self.run("digits", "--engine", "threads", "--epochs", "1", "--out", "run")
        self.run("--spec", "run/spec.toml", "--steps", "3", "--out", "short")

    def test_force_replaces_what_is_hockets_and_keeps_the_rest(self) -> None:
        args = ["digits", "--engine", "threads", "--steps", "3", "--out", "run"]
        self.run(*args)
        ours = {p.name: p.read_bytes() for p in Path("run").iterdir()}
        models = {"model.safetensors", "best.safetensors"}
        assert set(ours) == {"spec.toml", "events.jsonl", "curve.csv", "result.json"} | models
        Path("run/notes.txt").write_text("mine")
        self.run(*args, "--seed", "1", "--force")
        again = {p.name: p.read_bytes() for p in Path("run").iterdir()}
        assert again.pop("notes.txt") == b"mine"
        assert set(again) == set(ours)
        assert all(again[name] != ours[name] for name in ours)

    def test_default_folders_do_not_collide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        noon = datetime.datetime(2030, 1, 2, 12)
        monkeypatch.setattr(place, "datetime", SimpleNamespace(datetime=SimpleNamespace(now=lambda: noon)))
        for _ in range(3):
            self.run("digits", "--engine", "threads", "--steps", "1", "--strategy", "local-sgd:every=2")
        base = "digits-local-sgd-20300102-120000"
        assert sorted(p.name for p in Path("runs").iterdir()) == [base, f"{base}-2", f"{base}-3"]
        assert all((run / "result.json").exists() for run in Path("runs").iterdir())


class TestCadence:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [("", Cadence()), ("2", Cadence(epochs=2)), ("30s", Cadence(seconds=30)), ("10min", Cadence(seconds=600)),
         ("1h", Cadence(seconds=3600)), ("0.5h", Cadence(seconds=1800))],
    )  # fmt: skip
    def test_is_epochs_or_time(self, text: str, expected: Cadence) -> None:
        assert cadence(text) == expected

    def test_may_be_a_number_in_python_and_toml(self) -> None:
        assert RunSpec.from_mapping({"task": "t", "checkpoint_every": 2}).checkpoint_every == "2"


class TestPlan:
    @pytest.mark.parametrize("given", [{}, {"target": 0.5, "checkpoint_every": "2"}, {"checkpoint_every": "1h"}])
    def test_survives_strict_json(self, given: dict[str, Any]) -> None:
        plan = resolve(RunSpec("t", **given), tiny.task(lower_is_better=True), 24)
        assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan

    def test_a_goal(self) -> None:
        assert Goal(0.5).reached(0.5) and not Goal(0.5).reached(0.49)
        assert Goal(0.5, lower_is_better=True).reached(0.5) and not Goal(0.5, lower_is_better=True).reached(0.51)
        right = float(torch.tensor([1.0] * 342 + [0.0] * 18).mean())
        assert right < 0.95 and Goal(0.95).reached(right), "342 of 360 are 0.95, whatever 32 bits make of it"
        assert not any(Goal.never().reached(metric) for metric in (1e300, math.inf, math.nan))

    def test_counts_the_steps_of_the_whole_run(self) -> None:
        made = tiny.task(epochs=7)
        assert resolve(RunSpec("t", workers=2, batch=4), made, 24).steps == 7 * 3
        assert resolve(RunSpec("t", workers=2, batch=4), made, 25).steps == 7 * 4
        assert resolve(RunSpec("t", workers=2, batch=4, steps=5), made, 24).steps == 5


def test_every_setting_is_a_flag_a_key_and_an_argument() -> None:
    flags = set(inspect.signature(cli.train).parameters) - {"words", "spec", "out", "force", "as_json"}
    names = {f.name for f in dataclasses.fields(RunSpec)} - {"task"}
    assert flags == names
    assert set(inspect.signature(cli.compare).parameters) >= names
    assert set(inspect.signature(hocket.fit).parameters) == names | {"task", "out", "force", "progress"}
    assert all(f"    {name}: " in (hocket.fit.__doc__ or "") for name in names)


_PARENT = "from hocket.run.train import prepare; prepare(RunSpec('digits', engine='mpi', workers=2))"
_RANK = "import hocket.engines.processes, hocket.engines.one_host, hocket.run.rank"


@pytest.mark.parametrize(("code", "unwanted"), [(_PARENT, {"numba"}), (_RANK, set())])
def test_what_takes_long_to_import_is_not_where_nobody_needs_it(code: str, unwanted: set[str]) -> None:
    """Of start-up, most is imports."""
    unwanted |= {"torch._dynamo", "sklearn"}
    asked = f"import sys; from hocket.run.spec import RunSpec; {code}; print(*({unwanted} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", asked], timeout=60, text=True).strip() == ""


def test_a_spec_is_read_without_pytorch() -> None:
    """`hocket --help` need not wait for it."""
    code = "import sys, hocket.app.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
