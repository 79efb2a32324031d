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


def epochs_done(path: Path) -> float:
    """How far the run was that a file has the checkpoint of."""
    with _reading(path), path.open("rb") as file:
        length = file.read(8)
        head = _checked(path, length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size)))
        return float(head["about"]["step"] / head["about"]["steps_per_epoch"])


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


def check(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a checkpoint of something else than what is trained here, in one line."""
    for name, what in (
        ("parameters", "number of parameters"),
        ("strategy", "strategy"),
        ("servers", "number of servers"),
        ("optimizer", "optimizer"),
    ):
        if saved.get(name) != here[name]:
            here_it_is = f"here it is {here[name]}; train with what was saved"
            raise UserError(f"{path}: the checkpoint's {what} is {saved.get(name)}, {here_it_is}")
    if saved.get("layout") != here["layout"]:
        raise UserError(
            f"{path}: the checkpoint's parameters have other names, shapes or order in memory (channels_last) than "
            f"the model's; train with the model that was saved"
        )


def for_workers(path: Path, found: Checkpoint, here: dict[str, Any]) -> Checkpoint:
    """The checkpoint for as many workers as there are here.

    Another number than was saved is possible where every worker had the same state, nobody had sent anything, and an
    epoch had just ended: then each worker of any number can set out from it.
    """
    saved, workers, about = found.about["workers"], here["workers"], found.about
    if saved == workers:
        return found
    first, *others = found.states
    at_the_end = "steps_per_epoch" in about and about["step"] % about["steps_per_epoch"] == 0
    alike = all(_alike(first[key], other[key]) for other in others for key in ("replica", "optimizer", "kept"))
    shared = about["servers"] or any(state["mail"] or state["shared"] for state in found.states)
    if shared or not at_the_end or not alike:
        why = "not at the end of an epoch" if not at_the_end else "not all in the same state"
        raise UserError(f"{path} was saved by {saved} workers, {why}: it goes on with as many; use {saved} workers")
    step = about["step"] // about["steps_per_epoch"] * here["steps_per_epoch"]
    states = [found.states[r] if r < saved else _newcomer(first) for r in range(workers)]
    known = {key: step if first["driver"][key] == about["step"] else 0 for key in ("judged", "kept")}
    driver = first["driver"] | known | {"regrouped": True}
    return Checkpoint(about, [state | {"step": step, "driver": driver} for state in states])


def _newcomer(state: dict[str, Any]) -> dict[str, Any]:
    """A worker that joins with the state of another has no history, and draws numbers of its own."""
    nothing = {"bytes_sent": 0, "messages": 0, "sending_s": 0.0, "waiting_s": 0.0, "transferring_s": 0.0}
    common = {"common": state["random"]["common"]}
    return state | {"totals": nothing, "samples": 0, "staleness": {}, "random": common}


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)


def write(path: Path, content: bytes) -> None:
    """In one piece: whoever reads finds the old file or the new one, whatever happens meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write(path, content)
    except OSError as error:
        raise UserError(f"cannot write the checkpoint {path}: {error.strerror or error}") from None
