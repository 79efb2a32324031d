"""Laws of models that are split over ranks, under every strategy on the data axis."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from test_compressed_runs import FEW
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket
from hocket.core.comm import Rank
from hocket.core.errors import RankFailed
from hocket.drivers.joining import join
from hocket.engines.catalogue import Listener
from hocket.engines.sim import Sim
from hocket.layouts import pipeline
from hocket.strategies import strategy

VARIANTS = [
    "server:mode=async", "server:mode=ssp,slack=1,servers=2", "server:mode=dssp,stale=gap",
    "server:mode=async,push_every=2,fetch_every=3,stale=none", "server:mode=async,pipeline=1,stale=none",
    "elastic:every=2,order=round-robin", "hogwild:every=3", "leashed:persistence=1,stale=tail", "gossip:kind=adpsgd",
    "gossip:kind=sgp", "gossip:kind=pull", "gossip:kind=push",
]  # fmt: skip
"""Where one worker's gradients are stale too, rules that look at a gap are left out: they see one part of the model."""
TEXTS = [*strategy, *VARIANTS]
IN_LOOPS = ["tensor=2", "domain=2"]
LAYOUTS = [*IN_LOOPS, "pipeline=2,stages=4+4,microbatches=1"]
STEPS = 9


def model() -> nn.Module:
    """With BatchNorm, which every rank of a tensor and of a domain has whole."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4 * 3 * 2, 9), nn.Tanh(), nn.Linear(9, 3),
    )  # fmt: skip


def samples() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(60, 1, 6, 4, generator=g)
    return x, x[:, 0, :3].sum(1).argmax(-1) % 3


TASK = hocket.Task(model=model, data=(samples(), samples()), batch=6, momentum=0.9, lr=0.05)
SPREAD = {"compute": "lognormal:1ms:0.4", "stragglers": "1x2"}
"""Workers that are not equally fast, so that the parts of a model hear of the others at different times."""


def fit(text: str, layout: str, data: int, engine: str = "sim", **settings: Any) -> hocket.Result:
    wanted: dict[str, Any] = {"layout": f"{layout},data={data}"} if layout else {"workers": data}
    if engine == "sim":
        wanted["sim"] = SPREAD
    if not {"epochs", "checkpoint_every"} & settings.keys():
        wanted["steps"] = STEPS
    return hocket.fit(TASK, strategy=text, engine=engine, seed=5, progress=False, **wanted | settings)


def runs_with(text: str, workers: int) -> bool:
    chosen = strategy.make(text)
    return chosen.fewest_workers <= workers <= chosen.most_workers


def replicas_of(text: str) -> int:
    """As many as let its steps not depend on timing: one, or two that keep in step."""
    return 2 if runs_with(text, 2) and strategy.make(text).lockstep else 1


REPEATABLE = [text for text in TEXTS if runs_with(text, replicas_of(text))]
"""Those that can do the same with whole models."""
APART = [text for text in TEXTS if runs_with(text, 2) and replicas_of(text) == 1]
"""Those under which each part of a model goes its own way."""


def apart(a: hocket.Result, b: hocket.Result) -> float:
    """How far two models are apart, over the size of each of their tensors."""
    assert a.state.keys() == b.state.keys()
    pairs = [(a.state[name].double(), tensor.double()) for name, tensor in b.state.items()]
    return max(float((one - other).norm() / other.norm().clamp(min=1e-6)) for one, other in pairs)


@pytest.mark.parametrize(
    ("text", "layout", "engine"),
    covering(REPEATABLE, LAYOUTS, ["threads", "sim"]),
)
def test_a_split_model_learns_as_a_whole_one(text: str, layout: str, engine: str) -> None:
    """Where steps do not depend on timing. What lies in shared memory has single precision."""
    whole = fit(text, "", replicas_of(text), engine)
    found = fit(text, layout, replicas_of(text), engine)
    assert apart(found, whole) < 1e-4
    assert found.curve[-1]["test_loss"] == pytest.approx(whole.curve[-1]["test_loss"], rel=1e-4)


@pytest.mark.parametrize(("text", "layout"), covering(APART, LAYOUTS))
def test_two_runs_of_one_seed_are_the_same(text: str, layout: str) -> None:
    one, other = fit(text, layout, 2), fit(text, layout, 2)
    assert apart(one, other) == 0
    assert (one.curve, one.virtual_seconds, one.staleness) == (other.curve, other.virtual_seconds, other.staleness)


@pytest.mark.parametrize(("text", "layout"), covering([*APART, "server"], LAYOUTS))
def test_saved_and_gone_on_is_as_if_nothing_had_happened(tmp_path: Path, text: str, layout: str) -> None:
    goes_on(tmp_path, text, layout)


@pytest.mark.parametrize(
    ("text", "compress", "layout"), covering([text for text in APART if strategy.make(text).sends], FEW, LAYOUTS)
)
def test_so_it_is_with_compression(tmp_path: Path, text: str, compress: str, layout: str) -> None:
    goes_on(tmp_path, text, layout, compress=compress)


@pytest.mark.parametrize("text", ["server:mode=async", "allreduce"])
def test_a_pipeline_goes_on_with_the_stages_that_it_measured(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(heavy: int) -> None:
        def costs(layers: list[Any], *_: object, **__: object) -> list[float]:
            return [8.0 if at == heavy else 1.0 for at in range(len(layers))]

        monkeypatch.setattr(pipeline, "costs_of", costs)

    measure(heavy=0)
    whole = fit(text, "pipeline=2,microbatches=1", 2, out=tmp_path / "whole", checkpoint_every=1, epochs=2)
    folder = cut(tmp_path)
    measure(heavy=7)
    assert apart(hocket.resume(folder, task=TASK, progress=False), whole) == 0


def goes_on(folder: Path, text: str, layout: str, **settings: Any) -> None:
    whole = fit(text, layout, 2, out=folder / "whole", checkpoint_every=1, epochs=2, **settings)
    found = hocket.resume(cut(folder), task=TASK, progress=False)
    assert apart(found, whole) == 0
    assert (found.bytes_sent, found.staleness) == (whole.bytes_sent, whole.staleness)
    assert (found.curve, found.virtual_seconds) == (whole.curve, whole.virtual_seconds)


def cut(folder: Path) -> Path:
    """A run without what came after its first checkpoint."""
    _, last = sorted((folder / "whole/checkpoints").iterdir())
    path = folder / "cut"
    shutil.copytree(folder / "whole", path)
    (path / "result.json").unlink()
    (path / "checkpoints" / last.name).unlink()
    return path


OTHER_LAYOUT = "go on with the layout that was saved"


@pytest.mark.parametrize(
    ("text", "before", "after", "line"),
    [
        ("hogwild", "tensor=2,data=2", "domain=2,data=2", OTHER_LAYOUT),
        ("server", "tensor=2,data=2", "data=2", OTHER_LAYOUT),
        ("server:mode=async", "data=2", "tensor=2,data=2", OTHER_LAYOUT),
        ("elastic", "domain=2,data=2", "domain=2,data=3", "it goes on with as many and in that layout; use data=2"),
    ],
)
def test_parts_with_states_of_their_own_go_on_in_the_same_layout_only(
    tmp_path: Path, text: str, before: str, after: str, line: str
) -> None:
    common: dict[str, Any] = {"progress": False, "workers": None}
    hocket.fit(
        TASK, strategy=text, engine="sim", layout=before, epochs=1, checkpoint_every=1, out=tmp_path / "run", **common
    )
    with pytest.raises(RankFailed, match=line):
        hocket.resume(tmp_path / "run", task=TASK, epochs=2, layout=after, **common)


def own_loop(
    text: str, layout: str, data: int, *, epochs: int = 1, save: Path | None = None, load: Path | None = None
) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
    """Training in a loop of the user's own: the model that each rank hands over, which the first has all of, and what
    its part had whole after every step and when it was judged."""

    def main(rank: Rank) -> tuple[dict[str, Tensor], list[Tensor]] | None:
        net, seen = copy.deepcopy(start), []
        try:
            with join(text, layout=layout, seed=3) as team:
                net, optimizer = team.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
                loader = team.shard(TensorDataset(*samples()), 6)
                if load is not None:
                    team.load(load)
                for _ in range(epochs):
                    for x, y in loader:
                        optimizer.zero_grad()
                        F.cross_entropy(net(x), y).backward()
                        optimizer.step()
                        seen.append(what_is_whole(net))
                if save is not None:
                    team.save(save)
                team.evaluate(lambda judged: seen.append(what_is_whole(judged)))
        except SystemExit:  # a server
            return None
        return team.state_dict(), seen

    torch.manual_seed(0)
    start = model()  # here, as ranks share one generator
    ranks = (data + strategy.make(text).server_ranks()) * (2 if layout else 1)
    return [found for found in Sim(**SPREAD).run(main, ranks, Listener()) if found is not None]


def what_is_whole(net: nn.Module) -> Tensor:
    """Parameters and statistics that no rank has only a part of."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return torch.cat([t.detach().double().reshape(-1) for name, t in tensors.items() if "own_" not in name])


