"""Registrations with parts of torch that are too slow to import for those who do not use them.

They are made when someone else imports the part. So they hold from its first use on, whichever is imported
first, and cost nothing in a call.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, register: Callable[[], None]) -> None:
    """Call ``register`` after module ``name`` is imported, or now if it is.

    An error of ``register`` becomes a warning: it must not break an import that is not ours.
    """
    if name in sys.modules:
        _try(name, register)
    else:
        sys.meta_path.insert(0, _Watch(name, register))


class _Watch:
    """Finds module ``name`` as everyone else does, and calls ``register`` after it ran."""

    def __init__(self, name: str, register: Callable[[], None]) -> None:
        self._name, self._register, self._is_asked = name, register, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec if it is the one, else None, which asks the next finder."""
        if name != self._name or self._is_asked:
            return None
        self._is_asked = True  # of the others, below
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asked = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # not before: a spec may be asked for by one who does not import
                sys.meta_path.remove(self)
                _try(name, self._register)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _try(name: str, register: Callable[[], None]) -> None:
    try:
        register()
    except Exception as error:
        warnings.warn(
            f"sagebwd is not registered with {name} of this torch ({error!r}); please report it", stacklevel=2
        )
