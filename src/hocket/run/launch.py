"""`hocket launch`: run a user's script on every rank, and keep a record of what it trained."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.core.errors import RankFailed, UserError
from hocket.core.status import Status
from hocket.engines.catalogue import Listener, Program
from hocket.measure.folder import RunFolder
from hocket.measure.timeline import Event, Timeline
from hocket.run.choice import best_engine, make_engine, named_engine
from hocket.run.place import check_name, new_folder
from hocket.run.resolve import WORKERS, check_numbers
from hocket.run.script import find_module
from hocket.run.spec import RunSpec


class ScriptRecord(Listener):
    """Passes on what the ranks print, and keeps what their teams tell of a training."""

    def __init__(self, folder: RunFolder, known: dict[str, Any]) -> None:
        self._folder, self._known = folder, known
        self._result: dict[str, Any] = {}
        self._joined: Counter[int] = Counter()
        self._ended: set[int] = set()
        self._events: defaultdict[int, list[Event]] = defaultdict(list)

    def output(self, line: str) -> None:
        print(line, flush=True)

    def hear(self, rank: int, kind: str, data: dict[str, Any], blob: bytes) -> None:
        match kind:
            case "point":
                self._folder.point(data)
            case "model":
                self._folder.model(blob)
            case "result":
                self._result = data
            case "events":
                self._events[rank] += data["events"]
            case "joined":
                self._joined[rank] += 1
                self._events.pop(rank, None)  # the record is of the last block
            case "script-ended":
                self._ended.add(rank)

    def tick(self, statuses: Sequence[Status]) -> None:
        if missed := self.missed():
            raise missed

    def missed(self) -> UserError | None:
        """Whether others are in a block to which a rank will never come, since its script has ended."""
        first, blocks = max(self._joined.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
        for rank in sorted(self._ended):
            if self._joined[rank] < blocks:
                return UserError(
                    f"rank {rank} has come to the end of the script, and rank {first} waits for it in hocket.join: "
                    f"every rank must come to the same blocks (was there a return or an exit on one of them?)"
                )
        return None

    def close(self, verdict: str, error: str | None = None) -> None:
        if self._events:
            timeline = Timeline(self._result.get("workers", len(self._events)))
            for rank, events in self._events.items():
                timeline.add(rank, events)
            self._folder.timeline(timeline.to_json())
        ending = {"verdict": verdict, "error": error} if error or not self._result else {}
        missing = self._folder.finish(self._known | self._result | {"out": str(self._folder.path)} | ending)
        if missing:
            print(f"hocket: {missing}", file=sys.stderr, flush=True)


def launch(script: str, args: list[str], spec: RunSpec, *, module: bool, out: Path | None, force: bool) -> None:
    """Run `script` on so many ranks of an engine; raises RankFailed if one of them does."""
    if script.startswith("-"):
        raise UserError(f"hocket launch has no option {script}; its options come before the script, see --help")
    if module:
        find_module(script)
    elif not os.path.isfile(script):
        raise UserError(f"there is no script {script}; 'hocket launch -m' runs a module of a package")
    check_numbers(spec)
    workers = WORKERS if spec.workers is None else spec.workers
    name = named_engine(spec)[0] or best_engine()[0]
    engine = make_engine(spec, name, workers)
    if engine.drives_all:
        raise UserError(f"engine {engine.name} has no ranks that could run a script; use --engine sim")
    engine.check(workers)
    short = script.rpartition(".")[2] if module else Path(script).stem
    if out is None:
        out, force = new_folder(f"launch-{short[:80]}"), True
    check_name(out)
    ranks = "1 rank" if workers == 1 else f"{workers} ranks"
    print(f"hocket: {short} on {ranks}, engine {name}; record in {out}", file=sys.stderr, flush=True)
    if note := engine.note():
        print(f"hocket: {note}", file=sys.stderr, flush=True)
    known = {"task": short, "engine": name, "ranks": workers}
    record = ScriptRecord(RunFolder(out, spec.to_toml(), force=force), known)
    path, name = ("", script) if module else (str(Path(script).resolve()), "")
    argument = {"script": path, "module": name, "args": args, "timeline": spec.timeline}
    own_main = sys.modules["__main__"]
    try:
        engine.run(Program("hocket.run.script:run_script", argument), workers, record)
    except KeyboardInterrupt:
        record.close("interrupted", "interrupted by the user")
        raise
    except RankFailed as failure:
        missed = record.missed()
        record.close("crashed", str(missed) if missed else f"{failure}\n{failure.traceback}".rstrip())
        raise missed or failure from None
    except BaseException as error:
        record.close("crashed", str(error))
        raise
    else:
        record.close("finished")
    finally:
        sys.modules["__main__"] = own_main  # ranks that are threads have put the script in its place
