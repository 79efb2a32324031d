"""What a rank tells of its part in a run when it is over: JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor

from hocket.core.comm import Rank
from hocket.core.serving import Server
from hocket.drivers.session import Session
from hocket.layouts.portion import Portion
from hocket.measure.meter import Totals

ABOUT_BEST = "best"
"""Where in the header of a model's file it says when that was the best one."""


def report(session: Session, seconds: float) -> dict[str, Any]:
    """Of a worker."""
    worker, shared = session.worker, session.worker.has_shared
    found = {
        "seconds": seconds,
        "steps": worker.step,
        "samples": session.rank.status.samples,
        "staleness": {str(k): v for k, v in worker.staleness.items()},
        "parameters": session.portion.parameters,
        **_traffic(session),
        **_times(session.totals, seconds, worker.shared.lock_wait_s() if shared else 0.0),
    }
    return found | (_shared_vector(session) if shared else {})


def server_report(session: Session, server: Server, seconds: float) -> dict[str, Any]:
    """Of a server."""
    found = {"server": session.group.rank, "seconds": seconds, **_traffic(session)}
    found |= _times(session.totals, seconds, locks_s=0.0)
    return found | {"staleness": {str(k): v for k, v in server.staleness.items()}}


def _traffic(session: Session) -> dict[str, Any]:
    totals = session.totals
    return {
        "bytes_sent": totals.bytes_sent,
        "messages": totals.messages,
        "dropped_events": session.trace.dropped,
    }


def _times(totals: Totals, seconds: float, locks_s: float) -> dict[str, float]:
    """Where a rank's seconds went: what was not spent on others is computing."""
    on_others_s = totals.sending_s + totals.transferring_s + totals.waiting_s + locks_s
    return {
        "computing": max(seconds - on_others_s, 0.0),
        "sending": totals.sending_s,
        "transferring": totals.transferring_s,
        "waiting": totals.waiting_s,
        "locks": locks_s,
        "communicating": totals.sending_s + totals.transferring_s + totals.hidden_s,
        "exposed": totals.sending_s + totals.transferring_s,
    }


def _shared_vector(session: Session) -> dict[str, Any]:
    """What happened to the shared vector; its staleness counts, not that of the steps by which workers find
    their way. Rank 0 speaks for all."""
    if session.rank.comm.rank:
        return {"staleness": {}}
    found = session.worker.shared.statistics()
    return {
        "staleness": {str(k): v for k, v in found.staleness.items()},
        "compile_seconds": session.compile_s,
        "shared": {
            "updates": found.updates,
            "dropped": found.dropped,
            "lost_movement": found.lost,
            "failed_tries": {str(k): v for k, v in sorted(found.tries.items())},
            "lock_wait_s": found.lock_wait_s,
            "peak_vectors": found.peak_vectors,
            "recovered_locks": found.recovered,
        },
    }


def model_bytes(state: Mapping[str, Tensor], best: dict[str, Any] | None = None) -> bytes:
    """A model's state dict as a safetensors file; of the best model with its step, epoch and metric in the header."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    return bytes(save(tensors, {ABOUT_BEST: json.dumps(best)} if best else None))


def tell_tensors(rank: Rank, portion: Portion) -> None:
    """Tell a model tensor by tensor, before it is told what it is: a rank may have no room for all of them."""
    for number, (name, tensor) in enumerate(portion.tensors()):
        rank.tell("tensor", {"number": number}, model_bytes({name: tensor}))
