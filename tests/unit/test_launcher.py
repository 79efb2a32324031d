"""What is known of an MPI by what its launcher says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.engines.mpi import Mpi


@pytest.mark.parametrize(
    ("version", "listens"),
    [
        ("mpiexec (Open MPI) 5.0.11", True),
        ("prterun (PRRTE) 3.0.14", True),
        ("mpirun (Open MPI) 4.1.6", False),
        ("HYDRA build details:\n    Version: 4.3.2", False),
    ],
)
def test_a_launcher_that_listens_on_all_interfaces_is_named(tmp_path: Path, version: str, listens: bool) -> None:
    fake = tmp_path / "mpiexec"
    fake.write_text(f"#!/bin/sh\necho '{version}'\n")
    fake.chmod(0o755)
    line = f"while ranks run, {fake} listens on all interfaces: Open MPI 5 cannot do without"
    assert Mpi(mpiexec=str(fake)).note() == (line if listens else "")
    assert Mpi(mpiexec=str(fake), hosts="a:2").note() == ""
