"""A user's loop under every strategy, and every misuse of one: `own_every.py FILE`. Rank 0 writes what came of it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from saving import samples
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

TEXTS = [
    "allreduce", "local-sgd:every=3", "diloco:every=4", "gossip:kind=dpsgd", "gossip:kind=adpsgd", "gossip:kind=push",
    "server:mode=sync", "server:mode=async", "elastic", "hogwild", "leashed", "mutex", "rwlock",
]  # fmt: skip
INPUTS, TARGETS = samples(48)


def net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with torch.no_grad():  # ranks that are threads share PyTorch's own generator
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any = INPUTS, targets: Any = TARGETS) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def train(text: str) -> dict[str, Any]:
    """Under one strategy."""
    seen: list[int] = []
    with hocket.join(text, seed=3) as team:
        model = net()
        model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = team.shard(TensorDataset(INPUTS, TARGETS, torch.arange(48)), batch_size=4)
        for _ in range(3):
            for inputs, targets, numbers in loader:
                step(model, optimizer, inputs, targets)
                seen += numbers.tolist()
            loss = team.evaluate(lambda m: float(F.cross_entropy(m(INPUTS), TARGETS)))
        everyone = [n for part in team.gather(seen) for n in part]
    found = team.result()
    counts = set(Counter(everyone).values()), len(set(everyone))
    return {"seen": [sorted(counts[0]), counts[1]], "loss": loss, "steps": found.steps, "bytes": found.bytes_sent}


def unfrozen(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)
    step(model, optimizer)


def another_optimizer(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    step(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


def cast(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.double()
    optimizer.step()


def changed_on_one(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[1].weight += team.rank
    step(model, optimizer)


def apart(team: Any, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    other = net()
    its = torch.optim.SGD(other.parameters(), lr=0.1)
    for inputs, targets in team.shard(TensorDataset(INPUTS, TARGETS), batch_size=4):
        step(other, its, inputs, targets)


MISUSES = {
    unfrozen: "was unfrozen or added after team.prepare",
    another_optimizer: "an optimizer that is not the prepared one",
    cast: "was replaced after team.prepare",
    changed_on_one: "after step 1, 1.weight of rank 1 differs from rank 0's",
    apart: "so each worker trained alone",
}


def misuse(how: Any) -> str:
    try:
        with hocket.join() as team:
            model = net()
            model[0].requires_grad_(False)
            how(team, *team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    except hocket.UserError as error:
        return str(error)
    return "nothing was said"


if __name__ == "__main__":
    found: dict[str, Any] = {}
    rank = -1
    for text in TEXTS:
        try:
            found[text] = train(text)
        except SystemExit:  # a server's script ends inside `prepare`
            found[text] = None
        except hocket.UserError as error:
            found[text] = str(error)
    if "launch" in sys.argv:  # other launchers end all ranks at the first mistake
        found |= {how.__name__: misuse(how) for how in MISUSES}
    with hocket.join() as team:
        if team.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
