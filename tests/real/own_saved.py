"""A user's loop that saves itself: `own_saved.py FOLDER begin` runs it to its end, and again until it is saved;
`own_saved.py FOLDER rest` goes on from there. Rank 0 writes the models that it ends with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from saving import norm, samples
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hocket

TEXTS = ["allreduce", "local-sgd:every=3", "local-sgd:every=4,momentum=average", "diloco:every=3", "server:mode=sync"]
TOTAL, CUT = 21, 11
"""Steps, of which an epoch has 8 (with two workers 12): the data are in the middle of an epoch where it is cut."""


def train(text: str, saved: Path, mode: str) -> None:
    with hocket.join(text, seed=3) as team:
        model = norm()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
        model, optimizer = team.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = team.shard(TensorDataset(*samples(94)), batch_size=4)
        step = team.load(saved, scheduler=scheduler)["step"] if mode == "rest" else 0
        while step < TOTAL:
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if mode == "cut" and step == CUT:
                    team.save(saved, scheduler=scheduler, step=step)
                    return
                if step == TOTAL:
                    break
    if team.rank == 0:
        values = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        saved.with_suffix(f".{mode}").write_text(json.dumps(values))


if __name__ == "__main__":
    for number, text in enumerate(TEXTS):
        for mode in ("whole", "cut") if sys.argv[2] == "begin" else ("rest",):
            try:
                train(text, Path(sys.argv[1]) / str(number), mode)
            except SystemExit:  # a server's script ends inside `prepare`
                pass
