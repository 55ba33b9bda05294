"""Registrations that wait for a module's import."""

import importlib.util
import sys

import pytest

from sagebwd.kernels.on_import import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that can be imported, in a package."""
    (tmp_path / "slow_package").mkdir()
    (tmp_path / "slow_package" / "__init__.py").touch()
    (tmp_path / "slow_package" / "part.py").write_text("values = [1]")
    monkeypatch.syspath_prepend(tmp_path)
    yield "slow_package.part"
    for name in ("slow_package", "slow_package.part"):
        sys.modules.pop(name, None)


def test_it_is_registered_once_after_the_import(module):
    """Also where its spec is asked for first."""
    calls, finders = [], list(sys.meta_path)
    when_imported(module, lambda: calls.append([*sys.modules[module].values]))
    importlib.import_module("slow_package")
    assert importlib.util.find_spec(module).name == module
    assert importlib.util.find_spec("slow_package.absent") is None
    assert calls == []
    part = importlib.import_module(module)
    assert importlib.import_module(module) is importlib.reload(part) is part
    assert calls == [[1]]
    assert sys.meta_path == finders
    when_imported(module, lambda: calls.append("at once"))
    assert calls[1:] == ["at once"]


def test_an_error_does_not_break_the_import(module):
    when_imported(module, lambda: 1 / 0)
    with pytest.warns(UserWarning, match=r"not registered with slow_package\.part .*ZeroDivisionError"):
        assert importlib.import_module(module).values == [1]
