"""Word vectors as files: the text and the binary format of word2vec, and safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hocket.core.errors import UserError

Matrix = np.ndarray[Any, np.dtype[np.float32]]

TEXT, BINARY, TENSORS = "vectors.txt", "vectors.bin", "vectors.safetensors"


def write(folder: Path, words: Sequence[str], vectors: Matrix) -> None:
    """All three, into a folder that is there."""
    header = f"{len(words)} {vectors.shape[1]}\n".encode()
    with (folder / BINARY).open("wb") as file:
        file.write(header)
        for word, vector in zip(words, vectors, strict=True):
            file.write(word.encode() + b" " + vector.tobytes() + b"\n")
    numbers = " ".join(["%.6g"] * vectors.shape[1])
    with (folder / TEXT).open("wb") as file:
        file.write(header)
        for word, vector in zip(words, vectors, strict=True):
            file.write(f"{word} {numbers % tuple(vector.tolist())}\n".encode())
    from safetensors.numpy import save

    # Not by save_file, which lets nobody else read what it writes
    blob = save({"vectors": np.ascontiguousarray(vectors)}, {"words": "\n".join(words)})
    (folder / TENSORS).write_bytes(blob)


def read(path: Path) -> tuple[list[str], Matrix]:
    """Words and vectors from the safetensors of a run."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            words = (file.metadata() or {})["words"].split("\n")
            vectors: Matrix = file.get_tensor("vectors")
    except FileNotFoundError:
        raise UserError(
            f"there are no word vectors in {path.parent}; train them with 'hocket train word2vec', or go on with a "
            "run of it that was cut off with 'hocket resume'"
        ) from None
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path} holds no word vectors: {error}") from None
    if vectors.ndim != 2 or len(vectors) != len(words):
        raise UserError(f"{path} holds {len(words)} words, but vectors of shape {list(vectors.shape)}")
    return words, vectors
