"""What a rank says of an error under a launcher that is not Hocket's."""

from __future__ import annotations

import pytest

import hocket
from hocket.core.errors import CommError, UserError
from hocket.core.frames import why


def caught(error: BaseException) -> str:
    with pytest.raises(type(error)) as found:
        raise error
    return why(found.value, 1, "all_reduce")


def test_a_mistake_and_a_signal_are_one_line() -> None:
    assert caught(UserError("use another")) == "rank 1: use another"
    assert caught(KeyboardInterrupt()) == "rank 1 was interrupted in all_reduce"


def test_the_users_lines_are_shown() -> None:
    for error in (CommError("no answer"), ValueError("mine")):
        first, *more = caught(error).splitlines()
        assert first == f"rank 1 failed in all_reduce: {type(error).__name__}: {error}"
        assert more[0].endswith("in caught") and more[1].strip() == "raise error"


def test_an_error_whose_words_fail_is_told_all_the_same() -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert caught(Wordless()).startswith("rank 1 failed in all_reduce: Wordless: its own __str__ raises\n")


def test_our_own_fault_has_a_traceback() -> None:
    with pytest.raises(AttributeError) as found:
        hocket.nothing_of_that_name  # noqa: B018
    ours = found.value.with_traceback(found.tb.tb_next)
    assert "Traceback" in why(ours, 1, "start") and "hocket/__init__.py" in why(ours, 1, "start")
