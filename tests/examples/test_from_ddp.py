"""What docs/from-ddp.md says: its scripts run and learn alike, and what it claims of Hocket holds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import hocket
from hocket.engines.catalogue import Listener
from hocket.engines.sim import Sim
from hocket.engines.threads import Threads

PAGE = Path(__file__).parents[2] / "docs" / "from-ddp.md"
_g = torch.Generator().manual_seed(1)
INPUTS, LABELS = torch.randn(50, 4, generator=_g), torch.randint(3, (50,), generator=_g)
DATA = TensorDataset(INPUTS, LABELS)


def on_threads(main: Callable[[Any], Any], size: int) -> list[Any]:
    return Threads(deadline=20).run(main, size, Listener())


def on_sim(main: Callable[[Any], Any], size: int) -> list[Any]:
    return Sim().run(main, size, Listener())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_ddp", "with_accelerate", "with_hocket"])
def test_the_scripts_of_the_page_learn_alike(name: str, tmp_path: Path) -> None:
    if name == "with_accelerate" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    for block in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / block[0]).write_text(block[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = [float(text) for text in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(found) == 6 and found[-1] > 0.92, done.stdout


def net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():  # ranks that are threads share PyTorch's own generator
        for layer in (model[0], model[3]):
            for parameter in layer.parameters():
                parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def test_accumulation_sends_once_a_step() -> None:
    def sent(accumulate: int) -> int:
        def main(_: Any) -> int:
            with hocket.join() as team:
                model = net()
                model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
                before = team.bytes_sent
                for _ in range(3):
                    for _ in range(accumulate):
                        F.cross_entropy(model(INPUTS), LABELS).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return team.bytes_sent - before

        return int(on_threads(main, 2)[0])

    assert sent(1) == sent(4) > 0


def test_norms_are_averaged_over_the_workers() -> None:
    """Each worker's running mean is of its own batches; what is judged and returned is the mean of them."""

    def main(_: Any) -> tuple[Tensor, Tensor, Tensor]:
        with hocket.join() as team:
            model = net()
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            F.cross_entropy(model(INPUTS[team.rank :: 2]), LABELS[team.rank :: 2]).backward()
            optimizer.step()
            own = model[1].running_mean.clone()
            judged = team.evaluate(lambda model: model[1].running_mean.clone())
        return own, judged, model[1].running_mean

    (own, judged, end), (other, *_) = on_threads(main, 2)
    assert not torch.allclose(own, other)
    for found in (judged, end):
        torch.testing.assert_close(found, (own + other) / 2)


def test_an_unused_parameter_has_a_gradient_of_zeros_and_decays() -> None:
    def main(_: Any) -> tuple[float, float]:
        with hocket.join() as team:
            model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(1, 1, bias=False)])
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
            before = model[1].weight.item()
            F.cross_entropy(model[0](INPUTS), LABELS).backward()
            assert model[1].weight.grad.item() == 0
            optimizer.step()
            return before, model[1].weight.item()

    before, after = on_threads(main, 2)[0]
    assert after == pytest.approx(before * 0.95)


def test_a_scaler_with_clipping_is_as_without() -> None:
    def main(scaled: bool) -> Callable[[Any], Tensor]:
        def run(_: Any) -> Tensor:
            with hocket.join() as team:
                model = net()
                model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
                scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=256.0)
                for inputs, labels in team.shard(DATA, batch_size=5):
                    optimizer.zero_grad()
                    scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
                    scaler.unscale_(optimizer)
                    team.clip_grad_norm_(model.parameters(), 0.1)
                    scaler.step(optimizer)
                    scaler.update()
            return model[0].weight.detach()

        return run

    torch.testing.assert_close(on_threads(main(True), 2)[0], on_threads(main(False), 2)[0])


@pytest.mark.parametrize("engine", [on_threads, on_sim])
def test_evaluation_can_be_shared_out(engine: Callable[..., list[Any]]) -> None:
    def main(_: Any) -> tuple[float, float]:
        with hocket.join("local-sgd:every=2") as team:
            model = net()
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for inputs, labels in team.shard(DATA, batch_size=5, drop_last=True):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

            def part(model: nn.Module) -> float:
                mine = Subset(DATA, range(team.rank, len(DATA), team.size))
                right = sum(int(model(x[None]).argmax() == y) for x, y in mine)
                return team.all_reduce(right) / len(DATA)

            whole = team.evaluate(lambda model: float((model(INPUTS).argmax(1) == LABELS).float().mean()))
            return team.evaluate(part), whole

    for found, whole in engine(main, 3):
        assert found == pytest.approx(whole)
