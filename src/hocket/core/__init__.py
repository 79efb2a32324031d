"""The vocabulary every other room speaks: comm, message, clock, vector, worker. Imports nothing above."""
