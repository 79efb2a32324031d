"""Word vectors: Hocket against gensim, interleaved on the same text with the same settings; one thread against more.

Beside these, the most threads that each train a model of their own on their share of the text: they share nothing but
the machine, so that no threads of one model can be expected to be faster.

`python bench/word2vec.py CORPUS --gensim PYTHON [--threads 1,2] [--words N] [--epochs E] [--rounds R]`

PYTHON is an interpreter that has gensim (`pip install gensim` in an environment of its own). Both sides train on the
same first N words, in lines of 1,000, and both speeds are in words read from the text, which is how gensim counts:
words that are too rare, or left out as too frequent, are counted too. Neither clock has the vocabulary or compiling
inside.
The CPU time, too, is printed: on a machine with other work it is steadier than the clock on the wall. The memory is the
peak of each program's own; what the system tells of a child would begin with that of its parent.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import Measured, say_where, shown

from hocket.core.sharing import Sharing
from hocket.kernels.memory.vector import MappedVector
from hocket.kernels.memory.words import NEXT
from hocket.kernels.models.skipgram import SkipGramKernel
from hocket.kernels.models.windows import Text
from hocket.lab.embeddings import Embeddings
from hocket.lab.wordscores import scores
from hocket.tasks import corpus

DIM, WINDOW, NEGATIVE, SAMPLE, MIN_COUNT, LR, LINE = 100, 5, 5, 1e-3, 5, 0.025, 1000
RATES = 20
"""Rates an epoch, of a run whose rate falls linearly."""

GENSIM = f"""
import json, sys, time
from pathlib import Path
import numpy as np
from gensim.models import Word2Vec
path, words, epochs, workers, out = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
model = Word2Vec(vector_size={DIM}, window={WINDOW}, negative={NEGATIVE}, sample={SAMPLE}, min_count={MIN_COUNT},
                 alpha={LR}, sg=1, hs=0, workers=workers, epochs=epochs, seed=1)
model.build_vocab(corpus_file=path)
wall, cpu = time.perf_counter(), time.process_time()
model.train(corpus_file=path, total_words=words, epochs=epochs)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
np.save(out, model.wv.vectors)
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
print(json.dumps(dict(wall=wall, cpu=cpu, peak_mib=peak, words=model.wv.index_to_key)))
"""


class Run(NamedTuple):
    """One training."""

    wall: float
    cpu: float
    vectors: Embeddings


def gensim(python: str, path: Path, words: int, epochs: int, workers: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/vectors.npy"
        given = [python, "-c", GENSIM, str(path), str(words), str(epochs), str(workers), out]
        told = json.loads(subprocess.run(given, check=True, capture_output=True, text=True).stdout)
        print(f"gensim: peak {told['peak_mib']:.0f} MiB", flush=True)
        return Run(told["wall"], told["cpu"], Embeddings(told["words"], np.load(out)))


class Hocket:
    """Whole trainings by compiled threads, without the run around them."""

    def __init__(self, path: Path, epochs: int) -> None:
        for _ in range(2):  # the first time may have to compile
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter(), time.process_time()
                found = corpus.read(path, MIN_COUNT, False, Path(folder))
                wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
                ids = np.array(found.ids)
        millions = found.facts.raw_words / 1e6
        print(f"vocabulary: {millions / wall:.1f} M words/s, {millions / cpu:.1f} M words a second of CPU time")
        self.found, self.epochs = found, epochs
        text = Text.of(ids, found.counts, WINDOW, NEGATIVE, SAMPLE, LINE)
        self.pieces, self.kernel = text.pieces, SkipGramKernel(text, DIM, seed=1)
        self.kernel.compile()
        words = len(found.words)
        self.start = torch.cat([(torch.rand(words * DIM) - 0.5) / DIM, torch.zeros(words * DIM)])

    def train(self, workers: int, models: int = 1) -> Run:
        """Of several models, each has its share of the workers and of the text; the first one's vectors count."""
        sharing = Sharing("hogwild", self.kernel.dim, workers // models)
        vectors = [MappedVector.create(sharing, self.start) for _ in range(models)]
        seats = [vectors[index % models].seen_by(index // models) for index in range(workers)]
        crew = [self.kernel.worker(index, 1) for index in range(workers)]
        order, rng, rates = np.arange(self.pieces), np.random.default_rng(0), self.epochs * RATES
        stretches: list[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], float]] = []

        def next_stretch() -> None:
            if len(stretches) % RATES == 0:
                rng.shuffle(order)
            part = np.array_split(order, RATES)[len(stretches) % RATES].copy()
            stretches.append((part, LR * (1 - (len(stretches) + 0.5) / rates)))
            for vector in vectors:
                vector.control[NEXT] = 0

        meeting = threading.Barrier(workers, action=next_stretch)
        cpu = [0.0] * workers

        def work(index: int) -> None:
            began = time.thread_time()
            for _ in range(rates):
                meeting.wait()
                part, lr = stretches[-1]
                # Copied, as kernels would be compiled once more for every other number of an array
                crew[index].run_epoch(seats[index], part[index % models :: models].copy(), lr)
            cpu[index] = time.thread_time() - began

        threads = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - began
        x = torch.empty(self.kernel.dim)
        vectors[0].snapshot(x)
        inputs = x[: len(self.found.words) * DIM].view(-1, DIM).numpy()
        return Run(wall, sum(cpu), Embeddings(self.found.words, inputs))


def peak_mib() -> float:
    """Of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def lines(path: Path, words: int, to: Path) -> int:
    """Write the first words of a text in lines; says how many there were."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        text = file.read(12 * words).split()[:words]
    to.write_bytes(b"\n".join(b" ".join(text[at : at + LINE]) for at in range(0, len(text), LINE)) + b"\n")
    return len(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--gensim", metavar="PYTHON")
    parser.add_argument("--threads", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    parser.add_argument("--words", type=int, default=2_000_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    say_where()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines")
        words = lines(asked.corpus, asked.words, path)
        ours = Hocket(path, asked.epochs)
        most = max(asked.threads)
        sides: dict[str, Callable[[], Run]] = {f"hocket, {n} threads": partial(ours.train, n) for n in asked.threads}
        sides[f"hocket, {most} threads with a model each"] = lambda: ours.train(most, models=most)
        if asked.gensim:
            sides[f"gensim, {most} threads"] = lambda: gensim(asked.gensim, path, words, asked.epochs, most)
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for _ in range(asked.rounds):
            for name, side in sides.items():
                runs[name].append(side())
    total = words * asked.epochs
    for name, found in runs.items():
        print(f"{name}: {shown([Measured(total / run.wall) for run in found], ',.0f')} words/s")
        print(f"{name}: {shown([Measured(total / run.cpu) for run in found], ',.0f')} words a second of CPU time")
        for score in scores(found[-1].vectors, None):
            print(f"{name}: {score.name} {score.value} ({score.asked} asked, {score.unknown} out of vocabulary)")
    best = f"hocket, {most} threads"
    ours_in_most = runs.pop(best)
    for other, found in runs.items():
        pairs = list(zip(ours_in_most, found, strict=True))
        print(
            f"{best}, over {other}: {shown([Measured(b.wall / a.wall) for a, b in pairs])}, by CPU time ",
            end="",
        )
        print(shown([Measured(b.cpu / a.cpu) for a, b in pairs]))
    print(f"hocket: peak {peak_mib():.0f} MiB")


if __name__ == "__main__":
    main()
