"""The file of a timeline is one that Perfetto opens: named lanes, and spans that lie inside each other or apart."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import tiny

import hocket
from hocket.app.cli import run
from hocket.core.errors import UserError

RING = "allreduce:algorithm=ring"
OVERLAP = "allreduce:overlap=on,bucket=1"


def drawn(tmp_path: Path, text: str, **settings: Any) -> list[dict[str, Any]]:
    made = tiny.task(48, model=tiny.net)
    tiny.fit(made, strategy=text, out=tmp_path / "run", timeline=True, **{"workers": 2} | settings)
    events: list[dict[str, Any]] = json.loads((tmp_path / "run/timeline.json").read_text())["traceEvents"]
    return events


def names(events: list[dict[str, Any]], rank: int = 0, lane: int = 0) -> set[str]:
    return {e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, lane)}


def check(events: list[dict[str, Any]]) -> None:
    lanes: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in ("X", "M") and event["name"] and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= -1e3 and event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert lanes.keys() == named
    for spans in lanes.values():
        around: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= begin + 1e-2:  # times are rounded to a nanosecond
                around.pop()
            assert not around or end <= around[-1] + 1e-2
            around.append(end)


@pytest.mark.parametrize("engine", ["threads", "sim"])
@pytest.mark.parametrize(
    ("text", "settings", "wanted"),
    [
        ("allreduce", {}, {"forward", "backward", "gradient", "all_reduce", "step"}),
        (OVERLAP, {}, {"forward", "backward", "send to the background", "wait", "step"}),
        (RING, {"workers": 3}, {"send share-reduce", "recv share-reduce", "send share-only", "recv share-only"}),
        ("server:mode=async", {"driver": "pytorch"}, {"forward", "backward", "send push", "recv model"}),
        ("allreduce", {"compress": "qsgd:bits=4"}, {"encode", "decode", "send chunk", "recv chunk"}),
        ("allreduce", {"compress": "topk:0.5"}, {"encode", "all_gather"}),
        ("allreduce", {"accumulate": 2, "batch": 2}, {"forward", "backward"}),
        ("allreduce", {"layout": "pipeline=2,microbatches=2"}, {"forward", "backward", "send x"}),
    ],
)
def test_a_timeline_is_one_lane_a_rank_of_spans_that_nest(
    tmp_path: Path, engine: str, text: str, settings: dict[str, Any], wanted: set[str]
) -> None:
    events = drawn(tmp_path, text, engine=engine, **settings)
    check(events)
    assert wanted <= names(events)
    lanes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"worker 0", "worker 1"} <= lanes
    if text.startswith("server"):
        assert "server 0" in lanes and "step" in names(events, rank=2)
    if text == OVERLAP:
        assert names(events, lane=1) == {"all_reduce"}


def test_in_the_simulator_the_ring_takes_its_steps_one_by_one(tmp_path: Path) -> None:
    events = drawn(tmp_path, RING, engine="sim", workers=3, steps=1)
    sends = [e for e in events if e["name"].startswith("send share") and e["pid"] == 0]
    assert [e["name"].split()[1] for e in sends[:4]] == ["share-reduce"] * 2 + ["share-only"] * 2
    assert all(e["args"]["peer"] == 1 for e in sends)
    moments = [e["ts"] for e in sends]
    assert moments == sorted(moments) and len(set(moments)) > 2


def test_who_is_early_waits_inside_the_collective(tmp_path: Path) -> None:
    sim = {"compute": "10ms", "latency": "0s", "stragglers": "1x3"}
    events = drawn(tmp_path, "allreduce", engine="sim", sim=sim, steps=2)
    waits = {rank: [e["dur"] for e in events if e["name"] == "wait" and e["pid"] == rank] for rank in (0, 1)}
    assert waits[0][:2] == pytest.approx([20_000.0, 20_000.0]) and not waits[1]


def test_a_timeline_changes_no_result_and_is_there_only_when_asked_for(tmp_path: Path) -> None:
    made = tiny.task(48, model=tiny.net)
    plain = tiny.fit(made, strategy=OVERLAP, workers=2, engine="sim", out=tmp_path / "plain")
    seen = tiny.fit(made, strategy=OVERLAP, workers=2, engine="sim", out=tmp_path / "seen", timeline=True)
    assert plain.virtual_seconds == seen.virtual_seconds
    assert all((plain.state[name] == tensor).all() for name, tensor in seen.state.items())
    assert not (tmp_path / "plain/timeline.json").exists() and (tmp_path / "seen/timeline.json").exists()
    again = tiny.fit(made, strategy=OVERLAP, workers=2, engine="sim", out=tmp_path / "seen", force=True)
    assert again.verdict == "finished" and not (tmp_path / "seen/timeline.json").exists()


def test_a_timeline_needs_a_folder() -> None:
    with pytest.raises(UserError, match="give one with out="):
        hocket.fit(tiny.task(), engine="sim", timeline=True, progress=False)


LOOP = """
import hocket, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hocket.join({text!r}) as team:
    model, optimizer = team.prepare(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("engine", ["threads", "sim"])
@pytest.mark.parametrize(
    ("text", "wanted"), [("allreduce", {"all_reduce", "step"}), ("server:mode=async", {"send push", "recv model"})]
)
def test_a_loop_of_your_own_has_a_timeline_too(tmp_path: Path, engine: str, text: str, wanted: set[str]) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(text=text))
    words = ["launch", "--engine", engine, "-n", "3", "--timeline", "--out", str(tmp_path / "run"), str(script)]
    assert run(words) == 0
    events = json.loads((tmp_path / "run/timeline.json").read_text())["traceEvents"]
    check(events)
    assert wanted | {"gradient"} <= names(events)
    workers = 2 if text.startswith("server") else 3
    for rank in range(workers):
        taken = [e["args"]["step"] for e in events if e["name"] == "gradient" and e["pid"] == rank]
        assert taken == [1, 2, 3]
    lanes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert lanes == {f"worker {rank}" for rank in range(workers)} | ({"server 0"} if workers == 2 else set())
