"""The control words of a shared parameter vector: where each one lies in the int64 array `control`.

A word that several workers write has a 64-byte line of its own, so that they do not slow each other down by
false sharing. A worker's statistics are written by that worker alone.
"""

from __future__ import annotations

LINE = 8  # words in 64 bytes

# Methods, in the order of `Method`
MUTEX, RWLOCK, HOGWILD, LEASHED = range(4)
# Ways to wait between failed attempts, in the order of `Backoff`
BACKOFF_NONE, BACKOFF_CONSTANT, BACKOFF_EXPONENTIAL, BACKOFF_YIELD = range(4)
# Ways to treat a stale gradient, in the order of `Handling`; those from GAP on need the parameters that were read
NONE, INVERSE, MAX1, EXPONENTIAL, TAIL, GAP, GAP_MEAN, DELAY_COMPENSATED = range(8)
# What became of an update
APPLIED, RETRY, DROPPED, BROKEN = range(4)
# In place of a row: a lock could not be had before its deadline
NO_ROW = -1

# Options, written once before the workers start
METHOD, WORKERS, SLOTS, PERSISTENCE, BACKOFF, BACKOFF_NS, BACKOFF_MAX_NS, HANDLING, DEADLINE_NS, EVERY = range(10)

# Written between two stretches, before anyone begins the next
STRETCH = 10  # its number
FIRST = 11  # its first batch

# Words that all workers write
HEAD = 2 * LINE  # version << SLOT_BITS | slot of the current vector
CANARY = HEAD + 1  # hogwild: every update adds 1 as it adds to the parameters, so what others wrote over is missing
NEXT = 3 * LINE  # batches handed out
STOP = 4 * LINE  # not 0: workers shall end
RECOVERED = 5 * LINE  # locks taken over from a worker that died with it
LOCK = 6 * LINE  # a pthread mutex or rwlock, with room to spare
ARRIVED = 10 * LINE  # workers that have begun an epoch, over all epochs
LEFT = 11 * LINE  # workers that have ended this stretch
WORKER_AREA = 12 * LINE  # worker 0's words, worker 1's, ..., an observer's; then a line a slot for its reference count

SLOT_BITS = 16
SLOT_MASK = (1 << SLOT_BITS) - 1
CLAIMED = 1 << 32  # taken off a reference count while a writer owns the slot: more than any number of readers

STALENESS_BINS = 256  # the last one counts everything beyond
TRIES_BINS = 64

# Words of one worker, from its first one
READ_VERSION = 0  # of its last read
BASE_HEAD = 1  # the head that its open write builds on
FAILED = 2  # failed CAS of its current update
UPDATES = 3
DROPS = 4
WAIT_NS = 5  # for locks, and from an update's first failed CAS to its end
PEAK = 6  # slots in use, at most, when it claimed one
BREAKS = 7  # locks that it could not have before the deadline
RANDOM = 8  # state of its generator, for jitter
MEAN_SQUARE = 9  # a float64: of its gradients, over all parameters
TIMESPEC = 10  # two words of scratch for an absolute time
FAILED_NS = 12  # when its current update failed first
SEEN = 13  # gradients that it has looked at
LARGEST_LR = 14  # a float64
STALENESS = 2 * LINE  # histogram
TRIES = STALENESS + STALENESS_BINS  # histogram
WORKER_WORDS = TRIES + TRIES_BINS
