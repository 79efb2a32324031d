"""A checkpoint is one safetensors file: every rank's tensors, and the rest of their states as JSON in its header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hocket.core.errors import UserError
from hocket.core.state import decode, encode
from hocket.measure import disk
from hocket.version import __version__

FORMAT = 1
_KEY, _SUM = "hocket", "sha256"


class Damaged(UserError):
    """A file that is not what was once written, or never was a checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: one state a rank, workers first, and what is known of the run."""

    about: dict[str, Any]
    """Strategy, workers, steps done and so on: what a reader must know before it looks at the states."""
    states: list[dict[str, Any]]


def pack_state(state: dict[str, Any]) -> Tensor:
    """One rank's state as bytes, to be sent to who writes the file."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(state, "state", tensors))
    own = {name: t.cpu().contiguous().clone() for name, t in tensors.items()}
    return torch.frombuffer(bytearray(save(own, {_KEY: text})), dtype=torch.uint8)


def unpack_state(block: Tensor) -> dict[str, Any]:
    raw = block.cpu().numpy().tobytes()
    state: dict[str, Any] = decode(json.loads(_header(raw)[_KEY]), load(raw))
    return state


def pack(about: dict[str, Any], states: list[Tensor]) -> bytes:
    """The file's content from the ranks' packed states. What several ranks have alike is written once."""
    tensors: dict[str, Tensor] = {}
    texts: list[Any] = []
    seen: dict[tuple[Any, ...], str] = {}
    sums: dict[str, str] = {}
    for rank, block in enumerate(states):
        raw = block.numpy().tobytes()
        names = {}
        for name, tensor in load(raw).items():
            checksum = _checksum(tensor)
            names[name] = seen.setdefault((tensor.dtype, tuple(tensor.shape), checksum), f"{rank}/{name}")
            tensors[names[name]], sums[names[name]] = tensor, checksum
        texts.append(_renamed(json.loads(_header(raw)[_KEY]), names))
    about = {"format": FORMAT, "version": __version__} | about
    text = json.dumps({"about": about, "states": texts, "sums": sums})
    return save(tensors, {_KEY: text, _SUM: hashlib.sha256(text.encode()).hexdigest()})


def _checksum(tensor: Tensor) -> str:
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(content).hexdigest()[:32]


def _renamed(value: Any, names: dict[str, str]) -> Any:
    match value:
        case {"tensor": str(name)}:
            return {"tensor": names[name]}
        case dict():
            return {key: _renamed(v, names) for key, v in value.items()}
        case list():
            return [_renamed(v, names) for v in value]
    return value


def _header(raw: bytes) -> dict[str, str]:
    length = int.from_bytes(raw[:8], "little")
    found: dict[str, str] = json.loads(raw[8 : 8 + length])["__metadata__"]
    return found


def read(path: Path) -> Checkpoint:
    """The checkpoint in a file; what is no checkpoint, damaged, or of a later version is refused in one line."""
    with _reading(path):
        raw = path.read_bytes()
        head = _checked(path, raw)
        tensors = load(raw)
        if any(_checksum(tensors[name]) != found for name, found in head["sums"].items()):
            raise ValueError("checksum")
        return Checkpoint(head["about"], [decode(state, tensors) for state in head["states"]])


def about_run(path: Path) -> dict[str, Any]:
    """What a checkpoint says of its run, without the tensors."""
    with _reading(path), path.open("rb") as file:
        length = file.read(8)
        head = _checked(path, length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size)))
        about: dict[str, Any] = head["about"]
        return about


def epochs_done(path: Path) -> float:
    """How far the run was that a file has the checkpoint of."""
    about = about_run(path)
    with _reading(path):
        return float(about["step"] / about["steps_per_epoch"])


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError):
        raise Damaged(f"{path} is damaged, or no checkpoint of Hocket's") from None


def _checked(path: Path, raw: bytes) -> dict[str, Any]:
    """What is not tensors, as it was written."""
    header = _header(raw)
    head: dict[str, Any] = json.loads(header[_KEY])
    if (made_by := head["about"])["format"] > FORMAT:
        line = f"{path} was written by Hocket {made_by['version']}; this is {__version__}, which cannot read it"
        raise UserError(line)
    if hashlib.sha256(header[_KEY].encode()).hexdigest() != header[_SUM]:
        raise ValueError("checksum")
    return head


def write(path: Path, content: bytes) -> None:
    """In one piece: whoever reads finds the old file or the new one, whatever happens meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write(path, content)
    except OSError as error:
        raise UserError(f"cannot write the checkpoint {path}: {error.strerror or error}") from None
