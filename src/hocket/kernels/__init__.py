"""Compiled loops that run without the GIL: shared memory, and the models whose workers run in it."""
