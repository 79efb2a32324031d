"""Three spirals that a small network tells apart."""
