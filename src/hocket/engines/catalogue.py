"""Every engine by name. Importing this registers them; `hocket.engines` itself stays light, for ranks that start."""

from hocket.engines import fleet, mpi, sim, threads, torch  # noqa: F401 - importing an engine registers it
from hocket.engines.engine import DEADLINE_S, Engine, Light, Listener, Program, engine

__all__ = ["DEADLINE_S", "Engine", "Light", "Listener", "Program", "engine"]
