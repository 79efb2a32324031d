"""One parameter vector that many workers share: atomics, locks, Leashed-SGD's slots, updates."""
