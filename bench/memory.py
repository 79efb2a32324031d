"""What a rank of a split model needs at the most, against one process: `python bench/memory.py [LAYOUT ...]`.

Peaks of the resident memory over what a rank has before its model is made: in training, and in the end, when the
learned model has been handed over.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from pathlib import Path

import torch
from common import say_where
from torch import nn

import hocket

WIDTH, HIDDEN, BLOCKS, BATCH = 1024, 4096, 12, 128
FOLDER = "HOCKET_MEMORY_BENCH"
LAYOUTS = ("", "tensor=4", "pipeline=4")


def resident(word: str) -> int:
    """VmRSS is what this process has now, VmHWM what it had at the most; in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(word))


def _note(word: str, number: int) -> None:
    if FOLDER in os.environ:
        Path(os.environ[FOLDER], f"{os.getpid()}.{word}").write_text(str(number))


def _note_end() -> None:
    if Path(os.environ.get(FOLDER, ".")).exists():  # not in the process that started the ranks
        _note("end", resident("VmHWM"))


def _blocks() -> nn.Module:
    nn.Linear(1, 1)  # what PyTorch loads when it is first used is not the model's
    _note("before", resident("VmRSS"))
    atexit.register(_note_end)
    pairs = [(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(BLOCKS)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def _data() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, WIDTH, generator=g), torch.randint(0, 10, (BATCH,), generator=g)
    return (x, y), (x[:8], y[:8])


task = hocket.Task(
    model=_blocks,
    data=_data,
    batch=BATCH,
    lr=1e-4,
    epochs=2,
    on_step=lambda _: _note("training", resident("VmHWM")),
)


def peaks(layout: str) -> dict[str, list[int]]:
    """Of every rank, in the order of their processes."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        hocket.fit(
            f"{Path(__file__).resolve()}:task",
            layout=layout,
            strategy="allreduce" if layout else "serial",
            engine="mpi",
            progress=False,
        )
        before = {path.stem: int(path.read_text()) for path in Path(folder).glob("*.before")}
        return {
            word: [int(path.read_text()) - before[path.stem] for path in sorted(Path(folder).glob(f"*.{word}"))]
            for word in ("training", "end")
        }


def main() -> None:
    say_where()
    weights = 4 * BLOCKS * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
    print(f"weights {weights / 1e6:,.0f} MB, batches of {BATCH}")
    alone: dict[str, list[int]] = {}
    for layout in sys.argv[1:] or LAYOUTS:
        found = peaks(layout)
        alone = alone or found
        ranks = len(found["training"])
        for word, numbers in found.items():
            share = max(numbers) * ranks / max(alone[word])
            shown = ", ".join(f"{number / 1e6:,.0f}" for number in numbers)
            print(f"{layout or 'one process'}, {word}: {shown} MB, {share:.2f} of the ideal share", flush=True)


if __name__ == "__main__":
    main()
