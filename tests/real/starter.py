"""A command whose run only waits: `python starter.py ENGINE RANKS`. It says what its ranks print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hocket.engines.catalogue import Listener, Program, engine

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


class Aloud(Listener):
    def output(self, line: str) -> None:
        print(line, flush=True)


if __name__ == "__main__":
    engine.make(sys.argv[1]).run(Program("misbehave:stays"), int(sys.argv[2]), Aloud())
