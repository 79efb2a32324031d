"""How fast vectors are encoded and decoded, on one core: 4 M floats, GB of float32 a second.

    python bench/codecs.py [rounds]

Top-k is held against torch.topk of a hundredth of the vector plus one pass over all of it (the largest size).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from common import say_where  # first: it sets the number of threads

from hocket.compress import make
from hocket.compress.memory import check_finite
from hocket.compress.sparsified import largest

FLOATS = 4_000_000
SCHEMES = (
    "fp16", "bf16", "int8", "qsgd:bits=2", "qsgd:bits=4", "qsgd:bits=8", "terngrad", "natural", "onebit", "sign",
    "topk:0.01", "topk:0.01+qsgd:bits=8", "threshold:2.5", "randomk:0.01", "dgc:ramp=0", "powersgd:rank=2",
)  # fmt: skip


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    say_where()
    x = torch.randn(FLOATS, generator=torch.Generator().manual_seed(1))
    gigabytes = 4 * FLOATS / 1e9
    print(f"{'compressor':24}{'check':>8}{'encode':>8}{'decode':>8}{'enc+dec':>9}  GB/s   bytes: 1 to")
    for text in SCHEMES:
        scheme = make(text)
        block = scheme.encode(x, 1)
        times = {"check": [], "encode": [], "decode": []}
        for _ in range(rounds + 1):
            times["check"].append(seconds(lambda s=scheme: check_finite(x, s, "x")))
            times["encode"].append(seconds(lambda s=scheme: s.encode(x, 1)))
            times["decode"].append(seconds(lambda s=scheme, b=block: s.decode(b, FLOATS)))
        check, encode, decode = (statistics.median(found[1:]) for found in times.values())
        speeds = [gigabytes / check, gigabytes / encode, gigabytes / decode, gigabytes / (encode + decode)]
        shown = "".join(f"{speed:{8 + (i == 3)}.2f}" for i, speed in enumerate(speeds))
        print(f"{text:24}{shown}       {4 * FLOATS / block.numel():8.1f}", flush=True)
    sample, k = x[::100].contiguous(), FLOATS // 100
    ratios = []
    for _ in range(rounds):
        selection = seconds(lambda: largest(x.numpy(), k))
        ratios.append(
            selection / (seconds(lambda: torch.topk(sample.abs(), k // 100)) + seconds(lambda: x.abs().max()))
        )
    print(f"top-k selection over (torch.topk of a 1 % sample + one pass): {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
