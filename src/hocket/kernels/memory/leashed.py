"""Leashed-SGD's vectors (Bäckström et al. 2021): fixed slots, published by compare-and-swap of one head word.

The head is version << SLOT_BITS | slot, so it never has the same value twice. A slot's reference count is the number
of its readers, less CLAIMED while a writer owns it. The head's slot may have a count of 0 and still be in use; that
is why readers, and writers who claim, look at the head again after they have changed the count.

A worker holds two slots at most, one that it reads and one that it writes, and while it claims it holds none. So of
2 m slots for m workers one is free for a claim whatever the others do, even where they died: they hold 2 (m - 1) at
most, and one is the head. One more is for an observer. With the m gradients that makes 3 m + 1 vectors at most.
"""

from __future__ import annotations

from hocket.kernels.arrays import Words
from hocket.kernels.jit import kernel
from hocket.kernels.memory.atomics import compare_and_swap, fetch_add, load, monotonic_ns, sched_yield
from hocket.kernels.memory.locks import give_up
from hocket.kernels.memory.words import (
    CLAIMED,
    DEADLINE_NS,
    HEAD,
    LINE,
    NO_ROW,
    PEAK,
    SLOT_BITS,
    SLOT_MASK,
    SLOTS,
    WORKER_AREA,
    WORKER_WORDS,
    WORKERS,
)


@kernel
def count_word(control: Words, slot: int) -> int:
    """Index of the slot's reference count. Behind the workers' words and the observer's."""
    return WORKER_AREA + (control[WORKERS] + 1) * WORKER_WORDS + slot * LINE


@kernel
def count_in(control: Words) -> int:
    """Become a reader of the latest vector; returns the head that points to it."""
    while True:
        head = load(control, HEAD)
        count = count_word(control, head & SLOT_MASK)
        fetch_add(control, count, 1)
        if load(control, HEAD) == head:  # else the slot may already be someone else's to write
            return head
        fetch_add(control, count, -1)


@kernel
def count_out(control: Words, slot: int) -> None:
    """Be a reader of the slot no more."""
    fetch_add(control, count_word(control, slot), -1)


@kernel
def claim(control: Words, w: int) -> int:
    """Own a free slot, to write it; NO_ROW if none came free before the deadline.

    Each worker begins at slots of its own, which its cache may still hold. The slots in use are counted on the way.
    """
    slots = control[SLOTS]
    until = 0
    while True:
        claimed, used = NO_ROW, 0
        for i in range(slots):
            slot = (2 * w + i) % slots
            if claimed == NO_ROW and _claim_slot(control, slot):
                claimed = slot
            if load(control, count_word(control, slot)) != 0 or load(control, HEAD) & SLOT_MASK == slot:
                used += 1
        peak = WORKER_AREA + w * WORKER_WORDS + PEAK
        control[peak] = max(control[peak], used)
        if claimed != NO_ROW:
            return claimed
        if until == 0:
            until = monotonic_ns() + control[DEADLINE_NS]
        elif monotonic_ns() > until:
            give_up(control, w)
            return NO_ROW
        sched_yield()


@kernel
def _claim_slot(control: Words, slot: int) -> bool:
    count = count_word(control, slot)
    if load(control, HEAD) & SLOT_MASK == slot or not compare_and_swap(control, count, 0, -CLAIMED):
        return False
    # The head may have been here and gone, with a reader counted in meanwhile: look at both, in this order.
    if load(control, HEAD) & SLOT_MASK != slot and load(control, count) == -CLAIMED:
        return True
    disown(control, slot)
    return False


@kernel
def disown(control: Words, slot: int) -> None:
    """Own a claimed slot no more: it is published, or free again."""
    fetch_add(control, count_word(control, slot), CLAIMED)


@kernel
def advance(control: Words, head: int, slot: int) -> bool:
    """Publish the claimed slot as the successor of `head`, unless another came first. The slot is disowned."""
    successor = ((head >> SLOT_BITS) + 1) << SLOT_BITS | slot
    published = compare_and_swap(control, HEAD, head, successor)
    disown(control, slot)
    return published
