"""Whether all ranks fit into memory: estimated before anything starts."""

from __future__ import annotations

import torch

from hocket.core.errors import UserError
from hocket.core.replica import Replica
from hocket.drivers.plan import Plan
from hocket.engines.catalogue import Engine
from hocket.tasks.footprint import gigabytes, machine_bytes

VECTORS = 5
"""As long as the parameters, of each worker: they, the gradient, momentum or the like, and two for evaluation."""
PROCESS = 5e7
"""Bytes that each process takes for Python and PyTorch alone, at the least."""
TOLD = 1e9
"""Bytes from which on the user is told."""


def check_processes(engine: Engine, plan: Plan) -> None:
    """Refuse more processes than this machine has memory for."""
    ranks, there_are = plan.training_ranks + plan.servers, machine_bytes()
    if engine.starts_processes() and ranks * PROCESS > there_are:
        raise UserError(
            f"{ranks:,} processes take {gigabytes(ranks * PROCESS)} for Python and PyTorch alone, and this machine has "
            f"{gigabytes(there_are)}; use --engine sim, or fewer workers"
        )


def room(engine: Engine, plan: Plan, model: Replica) -> str:
    """A line on what the replicas of a simulation take, if it is much; refuses what does not fit."""
    if not engine.virtual_time:
        return ""
    ranks, parameters = plan.workers + plan.servers, model.x.numel()
    nbytes = ranks * VECTORS * model.values.numel() * model.x.element_size()
    place, there_are = "this machine", machine_bytes()
    if plan.device != "cpu":
        place, there_are = "the GPU", torch.cuda.mem_get_info()[1]
    line = f"{ranks:,} replicas of {parameters:,} parameters take about {gigabytes(nbytes)}"
    if nbytes > there_are:
        raise UserError(f"{line}, and {place} has {gigabytes(there_are)}; use fewer workers or a smaller model")
    return line if nbytes > TOLD else ""
