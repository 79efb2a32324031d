"""Time to one accuracy over limited links: DDP against Hocket's strategies and compressors, interleaved.

    sudo python bench/network/measure.py TASK TARGET [--rate 100mbit] [--hosts 2] [--rounds 3] [--only WORD ...]

Every host is a network namespace with a link of its own (testbed.py), and has one worker; `--hosts 1` is two workers on
one host. `ddp` is PyTorch's DistributedDataParallel on Gloo; `torch` and `mpi` are Hocket's engines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import say_where  # noqa: E402
from testbed import Testbed  # noqa: E402

CASES: dict[str, tuple[str, list[str]]] = {
    "DDP": ("ddp", []),
    "allreduce, plain": ("torch", ["--strategy", "allreduce"]),
    "allreduce on mpi": ("mpi", ["--strategy", "allreduce"]),
    "allreduce, overlap": ("torch", ["--strategy", "allreduce:overlap=on"]),
    "allreduce, fp16": ("torch", ["--strategy", "allreduce", "--compress", "fp16"]),
    "allreduce, qsgd:bits=4": ("torch", ["--strategy", "allreduce", "--compress", "qsgd:bits=4"]),
    "allreduce, topk:0.01": ("torch", ["--strategy", "allreduce", "--compress", "topk:ratio=0.01"]),
    "allreduce, powersgd:rank=2": ("torch", ["--strategy", "allreduce", "--compress", "powersgd:rank=2"]),
    "local-sgd:every=16": ("torch", ["--strategy", "local-sgd:every=16"]),
    "diloco:every=32": ("torch", ["--strategy", "diloco:every=32"]),
}


def once(bed: Testbed, kind: str, words: list[str], task: str, target: float, settings: list[str]) -> dict[str, Any]:
    """One run over the test bed's links."""
    limit, port, workers = 900, "29511", 2 if len(bed.names) == 1 else 1
    before = bed.sent()
    with tempfile.TemporaryDirectory() as folder:
        if kind == "ddp":
            program = [str(HERE / "ddp_over.py"), task, str(target), *settings]
        else:
            common = [
                "--target",
                str(target),
                "--evaluate-every",
                "0.1",
                "--json",
                "--trace",
                "0",
                "--out",
                f"{folder}/run",
            ]
            program = ["-m", "hocket", "train", task, *settings, *common, *words]
        if kind == "mpi":
            hosts = ",".join(f"{address}:{workers}" for address in bed.addresses)
            command = [str(BIN / "hocket"), *program[2:], "--engine", "mpi", "--hosts", hosts, "--deadline", "300"]
            commands = [command]
        else:
            launcher = [str(BIN / "torchrun"), "--nnodes", str(len(bed.names)), "--nproc-per-node", str(workers)]
            launcher += ["--master-addr", bed.addresses[0], "--master-port", port, "--node-rank"]
            commands = [[*launcher, str(n), *program] for n in range(len(bed.names))]
        started = [bed.start(n, command, stdout=subprocess.PIPE) for n, command in enumerate(commands)]
        output, _ = started[0].communicate(timeout=limit)
        for process in started[1:]:
            process.wait(60)
        if started[0].returncode:
            return {"time_to_target": None, "accuracy": float("nan"), "error": started[0].returncode}
        found = json.loads(output.strip().splitlines()[-1])
        accuracy = found["accuracy"] if kind == "ddp" else found["test_accuracy"]
        return {
            "time_to_target": found["time_to_target"],
            "accuracy": accuracy,
            "counted": found.get("bytes_sent", 0),
            "sent": bed.sent() - before,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("target", type=float)
    parser.add_argument("settings", nargs="*", help="KEY=VALUE, such as batch=256")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_intermixed_args()
    cases = {name: case for name, case in CASES.items() if not chosen.only or any(w in name for w in chosen.only)}
    say_where()
    print(
        f"# {chosen.task} to {chosen.target}, {chosen.hosts} hosts, {chosen.rate}; {chosen.rounds} rounds", flush=True
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with Testbed(chosen.hosts, chosen.rate) as bed:
        for _ in range(chosen.rounds):
            for name, (kind, words) in cases.items():
                found[name].append(once(bed, kind, words, chosen.task, chosen.target, chosen.settings))
                print(f"# {name}: {found[name][-1]}", flush=True)
    table(found)


def table(found: dict[str, list[dict[str, Any]]]) -> None:
    """Medians with spread; a ratio is of runs of one round."""
    print("| | seconds to target | of DDP's | accuracy | MB counted | MB over the links |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, runs in found.items():
        times = [run["time_to_target"] for run in runs]
        if None in times:
            print(f"| {name} | never in {times.count(None)} of {len(times)} | | | | |")
            continue
        pairs = zip(times, (run["time_to_target"] for run in found.get("DDP", [])), strict=False)
        ratios = [its / mine for mine, its in pairs if its]
        ratio = f"{statistics.median(ratios):.2f} x as fast" if ratios and name != "DDP" else ""
        spread = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
        accuracy = statistics.median(run["accuracy"] for run in runs)
        counted, sent = (f"{statistics.median(run[key] for run in runs) / 1e6:,.0f}" for key in ("counted", "sent"))
        print(f"| {name} | {spread} | {ratio} | {accuracy:.4f} | {counted if name != 'DDP' else ''} | {sent} |")


if __name__ == "__main__":
    main()
