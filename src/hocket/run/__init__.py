"""One run: its spec, the plan that follows from it, and its record."""
