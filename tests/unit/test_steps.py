"""What a step is made of: schedules, options of optimizers, clipping, accumulation, autocast, and who loads samples."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import Dataset

import hocket
from hocket import optim
from hocket.core.errors import UserError
from hocket.core.shard import Shards
from hocket.optim.schedules import SCHEDULES, Rates

Made = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def by_hand(
    task: hocket.Task,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    epochs: int,
    batch: int,
    schedule: Made | None = None,
    per_step: bool = False,
    clip: float = math.inf,
) -> dict[str, Tensor]:
    """A plain loop in PyTorch, on the samples that Hocket takes."""
    model = task.build_model(0)
    stepper = optimizer(model.parameters())
    rates = schedule(stepper) if schedule else None
    train, _ = task.load()
    for epoch in range(epochs):
        for index in Shards(len(train), 1, batch, 0).epoch(epoch, 0):
            inputs, targets = train.take(index)
            stepper.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepper.step()
            if rates and per_step:
                rates.step()
        if rates and not per_step:
            rates.step()
    return dict(model.state_dict())


def alike(found: hocket.Result, wanted: hocket.Result | dict[str, Tensor], tolerance: float = 1e-6) -> bool:
    state = wanted if isinstance(wanted, dict) else wanted.state
    return all(torch.allclose(found.state[n], t, rtol=1e-5, atol=tolerance) for n, t in state.items())


class TestSchedules:
    def test_every_one_that_can_be_written_as_text_has_a_name(self) -> None:
        assert {"cosine-annealing", "step", "multi-step", "exponential", "one-cycle", "linear", "cyclic"} <= set(
            SCHEDULES
        )
        assert not {"lambda", "sequential", "reduce-lr-on-plateau"} & set(SCHEDULES)

    CASES: ClassVar[list[tuple[str, Made]]] = [
        ("cosine-annealing:T_max=3", lambda o: lr_scheduler.CosineAnnealingLR(o, 3)),
        ("CosineAnnealingLR:T_max=3,eta_min=0.01", lambda o: lr_scheduler.CosineAnnealingLR(o, 3, 0.01)),
        ("cosine-annealing", lambda o: lr_scheduler.CosineAnnealingLR(o, 4)),
        ("step:step_size=2,gamma=0.5", lambda o: lr_scheduler.StepLR(o, 2, 0.5)),
        ("multi-step:milestones=1/3,gamma=0.2", lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.2)),
        ("exponential:gamma=0.7", lambda o: lr_scheduler.ExponentialLR(o, 0.7)),
        ("linear:start_factor=0.2,total_iters=3", lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=3)),
        ("one-cycle:per=step", lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=24)),
        ("cyclic:base_lr=0.01,step_size_up=5,per=step", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 5)),
        ("cosine-annealing-warm-restarts:T_0=2,per=step", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2)),
    ]

    @pytest.mark.parametrize(("text", "made"), CASES, ids=[text for text, _ in CASES])
    def test_train_as_torch_does(self, text: str, made: Made) -> None:
        """Momentum too, which some schedules change with the rate."""
        task = tiny.task(24, batch=4, epochs=4, momentum=0.9, schedule=text)
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
        wanted = by_hand(task, sgd, epochs=4, batch=4, schedule=made, per_step="per=step" in text)
        assert alike(fit(task, workers=1), wanted)
        assert alike(fit(tiny.task(24, batch=2, epochs=4, momentum=0.9), workers=2, schedule=text), wanted)

    @given(st.integers(1, 30), st.floats(0.0, 0.05), st.integers(0, 60))
    @settings(max_examples=30)
    def test_a_rate_depends_on_the_step_alone(self, length: int, least: float, step: int) -> None:
        text = f"cosine-annealing:T_max={length},eta_min={least}"
        rates = [Rates(text, "sgd", 0.1, 0.0, 99, None).at(step)["lr"] for _ in range(2)]
        assert rates[0] == rates[1]
        wanted = lr_scheduler.CosineAnnealingLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), length, least)
        for _ in range(step):
            wanted.optimizer.step()
            wanted.step()
        assert rates[0] == pytest.approx(wanted.get_last_lr()[0], abs=1e-12)

    def test_its_factor_comes_beside_warm_up_decay_and_scaling(self) -> None:
        seen: list[float] = []
        task = tiny.task(24, epochs=3, on_step=lambda p: seen.append(p.lr) if p.worker == 0 else None)
        fit(task, workers=2, lr_decay=0.5, warmup=1, scale_lr=True, schedule="exponential:gamma=0.1")
        warm = [0.1 + 0.1 * part for part in (1 / 3, 2 / 3, 1)]
        assert seen == pytest.approx([*warm, *[0.2 * 0.05] * 3, *[0.2 * 0.05**2] * 3])

    def test_servers_hear_of_it(self) -> None:
        settings: dict[str, Any] = dict(workers=2, epochs=3, schedule="one-cycle:per=step", momentum=0.9)
        assert alike(fit(tiny.task(), strategy="server:mode=sync", **settings), fit(tiny.task(), **settings))

    @pytest.mark.parametrize("strategy", ["allreduce", "server:mode=async", "hogwild", "gossip:kind=adpsgd"])
    def test_a_saved_run_goes_on_with_it(self, strategy: str, tmp_path: Path) -> None:
        settings: dict[str, Any] = dict(
            engine="sim",
            workers=2,
            strategy=strategy,
            schedule="cosine-annealing:T_max=4",
            clip=0.5,
            accumulate=2,
            batch=2,
        )
        settings |= {"checkpoint_every": 1}  # where workers meet, who comes when changes
        whole = fit(tiny.task(), epochs=4, out=tmp_path / "whole", **settings)
        fit(tiny.task(), epochs=2, out=tmp_path / "run", **settings)
        on = hocket.resume(tmp_path / "run", task=tiny.task(), epochs=4, progress=False)
        assert all(on.state[name].equal(whole.state[name]) for name in whole.state)

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("cosine-anealing", "no schedule is called 'cosine-anealing'; did you mean cosine-annealing"),
            ("lambda", "schedule lambda is made from functions or other schedules: give one as Task.schedule"),
            ("own", "schedule own is a function on the task, Task.schedule, and this task has none"),
            ("own:step_size=3", "no option of schedule own is called 'step_size'"),
            ("step", "option step_size needs a value; write step:step_size=VALUE"),
            ("step:step_size", "option step_size needs a value"),
            ("step:step_siz=3", "no option of schedule step is called 'step_siz'; did you mean step_size"),
            ("step:step_size=3,per=batch", "per must be epoch or step; got 'batch'"),
            ("step:step_size=x", "schedule step:step_size=x: "),
            ("one-cycle:total_steps=2,per=step", "schedule one-cycle:total_steps=2,per=step: .*Tried to step 3 times"),
            ("cosine-annealing:eta_min=-1", "the rate must stay at 0 or more"),
        ],
    )
    def test_refused(self, text: str, line: str) -> None:
        with pytest.raises(UserError, match=line) as caught:
            fit(tiny.task(epochs=3), schedule=text)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("per_step", [False, True])
    def test_a_function_of_the_task_s_makes_one(self, per_step: bool) -> None:
        """Sequences, chains and those of functions; it is told how long the run is."""
        lengths = []

        def made(optimizer: torch.optim.Optimizer, length: int = 24 if per_step else 4) -> lr_scheduler.LRScheduler:
            lengths.append(length)
            warm, rest = lr_scheduler.LinearLR(optimizer, 0.2), lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
            return lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[2])

        task = tiny.task(24, batch=4, epochs=4, schedule=made)
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        wanted = by_hand(task, sgd, epochs=4, batch=4, schedule=made, per_step=per_step)
        assert alike(fit(task, workers=1, schedule="own:per=step" if per_step else None), wanted)
        assert set(lengths) == {24 if per_step else 4}

    def test_a_function_that_fails_or_gives_no_schedule_is_named(self) -> None:
        def fails(optimizer: torch.optim.Optimizer, epochs: int) -> lr_scheduler.LRScheduler:
            raise KeyError("warm")

        with pytest.raises(UserError, match=r"Task\.schedule raised KeyError"):
            fit(tiny.task(schedule=fails))
        for wrong in (lambda o, n: None, lambda o, n: lr_scheduler.ReduceLROnPlateau(o)):
            with pytest.raises(UserError, match=r"Task\.schedule must give one of"):
                fit(tiny.task(schedule=wrong))


class TestOptimizerOptions:
    def test_betas(self) -> None:
        task = tiny.task(24, batch=4, epochs=2, lr=0.01, optimizer="adam:betas=0.8/0.95")
        wanted = by_hand(task, lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95)), epochs=2, batch=4)
        assert alike(fit(task, workers=1), wanted)

    @pytest.mark.parametrize("value", ["0.9", "0.9/0.9/0.9", "0.9/x", "0.9/1", "-0.1/0.9", "/"])
    def test_refused(self, value: str) -> None:
        with pytest.raises(UserError, match="optimizer adam: betas must be"):
            optim.parse(f"adam:betas={value}")


class TestClipping:
    def test_as_torch_does(self) -> None:
        task = tiny.task(24, batch=4, epochs=2)
        wanted = by_hand(task, lambda p: torch.optim.SGD(p, lr=0.1), epochs=2, batch=4, clip=0.2)
        assert alike(fit(task, workers=1, clip=0.2), wanted)
        assert not alike(fit(task, workers=1), wanted)

    @pytest.mark.parametrize("strategy", ["allreduce", "server:mode=sync"])
    @pytest.mark.parametrize("engine", ["threads", "sim"])
    def test_where_gradients_are_averaged_their_mean_is_clipped(self, strategy: str, engine: str) -> None:
        alone = fit(tiny.task(26, batch=6), workers=1, clip=0.1)
        assert alike(fit(tiny.task(26, batch=2), workers=3, clip=0.1, strategy=strategy, engine=engine), alone)

    @pytest.mark.parametrize("strategy", ["server:mode=async", "elastic:every=1000", "hogwild", "local-sgd:every=1000"])
    def test_elsewhere_each_worker_clips_its_own(self, strategy: str) -> None:
        """No parameter goes further than the rate times the longest gradient, summed over all steps."""
        task = tiny.task(24, batch=4)
        start = torch.cat([p.detach().flatten() for p in task.build_model(0).parameters()])
        result = fit(task, workers=2, clip=0.01, epochs=1, strategy=strategy, engine="sim")
        moved = torch.cat([result.state["weight"].flatten(), result.state["bias"]]) - start
        assert moved.norm() <= 6 * 0.1 * 0.01 * (1 + 1e-5)

    def test_several_servers_have_no_whole_gradient(self) -> None:
        with pytest.raises(UserError, match="clip needs the whole gradient in one place; use one server"):
            fit(tiny.task(), strategy="server:mode=sync,servers=2", clip=1.0)


class TestAccumulation:
    @pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=2", "server:mode=sync", "gossip"])
    def test_is_a_larger_batch(self, strategy: str) -> None:
        settings: dict[str, Any] = dict(workers=2, engine="sim", strategy=strategy, epochs=2)
        whole = fit(tiny.task(50, batch=6), **settings)
        pieces = fit(tiny.task(50, batch=2), accumulate=3, **settings)
        assert pieces.steps == whole.steps and pieces.bytes_sent == whole.bytes_sent
        assert alike(pieces, whole) and pieces.train_loss == pytest.approx(whole.train_loss)

    def test_takes_the_time_of_all_its_batches(self) -> None:
        times = [
            tiny.simulated(tiny.task(48, batch=4 // n), {"compute": "2ms"}, workers=1, accumulate=n).virtual_seconds
            for n in (1, 4)
        ]
        assert times[1] == pytest.approx(4 * (times[0] or 0))

    def test_is_written_down(self, tmp_path: Path) -> None:
        fit(tiny.task(48, batch=3), accumulate=4, out=tmp_path / "run")
        text = (tmp_path / "run/spec.toml").read_text()
        assert "batch = 3\n" in text and "accumulate = 4\n" in text

    def test_all_batches_must_fit_the_shard(self) -> None:
        with pytest.raises(UserError, match="batch 16 is larger than a worker's shard of 12"):
            fit(tiny.task(24, batch=4), accumulate=4)


class Watching(nn.Linear):
    """Knows what it computed in."""

    seen: set[torch.dtype]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen.add(out.dtype)
        return out


def test_autocast() -> None:
    def model() -> nn.Module:
        made = Watching(4, 2)
        made.seen = seen
        return made

    for chosen, dtype in (("bf16", torch.bfloat16), ("none", torch.float32)):
        seen: set[torch.dtype] = set()
        result = fit(tiny.task(model=model), autocast=chosen)
        assert seen == {dtype}
        assert result.state["weight"].dtype == torch.float32


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """One sample at a time; leaves a file for each process that asked."""

    def __init__(self, folder: Path) -> None:
        self._folder, (self._x, self._y) = folder, tiny.samples(23)

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        (self._folder / str(os.getpid())).touch()
        return self._x[i], self._y[i]


class TestLoaders:
    def task(self, folder: Path) -> hocket.Task:
        folder.mkdir(exist_ok=True)
        return hocket.Task(model=tiny.model, data=(Slow(folder), tiny.samples(12)), batch=2, epochs=2)

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_change_nothing_but_who_loads(self, accumulate: int, tmp_path: Path) -> None:
        plain = fit(self.task(tmp_path / "plain"), workers=2, accumulate=accumulate)
        loaded = fit(self.task(tmp_path / "loaded"), workers=2, accumulate=accumulate, loaders=2)
        assert all(loaded.state[name].equal(plain.state[name]) for name in plain.state)
        processes = {file.name for file in (tmp_path / "loaded").iterdir()} - {str(os.getpid())}
        assert len(processes) == 4, "two for each worker"
        assert not multiprocessing.active_children()

    def test_go_on_where_the_run_was(self, tmp_path: Path) -> None:
        whole = fit(self.task(tmp_path / "a"), epochs=3)
        fit(self.task(tmp_path / "a"), epochs=1, loaders=1, checkpoint_every=1, out=tmp_path / "run")
        on = hocket.resume(tmp_path / "run", task=self.task(tmp_path / "a"), epochs=3, progress=False)
        assert all(on.state[name].equal(whole.state[name]) for name in whole.state)

    @pytest.mark.parametrize(
        ("settings", "line"),
        [
            (dict(), "loaders are for a Dataset that gives one sample at a time"),
            (dict(loaders=-1), "loaders must be from 0 to 1000, got -1"),
            (dict(strategy="server:mode=async"), "workers of server draw theirs: leave --loaders out"),
        ],
    )
    def test_refused(self, settings: dict[str, Any], line: str, tmp_path: Path) -> None:
        made = self.task(tmp_path / "a") if settings else tiny.task()
        with pytest.raises(UserError, match=line):
            fit(made, **{"loaders": 2} | settings)


@pytest.mark.parametrize(
    "settings",
    [dict(clip=1.0), dict(accumulate=2, batch=2), dict(autocast="bf16"), dict(schedule="cosine-annealing")],
)
def test_compiled_workers_take_plain_steps(settings: dict[str, Any]) -> None:
    made = tiny.task(model=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert fit(made, strategy="hogwild").driver == "compiled"
    assert fit(made, strategy="hogwild", **settings).driver == "pytorch"
    with pytest.raises(UserError, match="compiled workers take steps of plain sgd on the CPU, without"):
        fit(made, strategy="hogwild", driver="compiled", **settings)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (dict(clip=-1.0), "clip must be greater than 0, or 0 for none"),
        (dict(accumulate=0), "accumulate must be 1 or more"),
        (dict(autocast="fp16"), "autocast must be one of none, bf16"),
    ],
)
def test_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        fit(tiny.task(), **settings)
