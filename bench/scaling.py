"""Two workers against one: all-reduce on mpi, mnist-mlp, batch 512 a worker."""

from __future__ import annotations

from common import compare

import hocket


def main() -> None:
    def run(workers: int) -> float:
        result = hocket.fit(
            "mnist-mlp",
            strategy="allreduce",
            engine="mpi",
            workers=workers,
            batch=512,
            epochs=3,
            trace=0,
            progress=False,
        )
        return result.samples_per_s

    compare("2 workers", lambda: run(2), "1 worker", lambda: run(1), "samples/s")


if __name__ == "__main__":
    main()
