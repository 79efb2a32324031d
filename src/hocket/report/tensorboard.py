"""Learning curves as TensorBoard event files, written by hand: a few fields of two protocol buffers, framed with
checksums. TensorBoard itself is not needed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from hocket.core.errors import UserError
from hocket.report.records import Record


def write_events(folder: Path, records: Sequence[Record]) -> int:
    """One folder a run, named like the run's own; returns how many."""
    written = 0
    for record in records:
        if not record["curve"]:
            continue
        name = f"{record.path.parent.name}-{record.path.name}".strip("-")
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "events.out.tfevents.0.hocket").write_bytes(events(record))
        except OSError as error:
            raise UserError(f"cannot write to {folder / name}: {error.strerror or error}") from None
        written += 1
    return written


def events(record: Record) -> bytes:
    """The file's content: a step is a sample, and the wall time counts from the run's beginning."""
    found = _framed(_double(1, 0.0) + _text(3, b"brain.Event:2"))
    for point in record["curve"]:
        for name, value in point.items():
            if name not in ("step", "samples", "seconds", "epoch") and value is not None:
                summary = _text(1, _text(1, name.encode()) + _float(2, float(value)))
                event = (
                    _double(1, float(point["seconds"])) + _varint_field(2, int(point["samples"])) + _text(5, summary)
                )
                found += _framed(event)
    return found


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _text(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _table() -> list[int]:
    found = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        found.append(n)
    return found


_CRC = _table()


def _masked(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
