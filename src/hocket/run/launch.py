"""`hocket launch`: run a user's script on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hocket.core.comm import Rank
from hocket.core.errors import UserError
from hocket.engines.catalogue import Listener, Program
from hocket.run.spec import RunSpec


class Relay(Listener):
    """Passes on what the ranks print."""

    def output(self, line: str) -> None:
        print(line, flush=True)


def launch(script: Path, args: list[str], spec: RunSpec) -> None:
    """Run `script` on `spec.workers` ranks of `spec.engine`; raises RankFailed if one of them does."""
    if not script.is_file():
        raise UserError(f"there is no script {script}")
    spec.check()
    assert spec.workers
    engine = spec.make_engine()
    engine.check(spec.workers)
    print(f"hocket: {script.name} on {spec.workers} ranks, engine {spec.engine}", file=sys.stderr, flush=True)
    program = Program("hocket.run.launch:run_script", {"script": str(script.resolve()), "args": args})
    engine.run(program, spec.workers, Relay())


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
