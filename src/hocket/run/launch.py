"""`hocket launch`: run a user's script on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.engines.catalogue import Listener, Program
from hocket.run.choice import best_engine, make_engine, named_engine
from hocket.run.resolve import WORKERS, check_numbers
from hocket.run.spec import RunSpec


class Relay(Listener):
    """Passes on what the ranks print."""

    def output(self, line: str) -> None:
        print(line, flush=True)


def launch(script: Path, args: list[str], spec: RunSpec) -> None:
    """Run `script` on so many ranks of an engine; raises RankFailed if one of them does."""
    if not os.path.isfile(script):
        raise UserError(f"there is no script {script}")
    check_numbers(spec)
    workers = WORKERS if spec.workers is None else spec.workers
    name = named_engine(spec)[0] or best_engine()[0]
    engine = make_engine(spec, name, workers)
    engine.check(workers)
    print(f"hocket: {script.name} on {workers} ranks, engine {name}", file=sys.stderr, flush=True)
    program = Program("hocket.run.launch:run_script", {"script": str(script.resolve()), "args": args})
    engine.run(program, workers, Relay())


def run_script(rank: Rank, argument: dict[str, Any]) -> None:
    """One rank's run of the script, as `python script.py args` would do it."""
    path = Path(argument["script"])
    sys.argv = [str(path), *argument["args"]]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    code = compile(path.read_bytes(), str(path), "exec")
    try:
        exec(code, {"__name__": "__main__", "__file__": str(path), "__builtins__": __builtins__})
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise
