"""What a team offers to a user's own loop: data, collectives, clipping, evaluation, a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import net, on_sim, on_threads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import hocket
from hocket.measure.result import TIMES
from hocket.strategies import strategy as strategies

_g = torch.Generator().manual_seed(1)
INPUTS = torch.randn(50, 4, generator=_g)
TARGETS = INPUTS @ torch.randn(4, 3, generator=_g)
DATA = TensorDataset(INPUTS, TARGETS, torch.arange(50))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model: nn.Module) -> float:
    return float(F.mse_loss(model(INPUTS), TARGETS))


def train(text: str, epochs: int = 3, batch: int = 5, **options: Any) -> tuple[list[list[int]], hocket.Result | None]:
    """The samples that this worker saw in each epoch, and what came of it."""
    seen = []
    with hocket.join(text, seed=5) as team:
        model = net()
        model, optimizer = team.prepare(model, sgd(model))
        loader = team.shard(DATA, batch_size=batch, **options)
        for _ in range(epochs):
            seen.append([])
            for inputs, targets, numbers in loader:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                seen[-1] += numbers.tolist()
            team.evaluate(loss_of)
    return seen, team.result()


def workers_of(found: list[Any]) -> list[Any]:
    return [part for part in found if part is not None]


def as_launched(text: str, **options: Any) -> Callable[[Any], Any]:
    """As `hocket launch` would: a server's script ends inside `prepare`."""

    def main(_: Any) -> Any:
        try:
            return train(text, **options)
        except SystemExit:
            return None

    return main


EVERY = [
    "allreduce", "local-sgd:every=3", "diloco:every=4", "gossip:kind=dpsgd", "gossip:kind=adpsgd", "gossip:kind=push",
    "server:mode=sync", "server:mode=async", "server:mode=ssp", "elastic", "hogwild", "leashed", "mutex", "rwlock",
]  # fmt: skip


@pytest.mark.parametrize("text", EVERY)
def test_every_strategy_sees_every_sample_once_an_epoch_and_learns(text: str) -> None:
    size = 2 + strategies.make(text).server_ranks()
    for run in (on_sim, on_threads):
        parts = workers_of(run(as_launched(text, epochs=6), size))
        assert len(parts) == 2
        for epoch in range(6):
            assert Counter(n for seen, _ in parts for n in seen[epoch]) == Counter(range(50))
        results = [result for _, result in parts]
        curve = results[0].curve
        assert len(curve) == 6 and results[1].curve == []
        assert curve[-1]["test_metric"] < curve[0]["test_metric"] / 1.2
        times = sum(results[0].per_worker[0][name] for name in TIMES)
        assert times == pytest.approx(results[0].per_worker[0]["seconds"], rel=0.02, abs=1e-3)
        assert results[0].bytes_sent == results[1].bytes_sent
        assert (results[0].virtual_seconds is None) == (run is on_threads)
        assert results[0].epochs == 6 and sum(w["samples"] for w in results[0].per_worker) == 300


def test_every_strategy_of_the_registry_is_among_them() -> None:
    assert {text.partition(":")[0] for text in EVERY} == set(strategies) - {"serial"}


def test_who_is_fast_takes_more_batches() -> None:
    def main(_: Any) -> int:
        seen, _ = train("hogwild", epochs=2)
        return sum(map(len, seen))

    slow, fast = on_sim(main, 2, stragglers="1x10")
    assert sorted((slow, fast))[0] < 30 and slow + fast == 100


@pytest.mark.parametrize("text", ["gossip:kind=adpsgd", "gossip:kind=pull", "elastic", "server:mode=async", "hogwild"])
def test_loaders_may_be_made_for_each_epoch(text: str) -> None:
    """Nobody waits where one is made: the other one may need an answer before it gets there."""

    def main(_: Any) -> list[list[int]] | None:
        seen: list[list[int]] = []
        try:
            with hocket.join(text, seed=5) as team:
                model = net()
                model, optimizer = team.prepare(model, sgd(model))
                for _ in range(4):
                    seen.append([])
                    for inputs, targets, numbers in team.shard(DATA, batch_size=5):
                        optimizer.zero_grad()
                        F.mse_loss(model(inputs), targets).backward()
                        optimizer.step()
                        seen[-1] += numbers.tolist()
        except SystemExit:
            return None
        return seen

    size = 2 + strategies.make(text).server_ranks()
    for parts in (on_sim(main, size, stragglers="1x10"), on_threads(main, size)):
        for epoch in zip(*workers_of(parts), strict=True):
            assert sorted(number for seen in epoch for number in seen) == list(range(50))


def test_the_result_of_a_loop_under_sim_is_virtual_and_repeats() -> None:
    first, again = (on_sim(as_launched("server:mode=async"), 3)[0][1] for _ in range(2))
    assert first.virtual_seconds == again.virtual_seconds > 0
    assert first.staleness == again.staleness and first.staleness["max"] > 0
    assert all(torch.equal(first.state[name], again.state[name]) for name in first.state)
    assert first.engine == "sim" and first.workers == 2 and first.parameters == 43


