"""What leaves a page: frames, figures, event files, and the live page."""

from __future__ import annotations

import struct
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from told import leave_run

import hocket
from hocket.app import cli
from hocket.core.errors import UserError
from hocket.report import live, tensorboard
from hocket.report.live import make_server


def test_runs_as_a_frame(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    for seed, time in enumerate((1.0, None)):
        leave_run(tmp_path / str(seed), "allreduce", 2, seed, time=time, lr=0.5)
    (leave_run(tmp_path / "cut") / "result.json").write_text("{")
    frame = hocket.load_runs(tmp_path)
    assert list(frame["seed"]) == [0, 1] and list(frame["lr"]) == [0.5, 0.5]
    assert frame["time_to_target"][0] == 1.0 and pandas.isna(frame["time_to_target"][1])
    assert len(frame.attrs["problems"]) == 1


def test_a_result_as_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = hocket.fit("digits", strategy="allreduce", engine="sim", epochs=3, progress=False)
    figure = hocket.plot(result)
    assert figure._repr_png_().startswith(b"\x89PNG"), "what a notebook shows"
    (axes,) = figure.axes
    assert axes.get_xlabel() == "virtual time, s" and axes.get_ylabel() == "test accuracy"
    assert len(axes.lines) == 1
    assert len(hocket.plot([result, result]).axes[0].lines) == 2
    leave_run(tmp_path / "a", "serial")
    leave_run(tmp_path / "b", "serial", virtual=True)
    with pytest.raises(UserError, match="one kind of time"):
        hocket.plot(tmp_path)


def test_figures_are_written_as_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for workers in (1, 2):
        leave_run(tmp_path / "runs" / str(workers), "allreduce", workers)
    assert cli.run(["report", str(tmp_path / "runs"), "--figures", str(tmp_path / "figures")]) == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"digits-speedup-time.svg", "digits-speedup-time.png", "digits-target-time.svg"} <= names


def test_event_files_are_framed_as_tensorboard_reads_them(tmp_path: Path) -> None:
    """Records of a length, its checksum, the data and its checksum."""
    assert tensorboard._masked(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
    leave_run(tmp_path / "runs" / "a")
    assert cli.run(["report", str(tmp_path / "runs"), "--tensorboard", str(tmp_path / "events")]) == 0
    (path,) = (tmp_path / "events").rglob("*tfevents*")
    rest, records = path.read_bytes(), []
    while rest:
        (length,) = struct.unpack("<Q", rest[:8])
        assert struct.unpack("<I", rest[8:12])[0] == tensorboard._masked(rest[:8])
        records.append(rest[12 : 12 + length])
        assert struct.unpack("<I", rest[12 + length : 16 + length])[0] == tensorboard._masked(records[-1])
        rest = rest[16 + length :]
    assert b"brain.Event:2" in records[0]
    assert sum(b"test_accuracy" in record for record in records) == 3


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("GET", "/", "127.0.0.1", 200),
        ("GET", "/data", "localhost", 200),
        ("GET", "/", "elsewhere.org", 403),
        ("GET", "/../../etc/passwd", "127.0.0.1", 404),
        ("POST", "/data", "127.0.0.1", 501),
        ("DELETE", "/", "127.0.0.1", 501),
    ],
)
def test_a_watch_only_reads_and_only_here(tmp_path: Path, method: str, path: str, host: str, status: int) -> None:
    leave_run(tmp_path / "a")
    server = make_server(tmp_path, 0)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request(method, path, headers={"Host": f"{host}:{server.server_port}"})
        assert connection.getresponse().status == status
        connection.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_train_and_compare_end_by_naming_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["digits", "--engine", "sim", "--steps", "2"]
    assert cli.run(["train", *common, "--out", str(tmp_path / "a run")]) == 0
    assert f"see it: hocket report '{tmp_path / 'a run'}'" in capsys.readouterr().out
    assert cli.run(["compare", *common, "-s", "allreduce", "--seeds", "1", "--out", str(tmp_path / "b")]) == 0
    assert f"see it: hocket report {tmp_path / 'b'}" in capsys.readouterr().out
    assert cli.run(["report", str(tmp_path / "b")]) == 0
    assert (tmp_path / "b" / "report.html").is_file()


def test_dollars_in_names_are_no_formulas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hocket.report import static
    from hocket.report.figures import Axis, Figure, Kind, Series

    name = r"$\frac{$ and 5"
    drawn: tuple[tuple[Kind, list[Any]], ...] = (("lines", [1, 2]), ("bars", [name, "b"]), ("stacks", [name, "b"]))
    for kind, x in drawn:
        series = [Series(name, x, [1.0, 2.0]), Series("b", x, [1.0, 2.0])]
        static.save(Figure("f", name, kind, Axis(name), Axis(name), series), tmp_path / kind)
        assert name in (tmp_path / f"{kind}.svg").read_text()


def test_a_watch_shows_runs_as_far_as_they_have_come(tmp_path: Path) -> None:
    """And leaves out what is no run of this version."""
    leave_run(tmp_path / "over")
    points = "epoch,samples,seconds,train_loss,test_accuracy\n1,100,1.5,0.5,0.6\n2,200,3.0,0.4,\n"
    folders = {
        "a": (points, 'task = "digits"\nstrategy = "gossip"\nworkers = 2\nengine = "threads"\n'),
        "no run": ("a,b\n1,2\n", 'task = "digits"\nengine = "threads"\n'),
        "another version": (points, 'task = "digits"\nengine = "warp"\n'),
    }
    for name, (curve, spec) in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "curve.csv").write_text(curve)
        (tmp_path / name / "spec.toml").write_text(spec)
    data = live.seen(tmp_path)
    assert data["verdict"][0] == "1 under way: a."
    lines = {figure["name"]: figure["series"] for figure in data["sections"][0]["figures"]}
    (going,) = (line for line in lines["loss-time-time"] if "gossip" in line["name"])
    assert not any("ranked" in line for line in live.seen(tmp_path / "a")["verdict"])
    assert going["name"].endswith("(going on)") and not any("Never" in line for line in data["verdict"])
    assert (going["x"], going["y"]) == ([1.5, 3.0], [0.5, 0.4])
