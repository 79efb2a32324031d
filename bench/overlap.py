"""What overlap hides over real links: two hosts on one machine (network/testbed.py), each with one worker; interleaved.

    sudo python bench/overlap.py [TASK ...] [--rate 100mbit] [--engine torch] [--steps 60] [--batch 256] [--rounds 5]

`communicating` is how long a worker's data travelled, `exposed` for how much of that it did nothing else. What could
be hidden is what would be if every bucket left when it was complete and took the time that its bytes take in a run
without overlap; what is hidden is by how much less is exposed than there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

BIN = Path(sys.executable).parent
sys.path.insert(0, str(Path(__file__).parent / "network"))

from common import say_where  # noqa: E402
from testbed import Testbed  # noqa: E402


class Run(NamedTuple):
    """Milliseconds a step of the first worker, and the run's accuracy."""

    step: float
    backward: float
    communicating: float
    exposed: float
    waiting: float
    accuracy: float


def once(bed: Testbed, engine: str, text: str, words: list[str], keep: Path | None) -> tuple[Run, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        train = ["train", *words, "--strategy", text, "--timeline", "--json", "--out", f"{folder}/run"]
        if engine == "mpi":
            hosts = ",".join(f"{address}:1" for address in bed.addresses)
            commands = [[str(BIN / "hocket"), *train, "--engine", "mpi", "--hosts", hosts]]
        else:
            launcher = [str(BIN / "torchrun"), "--nnodes", str(len(bed.names)), "--nproc-per-node", "1"]
            launcher += ["--master-addr", bed.addresses[0], "--master-port", "29517", "--node-rank"]
            commands = [[*launcher, str(n), "-m", "hocket", *train] for n in range(len(bed.names))]
        started = [bed.start(n, command, stdout=subprocess.PIPE) for n, command in enumerate(commands)]
        output, _ = started[0].communicate(timeout=600)
        for process in started[1:]:
            process.wait(60)
        if started[0].returncode:
            raise SystemExit(f"{text} failed over the test bed")
        found = json.loads(output.strip().splitlines()[-1])
        drawn = (Path(folder) / "run/timeline.json").read_bytes()
    if keep:
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_bytes(drawn)
    steps, me = found["steps"], found["per_worker"][0]
    events = [event for event in json.loads(drawn)["traceEvents"] if event["pid"] == 0 and event["ph"] == "X"]
    return Run(
        1000 * me["seconds"] / steps,
        statistics.mean(event["dur"] for event in events if event["name"] == "backward") / 1000,
        *(1000 * me[name] / steps for name in ("communicating", "exposed", "waiting")),
        found["test_accuracy"],
    ), events


def hideable_ms(events: list[dict[str, Any]], wire_ms: float) -> float:
    """What of a step's communication, which takes `wire_ms` in one piece, could be hidden behind the way back."""
    backward = [event for event in events if event["name"] == "backward"]
    left = [event["ts"] for event in events if event["name"].startswith("send to")]
    sizes = [event["args"]["bytes"] for event in events if event["tid"] == 1]
    buckets = len(left) // len(backward)
    found = []
    for step, span in enumerate(backward):
        mine = range(step * buckets, (step + 1) * buckets)
        whole, free = sum(sizes[i] for i in mine), 0.0
        for i in mine:
            free = max(free, left[i]) + 1000 * wire_ms * sizes[i] / whole
        found.append(wire_ms - max(free - span["ts"] - span["dur"], 0.0) / 1000)
    return statistics.mean(found)


def measure(bed: Testbed, task: str, chosen: argparse.Namespace) -> None:
    words = [task, "--steps", str(chosen.steps), "--batch", str(chosen.batch), "--evaluate-every", "1000"]
    cases = {"off": "allreduce", "on": f"allreduce:overlap=on,bucket={chosen.bucket}"}
    found: dict[str, list[Run]] = {name: [] for name in cases}
    hidden = []
    for _ in range(chosen.rounds):
        for name, text in cases.items():
            keep = chosen.keep / f"{Path(task.partition(':')[0]).stem}-{name}.json" if chosen.keep else None
            run, events = once(bed, chosen.engine, text, words, keep)
            found[name].append(run)
        off, on = found["off"][-1], found["on"][-1]
        hidden.append((off.exposed - on.exposed) / hideable_ms(events, off.communicating))
    for name, runs in found.items():
        told = ", ".join(f"{field} {_middle(runs, field)} ms" for field in Run._fields[:-1])
        print(f"{task}, overlap={name}, a step: {told}; accuracy {runs[-1].accuracy:.4f}", flush=True)
    faster = [off.step / on.step for off, on in zip(found["off"], found["on"], strict=True)]
    print(f"{task}: hides {_spread(hidden, '.0%')} of what could be hidden; {_spread(faster, '.2f')} x as fast")


def _middle(runs: list[Run], field: str) -> str:
    return f"{statistics.median(getattr(run, field) for run in runs):.1f}"


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["mnist-cnn", str(Path(__file__).parent / "network/deep.py:task")])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--engine", default="torch", choices=["torch", "mpi"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--bucket", type=int, default=0, help="KiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="folder for the timelines of the last round")
    chosen = parser.parse_intermixed_args()
    say_where()
    print(f"# 2 hosts, {chosen.rate}, engine {chosen.engine}, {chosen.rounds} rounds", flush=True)
    with Testbed(2, chosen.rate) as bed:
        for task in chosen.tasks or parser.get_default("tasks"):
            measure(bed, task, chosen)


if __name__ == "__main__":
    main()
