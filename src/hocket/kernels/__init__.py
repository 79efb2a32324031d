"""Compiled loops that run without the GIL: atomics, locks, and one parameter vector that many workers share."""
