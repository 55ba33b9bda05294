"""Modules of ours in the place of another library, in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType


def stand_in(names: Sequence[str], module: ModuleType, version: str = "") -> None:
    """Make ``import`` of ``names`` give ``module``, and log so once.

    Args:
        names: of the library, and of its modules.
        module: what they give.
        version: what ``importlib.metadata.version(names[0])`` gives; "": it stays as it is.

    Raises:
        RuntimeError: the library is imported already, and its functions may be in use.
    """
    library = names[0]
    imported = sys.modules.get(library)
    if imported not in (None, module):
        raise RuntimeError(
            f"{library} is already imported from {getattr(imported, '__file__', 'elsewhere')}; call "
            f"{module.__name__}.install() before anything imports it"
        )
    if imported is None:
        log = logging.getLogger(module.__name__)
        log.warning("`import %s` now gives %s, which trains", library, module.__name__)
    sys.modules.update(dict.fromkeys(names, module))
    if version:
        _forget(library)
        sys.meta_path.insert(0, _Finder(library, version))


def remove(names: Sequence[str], module: ModuleType) -> None:
    """Undo :func:`stand_in`. What a program imported in the meantime stays."""
    for name in names:
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _forget(names[0])


class _Finder(DistributionFinder):
    """Tells ``importlib.metadata`` of one distribution; it finds no modules."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        return iter([_Distribution(self)] if context.name in (None, self.name) else [])


class _Distribution(Distribution):
    def __init__(self, finder: _Finder) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {finder.name}\nVersion: {finder.version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> None:
        return None


def _forget(name: str) -> None:
    sys.meta_path[:] = [x for x in sys.meta_path if not (isinstance(x, _Finder) and x.name == name)]
