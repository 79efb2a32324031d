"""How replicas agree: one file a family, each reads as its paper. Importing this registers every strategy."""

from hocket.core.worker import Strategy, strategy
from hocket.strategies import allreduce, local_sgd, serial

__all__ = ["Strategy", "allreduce", "local_sgd", "serial", "strategy"]
