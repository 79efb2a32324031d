"""Laws of means and of gossip whose vectors travel encoded: between ranks, on the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import covering
from tiny import on_sim
from torch import Tensor, nn

from hocket.compress import make
from hocket.compress.averaging import CompressedMeans
from hocket.compress.channel import Compressed
from hocket.compress.memory import Memory
from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.core.message import Lossy, Message
from hocket.core.replica import Gradient, Replica
from hocket.core.state import Kept
from hocket.core.status import Status
from hocket.core.weight import Weight
from hocket.core.worker import Worker
from hocket.measure.meter import Metered
from hocket.measure.trace import Trace
from hocket.strategies import strategy

SCHEMES = [
    "fp16", "bf16", "int8", "qsgd:bits=2", "qsgd:bits=4", "terngrad", "natural", "onebit", "sign", "topk:0.1",
    "topk:0.1+qsgd:bits=4", "randomk:0.1", "randomk:0.1,feedback=on", "threshold:0.5", "dgc:0.1", "powersgd:rank=1",
]  # fmt: skip
WITH_MEMORY = ["fp16", "int8", "onebit", "sign", "topk:0.1", "threshold:0.5", "powersgd:rank=1"]


def make_worker(rank: Rank, text: str, lr: float = 0.1) -> tuple[Worker, Memory, Metered]:
    torch.manual_seed(5)
    model = Replica(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)))
    optimizer = torch.optim.SGD(model.parameters, lr=lr)
    kept = Kept()
    memory = Memory(make(text), kept, 3, rank.comm.rank)
    metered = Metered(rank.comm, rank.clock, Status(), Trace(0))
    comm = Compressed(metered, memory, model.x.dtype)
    means = CompressedMeans(memory, model.x, [p.shape for p in model.parameters], optimizer)
    mixing = memory.scheme.mixing
    worker = Worker(
        comm, rank.clock, model, optimizer, 3, optimizer.step, kept=kept, mean=means, seal=comm.seal, mixing=mixing
    )
    return worker, memory, metered


def gradient(rank: int, step: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * rank + step))


@pytest.mark.parametrize(("text", "ranks"), covering(SCHEMES, [2, 3, 5]))
def test_all_ranks_get_the_same_bits(text: str, ranks: int) -> None:
    def main(rank: Rank) -> list[Tensor]:
        w, _, _ = make_worker(rank, text)
        found = []
        for step in range(4):
            g = Gradient(gradient(w.rank, step, w.x.numel()), Weight(w.rank + 1, sum(range(1, ranks + 1))))
            w.average(g)
            found.append(g.vector)
        return found

    first, *others = on_sim(main, ranks)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("text", WITH_MEMORY)
def test_what_arrived_and_what_all_remember_is_the_mean_of_all_gradients(text: str, ranks: int) -> None:
    """Weighted, with a rank that has no samples, and with the errors of the sums, which their owners remember."""

    def main(rank: Rank) -> tuple[Tensor, Tensor, Tensor]:
        w, memory, _ = make_worker(rank, text)
        n = w.x.numel()
        arrived, own = torch.zeros(n), torch.zeros(n)
        for step in range(6):
            samples = [float((r + step) % 3) for r in range(ranks)]
            vector = gradient(w.rank, step, n)
            own += vector * samples[w.rank] * ranks / sum(samples)
            g = Gradient(vector, Weight(samples[w.rank], sum(samples)))
            w.average(g)
            arrived += g.vector
        later = memory.vectors.get(f"gradient/mean/{ranks}")
        chunks = [torch.zeros_like(chunk) for chunk in own.tensor_split(ranks)]
        if later is not None:
            chunks[w.rank] = later
        return arrived, own - memory.vectors["gradient"], torch.cat(chunks)

    found = on_sim(main, ranks)
    arrived = found[0][0]
    sent = torch.stack([own for _, own, _ in found]).mean(0) - torch.stack([later for *_, later in found]).sum(0)
    torch.testing.assert_close(arrived, sent, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["fp16", "int8", "onebit", "sign", "topk:0.1", "powersgd:rank=1"])
def test_the_order_of_the_ranks_does_not_matter(text: str) -> None:
    def main(rank: Rank, order: list[int]) -> Tensor:
        w, _, _ = make_worker(rank, text)
        g = Gradient(gradient(order[w.rank], 0, w.x.numel()), Weight(1, 3))
        w.average(g)
        return g.vector

    a, b = (on_sim(lambda rank, order=order: main(rank, order), 3)[0] for order in ([0, 1, 2], [2, 0, 1]))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_factor_that_powersgd_begins_with_is_the_same_on_all_ranks() -> None:
    def main(rank: Rank) -> list[Tensor]:
        w, memory, _ = make_worker(rank, "powersgd:rank=2")
        for step in range(3):
            w.average(Gradient(gradient(w.rank, step, w.x.numel()), Weight(1, 3)))
        return [v for name, v in sorted(memory.vectors.items()) if "right" in name]

    first, *others = on_sim(main, 3)
    assert first
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_powersgd_is_exact_for_gradients_of_its_rank() -> None:
    def main(rank: Rank) -> float:
        w, _, _ = make_worker(rank, "powersgd:rank=1")
        views = w.layout(torch.zeros_like(w.x))
        generator = torch.Generator().manual_seed(1)  # the same column on all ranks, so that the sum has rank 1
        for view in views.values():
            if view.dim() == 2:
                left = torch.randn(view.shape[0], 1, generator=generator)
                view.copy_((w.rank + 1) * left @ torch.ones(1, view.shape[1]))
            else:
                view.fill_(w.rank + 1.0)
        vector = torch.cat([view.reshape(-1) for view in views.values()])
        expected = vector / (w.rank + 1) * 2
        w.average(Gradient(vector, Weight(1, 3)))
        return float((vector - expected).abs().max())

    assert max(on_sim(main, 3)) < 1e-5


@pytest.mark.parametrize("text", SCHEMES)
def test_counted_bytes_are_sent_bytes(text: str) -> None:
    """What the meter counts of a mean is what its codec says, with the headers of messages and nothing else."""

    def main(rank: Rank) -> tuple[int, int, int]:
        w, _, metered = make_worker(rank, text)
        w.average(Gradient(gradient(w.rank, 0, w.x.numel()), Weight(1, 4)))
        return metered.totals.bytes_sent, metered.totals.messages, w.x.numel()

    for number, (sent, messages, n) in enumerate(on_sim(main, 4)):
        scheme = make(text)
        if scheme.travels == "scattered":
            chunks = [len(chunk) for chunk in torch.zeros(n).tensor_split(4)]
            header = [Message("chunk", (), (torch.zeros(scheme.size(c) or 0, dtype=torch.uint8),)) for c in chunks]
            first = sum(msg.nbytes for i, msg in enumerate(header) if i != number)
            assert sent == first + 3 * max(scheme.size(c) or 0 for c in chunks) and messages == 3
        elif scheme.travels == "gathered" and (size := scheme.at(0).size(n)) is not None:
            assert sent == 3 * size and messages == 0
        else:
            assert sent > 0


def test_a_message_with_encoded_parts_arrives_as_its_sender_knows() -> None:
    def main(rank: Rank) -> list[tuple[Any, ...]]:
        w, _, metered = make_worker(rank, "topk:0.1")
        n = w.x.numel()
        found: list[tuple[Any, ...]] = []
        for step in range(4):
            if w.rank == 0:
                change = w.seal(1, Lossy(gradient(0, step, n), "push"))
                model = w.seal(1, Lossy(gradient(9, 0, n) + 0.01 * gradient(1, step, n), "model", is_model=True))
                w.comm.isend(1, Message("both", (7, step), (change, torch.arange(3), model)))
                found.append((7, step, change.values, torch.arange(3), model.values, metered.totals.bytes_sent))
            else:
                _, msg = w.comm.recv(0)
                assert msg.kind == "both"
                found.append((*msg.ints, *msg.tensors, 0))
        return found

    sent, received = on_sim(main, 2)
    for mine, theirs in zip(sent, received, strict=True):
        assert mine[:2] == theirs[:2]
        assert all(torch.equal(a, b) for a, b in zip(mine[2:5], theirs[2:5], strict=True))
    assert sent[3][-1] - sent[2][-1] < sent[0][-1]  # the first model goes as it is, later ones only their change


@pytest.mark.parametrize("text", ["int8", "topk:0.2", "qsgd:bits=2", "randomk:0.2", "sign", "terngrad"])
def test_what_a_receiver_knows_of_a_model_that_rests_comes_to_be_the_model(text: str) -> None:
    def main(rank: Rank) -> tuple[float, float]:
        w, _, _ = make_worker(rank, text)
        n, errors = w.x.numel(), []
        for step in range(400):
            model = gradient(9, min(step, 1), n)
            if w.rank == 0:
                w.comm.isend(1, Message("model", (), (Lossy(model, "model", is_model=True),)))
            else:
                errors.append(float((w.comm.recv(0)[1].tensors[0] - model).norm()))
        return (errors[1], errors[-1]) if errors else (1.0, 0.0)

    begin, end = on_sim(main, 2)[1]
    assert end < 0.02 * begin


@pytest.mark.parametrize(("text", "left"), [("qsgd:bits=4", 0.3), ("natural", 0.3), ("randomk:0.5", 0.8)])
def test_a_receiver_goes_as_far_as_its_sender_knows_to_be_right(text: str, left: float) -> None:
    """The bound on an unbiased compressor's variance is far from what happens: for qsgd it would leave 0.76."""

    def main(rank: Rank) -> tuple[float, float]:
        w, _, _ = make_worker(rank, text)
        models = [gradient(step, 0, w.x.numel()) for step in range(2)]
        for model in models:
            if w.rank == 0:
                w.comm.isend(1, Message("model", (), (Lossy(model, "model", is_model=True),)))
            else:
                known = w.comm.recv(0)[1].tensors[0]
        return (float((known - models[1]).norm()), float((models[0] - models[1]).norm())) if w.rank else (0.0, 1.0)

    end, begin = on_sim(main, 2)[1]
    assert 0 < end < left * begin


