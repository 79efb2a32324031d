"""A matplotlib figure that a notebook shows by itself, whether or not pyplot was imported there."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Canvas(Figure):
    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=100)
        return content.getvalue()
