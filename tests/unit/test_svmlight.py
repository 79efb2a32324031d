"""Files that users bring: the fast parsers read what the line-by-line ones read, and a broken line is named."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.core.errors import UserError
from hocket.tasks import ratings, svmlight

NOWHERE = Path("file")

numbers = st.floats(-1e6, 1e6, width=32)
number_texts = st.one_of(
    numbers.map(lambda v: f"{v:g}"), numbers.map(repr), st.integers(-99, 99).map(str), st.just("+1"), st.just("5e-1")
)
blanks = st.sampled_from([" ", "  ", "\t"])


@st.composite
def svmlight_texts(draw: st.DrawFn) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        pairs = draw(st.lists(st.tuples(st.integers(0, 10**6), number_texts), max_size=5))
        tokens = [draw(number_texts), *(f"{column}:{value}" for column, value in pairs)]
        lines.append(draw(blanks).join(tokens) + draw(st.sampled_from(["", " ", "\r"])))
        lines += draw(st.sampled_from([[], [""]]))
    return "\n".join(lines) + draw(st.sampled_from(["", "\n"]))


def same(a: svmlight.Table, b: svmlight.Table) -> bool:
    arrays = (a.labels, b.labels), (a.pointers, b.pointers), (a.columns, b.columns), (a.values, b.values)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in arrays)


@given(svmlight_texts())
def test_the_fast_parser_reads_every_clean_text_as_the_slow_one_does(text: str) -> None:
    fast = svmlight.parse_clean(text.encode())
    assert fast is not None
    assert same(fast, svmlight.parse_lines(text.encode(), NOWHERE))


@given(st.text("01:.-e \n#x", max_size=30))
def test_the_fast_parser_takes_nothing_that_the_slow_one_refuses(text: str) -> None:
    fast = svmlight.parse_clean(text.encode())
    if fast is not None:
        assert same(fast, svmlight.parse_lines(text.encode(), NOWHERE))


def test_comments_and_query_numbers_are_left_out() -> None:
    table = svmlight.parse_lines(b"# header\n1 qid:3 2:0.5 # note\n\n-1 1:1\n", NOWHERE)
    assert table.labels.tolist() == [1, -1]
    assert table.columns.tolist() == [2, 1]
    assert table.values.tolist() == [0.5, 1]
    assert table.pointers.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x 1:2", "a number as the label; got 'x'"),
        ("1:2 3:4", "a number as the label; got '1:2'"),
        ("1 2", "expected column:value; got '2'"),
        ("1 2:", "expected column:value; got '2:'"),
        ("1 2:a", "expected column:value; got '2:a'"),
        ("1 2:3:4", "expected column:value; got '2:3:4'"),
        ("1 -2:3", "expected column:value; got '-2:3'"),
        ("1 2.5:3", "expected column:value; got '2.5:3'"),
        ("1 2:nan", "expected column:value; got '2:nan'"),
        ("1 2:1e99", "expected column:value; got '2:1e99'"),
        ("1 9999999999:1", "a column up to 268435456"),
        ("\x00\xff", "a number as the label"),
    ],
)
def test_a_broken_svmlight_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.svm"
    path.write_bytes(b"1 1:1\n\n-1 1:2\n" + line.encode("latin-1") + b"\n1 1:3\n")
    with pytest.raises(UserError) as error:
        svmlight.read(path)
    assert str(error.value).startswith(f"{path} line 4: expected ")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_may_be_gzipped_whatever_their_name(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(gzip.compress(b"1 1:1\n"))
    assert len(svmlight.read(path)) == 1


@pytest.mark.parametrize("read", [svmlight.read, ratings.read])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\n \n", "is empty"), (gzip.compress(b"1 1:1", mtime=0)[:-9], "damaged gzip")],
)
def test_an_empty_or_damaged_file_is_one_line(tmp_path: Path, read: object, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert callable(read)
    with pytest.raises(UserError, match=message):
        read(path)
    with pytest.raises(UserError, match="is a directory"):
        read(tmp_path)
    with pytest.raises(UserError, match="there is no file"):
        read(tmp_path / "nothing")


def test_a_file_of_comments_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.svm"
    path.write_text("# nothing\n")
    with pytest.raises(UserError, match="only comments"):
        svmlight.read(path)


@given(
    st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(0, 99), number_texts), min_size=1, max_size=6),
    st.sampled_from([" ", "\t", ",", "::", ", "]),
    st.booleans(),
)
def test_ratings_read_the_same_both_ways(rows: list[tuple[int, int, str]], parting: str, stamped: bool) -> None:
    lines = [parting.join([str(u), str(i), r] + ["881250949"] * stamped) for u, i, r in rows]
    text = "\n".join(lines).encode()
    fast, slow = ratings.parse_clean(text), ratings.parse_lines(text, NOWHERE)
    assert fast is not None
    assert fast.users.tolist() == slow.users.tolist() == [u for u, _, _ in rows]
    assert fast.items.tolist() == slow.items.tolist() == [i for _, i, _ in rows]
    assert fast.ratings.tolist() == slow.ratings.tolist() == [float(np.float32(float(r))) for _, _, r in rows]


def test_names_of_columns_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating\n1,2,3.5\n")
    assert ratings.read(path).ratings.tolist() == [3.5]
    path.write_text("userId,movieId,rating\n1,2,3.5\n1,x,3\n")
    with pytest.raises(UserError, match="line 3: expected user item rating"):
        ratings.read(path)


@pytest.mark.parametrize("line", ["1 2", "1 2 x", "1.5 2 3", "a 2 3", "1 2 nan", "1e40 2 3", "1;2;3"])
def test_a_broken_rating_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "ratings"
    path.write_text(f"1 1 5\n{line}\n2 2 4\n")
    with pytest.raises(UserError, match=r"line 2: expected user item rating") as error:
        ratings.read(path)
    assert line in str(error.value)


def test_a_large_file_is_read_fast(tmp_path: Path) -> None:
    line = "1 " + " ".join(f"{column}:0.{column}" for column in range(1000, 1086)) + "\n"
    path = tmp_path / "rows.svm"
    path.write_text(line * 5_000)
    began = time.process_time()
    assert len(svmlight.read(path)) == 5_000
    assert time.process_time() - began < 2  # 0.2 s when nothing else runs; line by line takes 5 s