MIXED = ["int8", "topk:0.1", "qsgd:bits=2", "sign", "randomk:0.2", "powersgd:rank=1"]


@pytest.mark.parametrize(("kind", "text", "ranks"), covering(["dpsgd", "adpsgd", "sgp"], MIXED, [4, 5]))
def test_gossip_keeps_the_mean_and_comes_together(kind: str, text: str, ranks: int) -> None:
    """Without gradients, from replicas that differ: the sum stays, the distance shrinks."""

    def main(rank: Rank) -> tuple[Tensor, Tensor]:
        w, memory, _ = make_worker(rank, text, lr=0.0)
        w.x.copy_(gradient(w.rank, 0, w.x.numel()))
        start = w.x.clone()
        running = strategy.make(f"gossip:kind={kind}").worker(w)
        next(running)
        w.model.g.zero_()
        for _ in range(300):
            w.step += 1
            running.send(Gradient(w.model.g, Weight(1, w.size)))
        before = w.x.clone()
        memory.exactly = True
        with pytest.raises(StopIteration):
            running.send(None)
        return start, before if kind == "dpsgd" else w.x.clone()

    found = on_sim(main, ranks)
    starts, ends = (torch.stack(vectors) for vectors in zip(*found, strict=True))
    torch.testing.assert_close(ends.mean(0), starts.mean(0), rtol=1e-3, atol=1e-3)
    assert float((ends - ends.mean(0)).norm()) < 0.3 * float((starts - starts.mean(0)).norm())


