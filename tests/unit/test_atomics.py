"""Atomic operations: exact under contention, and in the memory order that they state."""

from __future__ import annotations

import re
import time
from threading import Thread

import numpy as np
from numba import int64, njit

from hocket.kernels.memory.atomics import (
    compare_and_swap,
    fetch_add,
    load,
    monotonic_ns,
    pause,
    sched_yield,
    store,
    wall_ns,
)


@njit(nogil=True)
def add_many(words, times):
    for _ in range(times):
        fetch_add(words, 8, 1)


@njit(nogil=True)
def swap_many(words, times):
    for _ in range(times):
        while True:
            seen = load(words, 8)
            if compare_and_swap(words, 8, seen, seen + 1):
                break
            pause()


@njit(nogil=True)
def hand_over(words, data, rounds):
    for i in range(1, rounds + 1):
        data[0] = i
        store(words, 0, i)
        while load(words, 8) != i:
            sched_yield()


@njit(nogil=True)
def take_over(words, data, rounds):
    wrong = 0
    for i in range(1, rounds + 1):
        while load(words, 0) != i:
            sched_yield()
        wrong += data[0] != i
        store(words, 8, i)
    words[16] = wrong


@njit((int64[::1],))
def one_of_each(words):
    store(words, 0, load(words, 1))
    fetch_add(words, 2, 1)
    return compare_and_swap(words, 3, 5, 6)


@njit
def clocks():
    return monotonic_ns(), wall_ns()


def in_threads(*calls):
    threads = [Thread(target=function, args=arguments) for function, *arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_additions_and_swaps_of_four_threads_are_all_counted() -> None:
    words = np.zeros(16, np.int64)
    in_threads(*[(add_many, words, 500_000)] * 2, *[(swap_many, words, 500_000)] * 2)
    assert words[8] == 2_000_000


def test_returned_values() -> None:
    words = np.array([0, 7, 10, 5], np.int64)
    assert one_of_each(words)
    assert not one_of_each(words)
    assert words.tolist() == [7, 7, 12, 6]


def test_what_was_written_before_a_store_is_seen_after_its_load() -> None:
    words, data = np.zeros(24, np.int64), np.zeros(1, np.int64)
    in_threads((hand_over, words, data, 500), (take_over, words, data, 500))
    assert words[8] == 500 and words[16] == 0


def test_the_memory_order_is_the_stated_one() -> None:
    (code,) = one_of_each.inspect_llvm().values()
    order = r"[^\n]*\b"
    assert re.search(rf"load atomic i64{order}seq_cst", code)
    assert re.search(rf"store atomic i64{order}release", code)
    assert re.search(rf"atomicrmw add{order}seq_cst", code)
    assert re.search(rf"cmpxchg{order}seq_cst seq_cst", code)


def test_the_clocks_are_those_of_python() -> None:
    monotonic, wall = clocks()
    assert abs(time.monotonic_ns() - monotonic) < 1e9
    assert abs(time.time_ns() - wall) < 1e9
