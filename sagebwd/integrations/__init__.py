"""Adapters that let other libraries use :func:`sagebwd.sage_attention`; each imports its library itself.

They are imported when they are first used: ``sagebwd.integrations.transformers`` needs no import of its own.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in __dir__():
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
