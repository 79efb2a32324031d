"""How a gradient or a model shrinks on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.core.registry import Registry


class Compressor:
    """Makes a vector smaller for the wire."""

    name: ClassVar[str]


compressor: Registry[Compressor] = Registry("compressor", "compressors")


@compressor("none")
@dataclass(frozen=True)
class Identity(Compressor):
    """No compression: every value travels as it is."""
