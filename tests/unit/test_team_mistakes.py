"""What a loop of the user's own is given, and what its ranks call: mistakes are said in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_team_safety import DATA, INPUTS, TARGETS, sgd, step
from tiny import net, on_sim, on_threads
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.core.errors import RankFailed
from hocket.engines.catalogue import Listener
from hocket.engines.threads import Threads


class TestMismatches:
    """Ranks that call different things are told so, and get no number."""

    CALLS: tuple[tuple[Callable[[Any], Any], str], ...] = (
        (lambda team: team.all_reduce(1.0, "sum" if team.rank else "max"), r"1 float64 \(max\)"),
        (lambda team: team.all_reduce(1) if team.rank else team.barrier(), "in barrier"),
        (lambda team: team.all_reduce(1.0) if team.rank else team.gather(1.0), "in all_gather of 1 int64"),
        (lambda team: team.all_reduce(torch.ones(2 + team.rank)), "in all_reduce of 3 float32"),
    )

    @pytest.mark.parametrize("run", [on_sim, on_threads])
    @pytest.mark.parametrize("number", range(len(CALLS)))
    def test_are_said(self, number: int, run: Callable[..., Any]) -> None:
        call, line = self.CALLS[number]

        def main(_: Any) -> None:
            with hocket.join() as team:
                model = net()
                team.prepare(model, sgd(model))
                call(team)

        with pytest.raises(RankFailed, match=line) as failed:
            run(main, 2)
        assert "all ranks must call the same collectives" in failed.value.reason


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:every=2"])
def test_a_call_too_many_on_one_rank_is_said_at_once_with_what_both_do(strategy: str) -> None:
    def main(_: Any) -> None:
        with hocket.join(strategy) as team:
            model = net()
            model, optimizer = team.prepare(model, sgd(model))
            step(model, optimizer)
            if team.rank == 1:
                team.barrier()
            step(model, optimizer)

    with pytest.raises(RankFailed, match=r"rank 1 in barrier(.*; all ranks must call the same)") as failed:
        on_threads(main, 2)
    assert "rank 0 in all_reduce of" in failed.value.reason and "DeadlineExceeded" not in failed.value.reason


def test_a_wait_in_vain_is_told_with_what_the_others_did() -> None:
    def main(_: Any) -> None:
        with hocket.join("gossip:kind=dpsgd") as team:
            model = net()
            model, optimizer = team.prepare(model, sgd(model))
            if team.rank == 1:
                team.barrier()
            step(model, optimizer)

    with pytest.raises(RankFailed) as failed:
        Threads(deadline=2.0).run(main, 2, Listener())
    assert "rank 1 waited" in failed.value.reason or "rank 1 was in barrier" in failed.value.reason
    assert "rank 0 waited" in failed.value.reason or "rank 0 was in recv" in failed.value.reason


def test_whole_numbers_are_summed_exactly() -> None:
    def main(_: Any) -> int:
        with hocket.join() as team:
            return team.all_reduce(2**60 + 1)

    assert on_threads(main, 3) == [3 * 2**60 + 3] * 3


def test_a_copy_of_the_model_is_not_trained_in_silence() -> None:
    with hocket.join() as team:
        model = net()
        model, optimizer = team.prepare(model, sgd(model))
        other = copy.deepcopy(model)
        optimizer.zero_grad()
        F.mse_loss(other(INPUTS), TARGETS).backward()
        with pytest.warns(UserWarning, match="the first gradient is 0"):
            optimizer.step()


def test_a_run_goes_on_in_the_middle_of_an_epoch_with_the_same_random_numbers(tmp_path: Any) -> None:
    """Those of dropout: a pass that begins anew draws none from the model's generator."""

    def train(steps: int, load: bool = False, save: bool = False) -> dict[str, Tensor]:
        with hocket.join(seed=3) as team:
            model = nn.Sequential(net(), nn.Dropout(0.5))
            model, optimizer = team.prepare(model, sgd(model))
            loader = team.shard(DATA, batch_size=4)
            if load:
                team.load(tmp_path / "saved")
            while steps:
                for inputs, targets in loader:
                    step(model, optimizer, inputs, targets)
                    steps -= 1
                    if not steps:
                        break
            if save:
                team.save(tmp_path / "saved")
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    whole = train(8)
    train(4, save=True)
    again = train(4, load=True)
    assert all(again[name].equal(tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda team, model, optimizer: team.prepare(optimizer, model), "takes a model and its optimizer, in this"),
        (lambda team, *_: team.shard(torch.utils.data.DataLoader(DATA), batch_size=4), "give it the dataset"),
        (lambda team, *_: team.shard(DATA, batch_size="4"), "batch_size must be a whole number"),
        (lambda team, *_: team.shard(DATA, batch_size=4, num_wrkers=2), "has no option num_wrkers"),
        (lambda team, *_: team.shard(DATA, batch_sampler=[[1]]), "not a batch_sampler"),
        (lambda team, *_: team.shard(DATA, batch_size=4).set_epoch(-1), "whole number from 0 on"),
        (lambda team, model, _: team.clip_grad_norm_(model.parameters(), -1.0), "max_norm must be 0 or more"),
        (lambda team, *_: team.all_reduce([1, 2]), "takes a tensor or a number"),
        (lambda team, *_: team.all_reduce(torch.ones(2, dtype=torch.int64), "mean"), "make it floating-point first"),
    ],
)
def test_wrong_arguments_are_said_in_one_line(call: Callable[..., Any], line: str) -> None:
    with hocket.join() as team:
        model = net()
        model, optimizer = team.prepare(model, sgd(model))
        with pytest.raises(hocket.UserError, match=line) as said:
            call(team, model, optimizer)
        assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("text", "compress", "line"),
    [
        ("local-sgd:every=3", "none", "strategy is local-sgd:every=3 with topk:ratio=0.2+int8, here it is"),
        ("local-sgd", "none", "here it is local-sgd;"),
        ("local-sgd:every=3", "topk:0.1", "here it is local-sgd:every=3 with topk:ratio=0.1;"),
    ],
)
def test_a_checkpoint_of_another_strategy_is_refused_in_the_users_words(
    tmp_path: Any, text: str, compress: str, line: str
) -> None:
    def train(text: str, compress: str, what: str) -> None:
        with hocket.join(text, compress=compress) as team:
            model = net()
            team.prepare(model, sgd(model))
            getattr(team, what)(tmp_path / "saved")

    train("local-sgd:every=3", "topk:0.2+int8", "save")
    train("local-sgd: every=3, momentum=keep", "topk:ratio=0.2+int8", "load")
    with pytest.raises(hocket.UserError) as said:
        train(text, compress, "load")
    assert line in str(said.value)


def test_a_checkpoint_of_other_workers_is_refused(tmp_path: Any) -> None:
    def main(what: str) -> None:
        with hocket.join() as team:
            model = net()
            team.prepare(model, sgd(model))
            getattr(team, what)(tmp_path / "saved")

    on_threads(lambda _: main("save"), 2)
    with pytest.raises(hocket.UserError, match=r"saved by 2 workers, in a loop of your own: .* use 2 workers"):
        main("load")


def test_a_damaged_checkpoint_is_a_users_mistake_on_every_rank(tmp_path: Any) -> None:
    (tmp_path / "saved").write_bytes(b"no checkpoint")

    def main(_: Any) -> None:
        with hocket.join() as team:
            model = net()
            team.prepare(model, sgd(model))
            team.load(tmp_path / "saved")

    with pytest.raises(RankFailed) as failed:
        on_threads(main, 2)
    assert failed.value.reason.startswith("UserError: ") and "saved is damaged" in failed.value.reason


def test_a_strategy_that_is_no_text() -> None:
    with pytest.raises(hocket.UserError, match="takes a strategy as text"), hocket.join(3):  # type: ignore[arg-type]
        pass
