"""What overlap hides over real links, Hocket's and that of PyTorch's DDP: the same loop on two hosts, interleaved.

    sudo python bench/overlap_ddp.py [--rate 500mbit] [--task FILE:task] [--batch 512] [--steps 40] [--rounds 3]

`after` is how long a step goes on after its last gradient is there: exposed communication and the optimizer. What is
hidden is by how much shorter that is than where everything leaves after the way back, in per cent of what could be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent
sys.path.insert(0, str(HERE / "network"))

from common import say_where  # noqa: E402
from steps_over import hideable_s  # noqa: E402
from testbed import Testbed  # noqa: E402


def once(bed: Testbed, mode: str, chosen: argparse.Namespace) -> dict[str, Any]:
    settings = [chosen.task, *(str(number) for number in (chosen.batch, chosen.steps, chosen.bucket))]
    launcher = [str(BIN / "torchrun"), "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", bed.addresses[0]]
    launcher += ["--master-port", "29519", "--node-rank"]
    program = [str(HERE / "network/steps_over.py"), mode, *settings]
    started = [bed.start(n, [*launcher, str(n), *program], stdout=subprocess.PIPE) for n in range(2)]
    output, _ = started[0].communicate(timeout=300)
    started[1].communicate(timeout=60)
    if started[0].returncode:
        raise SystemExit(f"{mode} failed over the test bed")
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def hidden(apart: dict[str, Any], overlapped: dict[str, Any], alone: dict[str, Any]) -> float:
    """What part of the hideable communication is hidden; `alone` is a loop without any, with the same optimizer."""
    wire_ms = apart["ms"]["after"] - alone["ms"]["after"]
    could = statistics.mean(1000 * hideable_s(arrivals, wire_ms / 1000) for arrivals in overlapped["arrivals"])
    return float((apart["ms"]["after"] - overlapped["ms"]["after"]) / could)


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default=str(HERE / "network/deep.py:task"))
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bucket", type=int, default=0, help="KiB")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    modes = ["none", "ddp-whole", "ddp", "allreduce", f"allreduce:overlap=on,bucket={chosen.bucket}"]
    say_where()
    print(
        f"# {Path(chosen.task).name}, 2 hosts, {chosen.rate}, batch {chosen.batch}, {chosen.rounds} rounds", flush=True
    )
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with Testbed(2, chosen.rate) as bed:
        for _ in range(chosen.rounds):
            for mode in modes:
                found[mode].append(once(bed, mode, chosen))
                print(f"# {mode}: {found[mode][-1]['processor_ms']}", flush=True)
    print("| | step, ms | forward | backward | after | accuracy |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for mode, runs in found.items():
        parts = [spread([run["ms"][part] for run in runs], ".1f") for part in ("step", "forward", "backward", "after")]
        print(f"| `{mode}` | {' | '.join(parts)} | {runs[-1]['accuracy']:.4f} |")
    for apart, overlapped in (modes[1:3], modes[3:5]):
        rounds = zip(found[apart], found[overlapped], found["none"], strict=True)
        print(f"{overlapped} hides {spread([hidden(*runs) for runs in rounds], '.0%')} of what could be hidden")


if __name__ == "__main__":
    main()