@pytest.mark.parametrize(("text", "layout"), covering(REPEATABLE, IN_LOOPS))
def test_a_loop_of_the_users_own_learns_as_with_whole_models(text: str, layout: str) -> None:
    (whole, _), *_ = own_loop(text, "", replicas_of(text))
    (found, _), *_ = own_loop(text, layout, replicas_of(text))
    assert whole.keys() == found.keys()
    for name, tensor in whole.items():
        assert torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize(("text", "layout"), covering(REPEATABLE, IN_LOOPS))
def test_a_loop_goes_on_as_if_nothing_had_happened(tmp_path: Path, text: str, layout: str) -> None:
    (whole, _), *_ = own_loop(text, layout, replicas_of(text), epochs=2)
    own_loop(text, layout, replicas_of(text), save=tmp_path / "file")
    (found, _), *_ = own_loop(text, layout, replicas_of(text), load=tmp_path / "file")
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("text", "layout"), covering(APART, IN_LOOPS))
def test_what_all_ranks_of_a_worker_have_never_drifts_apart(text: str, layout: str) -> None:
    """Neither while they train nor in what is judged: each of them hears of the other worker at another time."""
    (_, first), (_, beside), (_, second), (_, its_beside) = own_loop(text, layout, 2)
    for mine, other in ((first, beside), (second, its_beside)):
        assert len(mine) == len(other) > 1
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
