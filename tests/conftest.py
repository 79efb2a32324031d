"""Shared by all tests: one BLAS thread, and where the real data lies."""

from __future__ import annotations

import os
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

_shared = Path(__file__).parents[2] / "shared" / "data"
if "HOCKET_DATA" not in os.environ and _shared.is_dir():
    os.environ["HOCKET_DATA"] = str(_shared)
