"""What people see while a run lasts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hocket.app import display
from hocket.core.status import Status


def statuses(count: int) -> list[Status]:
    return [Status(step=10 + r, samples=100, lr=0.025, operation=f"doing-{r}") for r in range(count)]


def show(shown: display.Display, workers: int) -> None:
    shown.begin("digits: allreduce", 40)
    shown.metric("test accuracy", 0.25, float("nan"))
    shown.update(statuses(workers))
    shown.note("a rank said")
    shown.end({})


def test_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "PLAIN_S", 0.0)
    show(display.Plain(), 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    title, progress, note = printed.err.splitlines()
    assert (title, note) == ("digits: allreduce", "a rank said")
    assert progress.startswith("step 10/40 (25 %), ")
    assert progress.endswith(" samples/s, lr 0.025, loss –, test accuracy 0.2500")


def test_plain_lines_tell_how_long_it_will_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: seconds[0])
    plain = display.Plain()
    plain.begin("title", 40)
    for seconds[0], step in ((100.0, 0), (110.0, 10), (120.0, 20)):  # it compiled until 100
        plain.update([Status(step=step)])
    _, *lines = capsys.readouterr().err.splitlines()
    assert [line.partition("), ")[0] for line in lines] == [
        "step 0/40 (0 %",
        "step 10/40 (25 %, 0:30 left",
        "step 20/40 (50 %, 0:20 left",
    ]


def test_what_compiled_code_took_is_seen_and_not_counted() -> None:
    status = Status(step=5, samples=50, lr=0.1)
    assert status.seen() is status
    status.uncounted = lambda: (2, 20, 0.08)
    seen = status.seen()
    assert (seen.step, seen.samples, seen.lr) == (7, 70, 0.08)
    assert (status.step, status.samples, status.lr) == (5, 50, 0.1)


def test_plain_lines_are_rare(capsys: pytest.CaptureFixture[str]) -> None:
    plain = display.Plain()
    plain.begin("title", 40)
    for _ in range(100):
        plain.update(statuses(2))
    assert capsys.readouterr().err == "title\n"


@pytest.mark.parametrize(("workers", "lines"), [(1, 1), (8, 8), (11, 8)])
def test_a_terminal_has_a_line_a_worker_up_to_eight(workers: int, lines: int) -> None:
    terminal = display.Terminal()
    terminal._console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    terminal.begin("digits: allreduce", 40)
    terminal.metric("test accuracy", 0.25, 1.5)
    terminal.update(statuses(workers))
    page = Console(file=io.StringIO(), width=100, record=True)
    page.print(terminal._live.renderable)
    terminal.end({})
    text = page.export_text()
    shown = [line.split() for line in text.splitlines() if "doing-" in line]
    assert [(line[1], line[3], line[-1]) for line in shown] == [
        (f"{r}", f"{10 + r}", f"doing-{r}") for r in range(lines)
    ]
    assert (f"and {workers - 8} more" in text) == (workers > 8)
    assert (
        "loss  1.5000  test accuracy  0.2500" in text
        and f"{(10 + (workers - 1) // 2) / 40:.0%}".replace("%", " %") in text
        and "samples/s" in text
    )


def test_silence(capfd: pytest.CaptureFixture[str]) -> None:
    show(display.Silent(), 2)
    assert capfd.readouterr() == ("", "")


def test_json_alone_goes_to_its_stream(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    show(display.AsJson(stream), 2)
    assert stream.getvalue() == "{}\n"
    assert capsys.readouterr() == ("", "a rank said\n")


def test_a_terminal_that_never_began_can_end() -> None:
    display.Terminal().end({})


def test_the_display_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(display.choose(quiet=True), display.Silent)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert isinstance(display.choose(quiet=False), display.Plain)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(display.choose(quiet=False), display.Terminal)
