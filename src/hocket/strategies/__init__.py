"""How replicas agree: one file a family, each reads as its paper. Importing this registers every strategy."""

import importlib
import pkgutil

from hocket.core.worker import Strategy, strategy

__all__ = ["Strategy", "strategy"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
