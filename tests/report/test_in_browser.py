"""The report in a real browser: drawn whole, at every width, and it asks nobody for anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from told import leave_run

from hocket.report.charts import ring_steps
from hocket.report.live import make_server
from hocket.report.make import write_page
from hocket.report.page import Story
from hocket.report.records import read_records

pytestmark = pytest.mark.skipif(bool(browser.MISSING), reason=browser.MISSING)

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"

LONG = "local-sgd:hogwild=1,every=8,hot=0.02,between=64"


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Browser]:
    with browser.browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every kind of figure: a heat map, failed runs, a ring, many groups, a hostile name."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for batch in (8, 64):
            for lr in (0.1, 1.0, 10.0):
                verdict = "diverged" if lr == 10.0 and seed else "finished"
                name = f"h{batch}-{lr}-{seed}"
                leave_run(folder / name, "hogwild", 2, seed, verdict=verdict, batch=batch, lr=lr, time=lr, virtual=True)
        for workers in (1, 2, 4, 8):
            leave_run(folder / f"a{workers}-{seed}", "allreduce", workers, seed, speed=900.0 * workers, time=None)
        leave_run(folder / f"s{seed}", "serial", 1, seed)
        leave_run(folder / f"x{seed}", "serial", 1, seed, task=f"my {HOSTILE}")
        leave_run(folder / f"long{seed}", LONG, 4, seed, time=0.01, virtual=True)
    records, problems = read_records([folder])
    asked = {"title": "Accuracy against workers", "x": "workers", "y": "metric", "log": "x"}
    bytes_ = {"title": "Accuracy against bytes", "x": "megabytes", "y": "metric"}
    story = Story("Why?", "So.", [asked, bytes_], [ring_steps()], ["a cell: cannot run"])
    write_page(folder / "report.html", records, problems, f"a study {HOSTILE}", story)
    return (folder / "report.html").as_uri()


DRAWN = """return [...document.querySelectorAll('figure')].map(f => ({
    id: f.id, marks: f.querySelectorAll('svg polyline, svg rect, svg circle').length, height: f.clientHeight,
    wide: f.querySelector('svg').getBoundingClientRect().right - innerWidth, text: f.textContent}))"""


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_is_drawn_and_nothing_is_asked_for(window: browser.Browser, page: str, width: int, theme: str) -> None:
    window.resize(width)
    window.console(), window.requests()
    window.open(page)
    window.until("return document.querySelector('figure svg') !== null")
    if window.run("return document.documentElement.dataset.theme") != theme:
        window.run("document.getElementById('theme').click()")
    figures = window.run(DRAWN)
    assert len(figures) >= 15
    for figure in figures:
        assert figure["marks"] > 0, figure
        assert figure["wide"] <= 0, figure  # nothing beyond the edge
        assert "NaN" not in figure["text"] and "undefined" not in figure["text"], figure
    broken = "return [...document.querySelectorAll('svg *')].filter(n => [...n.attributes].some(a => /NaN|undefined|Infinity/.test(a.value))).length"  # noqa: E501
    assert window.run(broken) == 0
    assert window.run("return document.documentElement.scrollWidth") <= width
    assert window.console() == []
    assert set(window.requests()) == {page}


OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll('figure svg')) {
  const boxes = [...svg.querySelectorAll('text')].filter(t => t.textContent).map(t => [t.textContent, t.getBoundingClientRect()]);
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const w = Math.min(p.right, q.right) - Math.max(p.left, q.left), h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (w > 2 && h > 4) found.push(svg.getAttribute('aria-label') + ': ' + a + ' / ' + b);
  }));
}
return found"""  # noqa: E501


CUT = """
const found = [];
for (const svg of document.querySelectorAll('figure svg')) {
  const across = svg.closest('figure').getBoundingClientRect(), down = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll('text')) {
    const box = text.getBoundingClientRect();
    if (box.left < across.left || box.right > across.right || box.top < down.top - 1 || box.bottom > down.bottom + 1)
      found.push(svg.getAttribute('aria-label') + ': ' + text.textContent);
  }
}
return found"""


@pytest.mark.parametrize("width", [400, 1600])
def test_every_text_of_a_figure_can_be_read(window: browser.Browser, page: str, width: int) -> None:
    window.resize(width)
    window.open(page)
    assert window.run(OVERLAPS) == []
    assert window.run(CUT) == []


def test_users_text_stays_text(window: browser.Browser, page: str) -> None:
    window.open(page)
    assert window.run("return document.title").startswith("a study </script>")
    assert window.run("return document.images.length") == 0
    assert window.run("return document.scripts.length") == 2


ROWS = "return [...document.querySelectorAll('table')][0].querySelectorAll('tbody tr').length"
COLUMN = "return [...document.querySelector('table').querySelectorAll('tbody tr')].map(r => r.children[3].textContent)"


def test_the_table_sorts_and_filters(window: browser.Browser, page: str) -> None:
    window.resize(1600)
    window.open(page)
    assert window.run(ROWS) == 5
    click = "[...document.querySelectorAll('th')].find(h => h.textContent === 'workers').click()"
    window.run(click)
    assert window.run(COLUMN) == ["1", "1", "2", "4", "8"]
    window.run(click)
    assert window.run(COLUMN) == ["8", "4", "2", "1", "1"]
    type_ = (
        "const i = document.querySelector('input[type=search]'); i.value = '{}'; i.dispatchEvent(new Event('input'))"
    )
    window.run(type_.format("allreduce 4"))
    assert window.run(COLUMN) == ["4"]
    window.run(type_.format("nothing like this"))
    assert window.run(ROWS) == 0


def test_a_reader_chooses_what_is_shown(window: browser.Browser, page: str) -> None:
    window.open(page)
    lines = "return document.querySelector('#metric-time-time svg').querySelectorAll('polyline').length"
    before = window.run(lines)
    window.run("document.querySelector('#metric-time-time .legend button[aria-pressed=true]').click()")
    assert window.run(lines) == before - 1


def test_the_ring_goes_step_by_step(window: browser.Browser, page: str) -> None:
    window.open(page)
    title = "return document.querySelector('#ring svg text').textContent"
    assert window.run(title).startswith("before")
    window.run("[...document.querySelectorAll('#ring button')].find(b => b.textContent.includes('▶')).click()")
    assert window.run(title).startswith("reduce-scatter, step 1")


def test_a_watched_folder_is_shown_as_it_grows(window: browser.Browser, tmp_path: Path) -> None:
    leave_run(tmp_path / "first")
    server = make_server(tmp_path, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        window.open(f"http://127.0.0.1:{server.server_port}/")
        window.until("return document.querySelectorAll('tbody tr').length === 1")
        leave_run(tmp_path / "second", "allreduce", 2)
        window.until("return document.querySelectorAll('tbody tr').length === 2")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
