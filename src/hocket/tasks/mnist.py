"""MNIST: 70,000 handwritten digits of 28x28 pixels, read from the original files."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hocket.tasks import files
from hocket.tasks.base import Task, task
from hocket.tasks.decoded import decoded

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
FILES = (
    files.DataFile("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    files.DataFile("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
    files.DataFile("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
    files.DataFile("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
)
MEAN, DEVIATION = 0.1307, 0.3081  # of the training images, whose pixels go from 0 to 1


@task("mnist-mlp")
@dataclass(frozen=True)
class MnistMlp:
    """MNIST with four dense layers (134,794 parameters)."""

    name: ClassVar[str]

    def make(self, seed: int, data: Path | None) -> Task:
        return _task(_mlp, data)


@task("mnist-cnn")
@dataclass(frozen=True)
class MnistCnn:
    """MNIST with two small convolutions and two dense layers (27,354 parameters)."""

    name: ClassVar[str]

    def make(self, seed: int, data: Path | None) -> Task:
        return _task(_cnn, data)


def _task(model: Callable[[], nn.Module], data: Path | None) -> Task:
    return Task(model, functools.partial(_samples, data), target=0.97, epochs=5, batch=64, lr=0.3, lr_decay=0.8)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 5 * 5, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _samples(data: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(train, test): one-channel images and their digits."""
    paths = files.find(FILES, "mnist", MIRRORS, data)
    source = [*(file.md5 for file in FILES), str(MEAN), str(DEVIATION)]
    images, labels, test_images, test_labels = decoded(
        "mnist", source, lambda: [read(path) for read, path in zip(2 * (_images, _labels), paths, strict=True)]
    )
    return (images, labels), (test_images, test_labels)


def _images(path: Path) -> Tensor:
    pixels = np.divide(_read_idx(path), 255, dtype=np.float32)
    pixels -= MEAN  # in place: the training images take 188 MB
    pixels /= DEVIATION
    return torch.from_numpy(pixels).unsqueeze(1)


def _labels(path: Path) -> Tensor:
    return torch.from_numpy(_read_idx(path).astype(np.int64))


def _read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of an IDX file in their shape: two zeros, type, dimensions, then each length, big-endian."""
    raw = gzip.decompress(path.read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
