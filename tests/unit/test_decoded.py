"""Decoded samples: put by once, mapped by all, and never believed when harmed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hocket.app.cli import run
from hocket.tasks import decoded as module
from hocket.tasks.decoded import decoded, place


class Decoder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> list[Tensor]:
        self.asked += 1
        return [torch.arange(12.0).view(3, 4), torch.tensor([7, 8, 9]), torch.zeros(0)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def alike(found: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, Decoder()(), strict=True))


def files() -> list[Path]:
    return sorted(path for path in place().rglob("*") if path.is_file())


def test_it_is_decoded_once_and_mapped_from_then_on() -> None:
    decode = Decoder()
    for _ in range(3):
        assert alike(found := decoded("set", ["a"], decode))
    assert decode.asked == 1
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "0.npy" in line]
    assert any(int(begin, 16) <= found[0].data_ptr() < int(end, 16) for begin, end in maps)


def test_who_writes_changes_a_copy_of_its_own() -> None:
    decoded("set", ["a"], Decoder())[0].zero_()
    assert alike(decoded("set", ["a"], Decoder()))


def test_another_source_or_version_is_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Decoder()
    decoded("set", ["a"], decode)
    decoded("set", ["b"], decode)
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    decoded("set", ["a"], decode)
    assert decode.asked == 3


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_what_is_harmed_is_decoded_again(which: int, harm: str) -> None:
    decode = Decoder()
    decoded("set", ["a"], decode)
    path = files()[which]
    content = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    else:
        content[-3] ^= 255
        path.write_bytes(content if harm == "flipped" else content[:-3])
    assert alike(decoded("set", ["a"], decode))
    assert decode.asked == 2
    assert alike(decoded("set", ["a"], decode))
    assert decode.asked == 2


def test_without_a_cache_each_decodes_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    decode = Decoder()
    assert alike(decoded("set", ["a"], decode)) and alike(decoded("set", ["a"], decode))
    assert decode.asked == 2


def test_one_command_removes_it(capsys: pytest.CaptureFixture[str]) -> None:
    decode = Decoder()
    decoded("set", ["a"], decode)
    assert files()
    assert run(["clean"]) == 0
    assert not place().exists()
    assert run(["clean"]) == 0