def test_local_changes_are_what_travels_of_replicas() -> None:
    """Replicas far from zero that moved little: the mean is as exact as their movement is large."""

    def main(rank: Rank) -> float:
        w, memory, _ = make_worker(rank, "int8")
        w.x += 1000
        memory.vectors["anchor/start"] = w.x.clone()
        anchor = w.x.clone()
        w.x += 0.01 * gradient(w.rank, 0, w.x.numel())
        expected = anchor + 0.01 * sum(gradient(r, 0, w.x.numel()) for r in range(3)) / 3
        w.average_replicas(Weight(1, 3))
        return float((w.x - expected).abs().max())

    assert max(on_sim(main, 3)) < 0.001


def sgd(parameters: list[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, **settings)


def grouped(parameters: list[nn.Parameter], *momenta: float) -> torch.optim.Optimizer:
    halves = zip((parameters[:2], parameters[2:]), momenta, strict=True)
    return torch.optim.SGD([{"params": half, "momentum": momentum} for half, momentum in halves], lr=0.1)


@pytest.mark.parametrize(
    ("make_optimizer", "moves"),
    [
        (lambda p: sgd(p, momentum=0.9), True),
        (lambda p: grouped(p, 0.9, 0.9), True),
        (lambda p: grouped(p, 0.9, 0.0), False),
        (lambda p: sgd(p, momentum=0.9, nesterov=True), False),
        (lambda p: sgd(p, momentum=0.9, dampening=0.5), False),
        (lambda p: sgd(p, momentum=0.9, weight_decay=0.01), False),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), False),
        (lambda p: sgd(p), False),
    ],
)
def test_momentum_moves_into_dgc_where_it_means_the_same_there(make_optimizer: Any, moves: bool) -> None:
    def main(rank: Rank) -> tuple[list[float], float]:
        torch.manual_seed(5)
        model = Replica(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)))
        optimizer = make_optimizer(model.parameters)
        before = [group["momentum"] for group in optimizer.param_groups]
        memory = Memory(make("dgc"), Kept(), 3, rank.comm.rank)
        means = CompressedMeans(memory, model.x, [p.shape for p in model.parameters], optimizer)
        worker = Worker(rank.comm, rank.clock, model, optimizer, 3, optimizer.step, kept=Kept(), mean=means)
        worker.average(Gradient(gradient(rank.comm.rank, 0, worker.x.numel()), Weight(1, 2)))
        after = [group["momentum"] for group in optimizer.param_groups]
        assert after == ([0.0] * len(before) if moves else before)
        return before, memory.counts.momentum

    for before, taken in on_sim(main, 2):
        assert taken == (before[0] if moves else 0.0)


def test_nan_stops_a_mean_before_anything_is_sent() -> None:
    def main(rank: Rank) -> int:
        w, _, metered = make_worker(rank, "topk:0.1")
        vector = gradient(w.rank, 0, w.x.numel())
        vector[3] = torch.nan
        with pytest.raises(UserError, match="NaN or infinity"):
            w.average(Gradient(vector, Weight(1, 2)))
        return metered.totals.bytes_sent

    assert on_sim(main, 2) == [0, 0]