def test_evaluation_costs_no_time_and_changes_nothing() -> None:
    def run(looks: int) -> tuple[float, Tensor]:
        def main(_: Any) -> tuple[float, Tensor]:
            with hocket.join("local-sgd:every=3") as team:
                model = net()
                model, optimizer = team.prepare(model, sgd(model))
                for inputs, targets, _ in team.shard(DATA, batch_size=5):
                    optimizer.zero_grad()
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    for _ in range(looks):
                        team.evaluate(loss_of)
                assert model.training
            return team.result().virtual_seconds or 0.0, model[0].weight.detach()

        return on_sim(main, 3)[0]

    (none_s, none), (many_s, many) = run(0), run(2)
    assert none_s == pytest.approx(many_s, rel=1e-9) and torch.equal(none, many)


def test_evaluate_sees_what_the_block_would_return() -> None:
    """Two replicas that moved apart: the mean of both."""

    def main(_: Any) -> tuple[float, float, float]:
        with hocket.join("local-sgd:every=100") as team:
            model = nn.Linear(1, 1, bias=False)
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            model.weight.grad.fill_(float(team.rank))
            optimizer.step()
            own, judged = model.weight.item(), team.evaluate(lambda m: m.weight.item())
            assert model.weight.item() == own
        return own, judged, model.weight.item()

    (own0, judged0, end0), (own1, judged1, end1) = on_threads(main, 2)
    assert own0 - own1 == pytest.approx(1.0)
    assert judged0 == judged1 == end0 == end1 == pytest.approx((own0 + own1) / 2)


class TestCollectives:
    def test_they_say_what_they_promise(self) -> None:
        def main(_: Any) -> dict[str, Any]:
            with hocket.join() as team:
                r = team.rank
                x = torch.full((2, 3), float(r)).t()
                team.barrier()
                return {
                    "sum": team.all_reduce(r + 1),
                    "mean": team.all_reduce(float(r), "mean"),
                    "max": team.all_reduce(torch.tensor([r, -r]), "max").tolist(),
                    "strided": team.all_reduce(x).tolist(),
                    "all": team.gather({"rank": r, "x": torch.tensor([r] * r)}),
                    "first": team.broadcast({"vocabulary": ["a", "b"]} if r == 0 else None),
                    "last": team.broadcast(torch.full((2,), float(r)), source=2).tolist(),
                }

        for run in (on_threads, on_sim):
            for found in run(main, 3):
                assert found["sum"] == 6 and isinstance(found["sum"], int) and found["mean"] == 1.0
                assert found["max"] == [2, 0] and found["strided"] == [[3.0, 3.0]] * 3
                assert [one["rank"] for one in found["all"]] == [0, 1, 2]
                assert [one["x"].tolist() for one in found["all"]] == [[], [1], [2, 2]]
                assert found["first"] == {"vocabulary": ["a", "b"]} and found["last"] == [2.0, 2.0]

    def test_what_cannot_be_sent_is_refused(self) -> None:
        with hocket.join() as team, pytest.raises(hocket.UserError, match="only tensors, numbers, text"):
            team.gather(object())

    def test_average_now(self) -> None:
        def main(_: Any) -> float:
            with hocket.join("local-sgd:every=100") as team:
                model = nn.Linear(1, 1, bias=False)
                model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
                before = model.weight.item()
                model.weight.grad.fill_(float(team.rank))
                optimizer.step()
                team.average()
                return before - model.weight.item()

        assert on_threads(main, 3) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("text", ["allreduce", "local-sgd:every=1", "server:mode=async,lookahead=0", "hogwild"])
def test_clipping(text: str) -> None:
    """Two workers with gradients 3 and 5: their mean is 4, which a strategy that averages gradients clips to 1."""

    def main(_: Any) -> Any:
        try:
            with hocket.join(text) as team:
                model = nn.Linear(1, 1, bias=False)
                torch.nn.init.zeros_(model.weight)
                model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
                model.weight.grad.fill_(3.0 + 2 * team.rank)
                norm = team.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            return float(norm), model.weight.item()
        except SystemExit:
            return None

    found = workers_of(on_threads(main, 2 + strategies.make(text).server_ranks()))
    norms = [4.0, 4.0] if text == "allreduce" else [3.0, 5.0]
    assert [norm for norm, _ in found] == pytest.approx(norms)
    # Where gradients are applied one by one, each moves by 1 at most; the second may be tempered
    assert all(-2.0 - 1e-4 <= weight <= -0.99 for _, weight in found)
    if text in ("allreduce", "local-sgd:every=1"):
        assert [weight for _, weight in found] == pytest.approx([-1.0, -1.0], rel=1e-4)


