"""Every interleaving of the atomic steps of `hocket.kernels.memory.leashed`, for three workers.

Each worker reads (counts in, looks at the head again, counts out), then publishes: claims a slot, reads the latest
vector into it, swaps the head, and tries again if another was first. A claim may try the slots in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

CLAIMED = 100  # more than the workers, as in the kernels

# Where a worker is, by the step that it does next. READ and BASE run the same steps: 10 is added for BASE.
LOOK, COUNT_IN, LOOK_AGAIN, UNDO, COUNT_OUT = range(5)
CLAIM, CHECK_HEAD, CHECK_COUNT, UNCLAIM = range(5, 9)
BASE = 10
SWAP, DISOWN, DISOWN_AND_RETRY = range(20, 23)
HOLDS_BASE = BASE + COUNT_OUT

Worker = tuple[int, int, int]  # step, the head that it saw (or -1), the slot that it claims or owns (or -1)
State = tuple[int, tuple[int, ...], tuple[Worker, ...]]  # head, reference counts, workers

IDLE: Worker = (LOOK, -1, -1)


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass(frozen=True)
class Model:
    """The protocol, with parts that can be left out to see that the checker misses them."""

    slots: int
    updates: int
    """Workers stop when so many are published."""
    workers: int = 3
    readers_look_again: bool = True
    claims_check_head: bool = True
    claims_check_count: bool = True
    versions: bool = True
    losers_disown: bool = True

    def start(self) -> State:
        return 0, (0,) * self.slots, (IDLE,) * self.workers

    def successors(self, state: State) -> Iterator[State]:
        """All states that one atomic step of one worker leads to. Workers are alike, so their order is dropped."""
        known = {state[0] % self.slots, *(seen % self.slots for _, seen, _ in state[2] if seen >= 0)}
        for i, worker in enumerate(state[2]):
            others = state[2][:i] + state[2][i + 1 :]
            for head, counts, moved in self.moves(state[0], state[1], worker, known):
                yield head, counts, tuple(sorted((*others, moved)))

    def moves(
        self, head: int, counts: tuple[int, ...], worker: Worker, known: set[int]
    ) -> Iterator[tuple[int, tuple[int, ...], Worker]]:
        """What the worker may do next, and what then is. Free slots that nobody knows are alike: one stands for all."""
        step, seen, slot = worker
        offset = BASE if BASE <= step < SWAP else 0
        match step - offset:
            case 0:  # LOOK
                if offset or head // self.slots < self.updates:
                    yield head, counts, (COUNT_IN + offset, head, slot)
            case 1:  # COUNT_IN
                yield head, self.add(counts, seen % self.slots, 1), (LOOK_AGAIN + offset, seen, slot)
            case 2:  # LOOK_AGAIN
                valid = head == seen or not self.readers_look_again
                yield head, counts, ((COUNT_OUT if valid else UNDO) + offset, seen, slot)
            case 3:  # UNDO
                yield head, self.add(counts, seen % self.slots, -1), (LOOK + offset, -1, slot)
            case 4:  # COUNT_OUT
                after = (SWAP, seen, slot) if offset else (CLAIM, -1, -1)
                yield head, self.add(counts, seen % self.slots, -1), after
            case 5:  # CLAIM
                free = [slot for slot in range(self.slots) if counts[slot] == 0]
                alike = [slot for slot in free if slot not in known]
                for slot in (*(slot for slot in free if slot in known), *alike[:1]):
                    yield head, self.add(counts, slot, -CLAIMED), (CHECK_HEAD, -1, slot)
            case 6:  # CHECK_HEAD
                fine = head % self.slots != slot or not self.claims_check_head
                yield head, counts, (CHECK_COUNT if fine else UNCLAIM, -1, slot)
            case 7:  # CHECK_COUNT
                fine = counts[slot] == -CLAIMED or not self.claims_check_count
                yield head, counts, (LOOK + BASE if fine else UNCLAIM, -1, slot)
            case 8:  # UNCLAIM
                yield head, self.add(counts, slot, CLAIMED), (CLAIM, -1, -1)
            case 20:  # SWAP
                if head == seen or (not self.versions and head % self.slots == seen % self.slots):
                    if head != seen:
                        raise Violation("lost update")
                    yield (head // self.slots + 1) * self.slots + slot, counts, (DISOWN, -1, slot)
                else:
                    yield head, counts, (DISOWN_AND_RETRY, -1, slot)
            case 21:  # DISOWN
                yield head, self.add(counts, slot, CLAIMED), IDLE
            case 22:  # DISOWN_AND_RETRY
                yield head, self.add(counts, slot, CLAIMED if self.losers_disown else 0), (CLAIM, -1, -1)

    @staticmethod
    def add(counts: tuple[int, ...], slot: int, number: int) -> tuple[int, ...]:
        return (*counts[:slot], counts[slot] + number, *counts[slot + 1 :])

    def check(self, state: State) -> None:
        """What must hold in every state."""
        head, counts, workers = state
        owned = [slot for step, _, slot in workers if BASE <= step <= SWAP]
        read = [seen % self.slots for step, seen, _ in workers if step in (COUNT_OUT, HOLDS_BASE)]
        if len(set(owned)) < len(owned):
            raise Violation("double claim")
        if head % self.slots in owned or set(owned) & set(read):
            raise Violation("torn read")  # the owner may be writing what others read
        if all(worker == IDLE for worker in workers) and any(counts):
            raise Violation("leak")

    def finishes_alone(self, head: int, counts: tuple[int, ...], worker: Worker) -> bool:
        """Whether a worker comes to the end of its update if all others stand still, or are dead."""
        for _ in range(50):
            if worker == IDLE:
                return True
            moves = list(self.moves(head, counts, worker, {head % self.slots}))
            if not moves:
                return False
            head, counts, worker = moves[-1]  # a claim tries the head's slot last
        return False


def explore(model: Model, alone: bool = False) -> int:
    """Visit every state that can be reached, and check it; returns how many there are."""
    seen, stack = {model.start()}, [model.start()]
    can_finish: dict[tuple[int, tuple[int, ...], Worker], bool] = {}
    while stack:
        state = stack.pop()
        model.check(state)
        if alone:
            for worker in state[2]:
                key = (state[0], state[1], worker)
                if key not in can_finish:
                    can_finish[key] = model.finishes_alone(*key)
                if not can_finish[key]:
                    raise Violation("blocked by workers that stand still")
        for successor in model.successors(state):
            if successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return len(seen)


@pytest.mark.parametrize(("slots", "updates"), [(3, 4), (4, 3), (7, 2)])
def test_no_interleaving_tears_a_read_claims_twice_loses_an_update_or_leaks(slots: int, updates: int) -> None:
    assert explore(Model(slots, updates)) > 50_000


def test_two_slots_a_worker_are_enough_whatever_the_others_do_even_if_they_die() -> None:
    assert explore(Model(slots=6, updates=3), alone=True) > 100_000


@pytest.mark.parametrize(
    ("bug", "promise"),
    [
        ({"readers_look_again": False}, "torn read"),
        ({"claims_check_head": False}, "torn read"),
        ({"claims_check_count": False}, "torn read"),
        ({"versions": False}, "lost update"),
        ({"losers_disown": False}, "leak"),
    ],
)
def test_the_checker_finds_a_planted_bug(bug: dict[str, bool], promise: str) -> None:
    with pytest.raises(Violation, match=promise):
        explore(Model(slots=7, updates=2, **bug))


def test_the_checker_finds_that_one_slot_less_could_block_a_worker() -> None:
    with pytest.raises(Violation, match="blocked"):
        explore(Model(slots=5, updates=3), alone=True)
