"""What starts ranks and carries their messages. Importing this registers every engine."""

from hocket.engines import mpi, sim, threads, torch
from hocket.engines.base import DEADLINE_S, Engine, Listener, Program, engine

__all__ = ["DEADLINE_S", "Engine", "Listener", "Program", "engine", "mpi", "sim", "threads", "torch"]