def test_only_prepared_parameters_are_clipped() -> None:
    with hocket.join() as team, pytest.raises(hocket.UserError, match="parameters of one prepared model"):
        team.clip_grad_norm_(net().parameters(), 1.0)


class Words(IterableDataset[tuple[Tensor, int]]):
    """A stream of 23 samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter([(INPUTS[n], n) for n in range(23)])


class TestData:
    def seen(self, size: int, dataset: Any = DATA, batch: int = 4, epochs: int = 1, **options: Any) -> list[Any]:
        """The numbers of the samples in each batch of each worker."""

        def main(_: Any) -> list[Any]:
            with hocket.join() as team, torch.no_grad():
                loader = team.shard(dataset, batch_size=batch, **options)
                return [[batch[-1].tolist() for batch in loader] for _ in range(epochs)]

        return on_threads(main, size)

    def test_in_order(self) -> None:
        first, second = self.seen(2, shuffle=False)
        assert first[0][0] == [0, 1, 2, 3] and second[0][0] == [4, 5, 6, 7] and first[0][-1] == [48]

    def test_without_the_last_batch(self) -> None:
        for part in self.seen(3, drop_last=True, epochs=2):
            assert [len(b) for epoch in part for b in epoch] == [4] * 8

    def test_a_sampler_is_shared_out(self) -> None:
        parts = self.seen(3, sampler=SubsetRandomSampler(range(10, 40)), epochs=2)
        for epoch in (0, 1):
            assert sorted(n for part in parts for b in part[epoch] for n in b) == list(range(10, 40))
        assert parts[0][0] != parts[0][1]

    def test_a_sampler_that_draws_by_weight(self) -> None:
        sampler = WeightedRandomSampler([1.0 if n < 5 else 0.0 for n in range(50)], 40)
        numbers = [n for part in self.seen(2, sampler=sampler) for b in part[0] for n in b]
        assert len(numbers) == 40 and set(numbers) <= set(range(5))

    def test_a_stream_is_shared_out(self) -> None:
        """23 samples, 3 workers of 2: three full steps, and one with 5 samples; weights tell what a stand-in is not."""

        def main(_: Any) -> tuple[list[list[int]], float]:
            with hocket.join() as team:
                model = nn.Linear(1, 1, bias=False)
                model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
                before = model.weight.item()
                seen = []
                for _, numbers in team.shard(Words(), batch_size=2):
                    seen.append(numbers.tolist())
                    optimizer.zero_grad()
                    model.weight.grad.fill_(float(numbers.float().mean()))
                    optimizer.step()
                return seen, before - model.weight.item()

        parts = on_threads(main, 3)
        assert {len(seen) for seen, _ in parts} == {4}
        assert sorted(n for seen, _ in parts for batch in seen for n in batch) == list(range(23))
        steps = [range(6), range(6, 12), range(12, 18), range(18, 23)]
        for _, moved in parts:
            assert moved == pytest.approx(sum(sum(step) / len(step) for step in steps), rel=1e-5)

    def test_batches_are_what_the_dataset_makes_of_them(self) -> None:
        nested = [{"x": INPUTS[n], "more": {"number": n, "text": str(n)}} for n in range(8)]
        with hocket.join() as team, torch.no_grad():
            batch = next(iter(team.shard(nested, batch_size=4)))
        assert batch["x"].shape == (4, 4) and len(batch["more"]["text"]) == 4

    def test_the_epoch_can_be_set(self) -> None:
        def main(_: Any) -> list[list[int]]:
            with hocket.join() as team, torch.no_grad():
                loader = team.shard(DATA, batch_size=5)
                found = []
                for epoch in (3, 0, 3):
                    team.set_epoch(epoch)
                    found.append([n for _, _, numbers in loader for n in numbers.tolist()])
                return found

        for three, none, again in on_threads(main, 2):
            assert three == again != none

    @pytest.mark.parametrize(
        "options, said",
        [
            ({"batch_sampler": [[0]]}, "not a batch_sampler"),
            ({"sampler": [0, 1, 2, 3], "shuffle": True}, "a sampler or shuffle=True"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, options: dict[str, Any], said: str) -> None:
        with hocket.join() as team, pytest.raises(hocket.UserError, match=said):
            team.shard(DATA, batch_size=1, **options)

    def test_what_a_stream_cannot_do_is_refused(self) -> None:
        for options, said in (({"shuffle": True}, "leave shuffle out"), ({"num_workers": 2}, "use num_workers=1 or 0")):
            with hocket.join() as team, pytest.raises(hocket.UserError, match=said):
                team.shard(Words(), batch_size=2, **options)


def test_a_result_is_there_when_the_block_has_ended() -> None:
    with hocket.join() as team:
        model = net()
        team.prepare(model, sgd(model))
        with pytest.raises(hocket.UserError, match="when the 'with hocket"):
            team.result()
    assert team.result().verdict == "finished"
