"""Shared by all tests: everything runs offline."""

import functools
import gc
import os

import hypothesis
import pytest
import torch

from tests.cli import debug_command

gc.disable()  # while modules are imported, which leave no garbage
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the test processes share the cores
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads it when it is first imported, which torch does as soon as something is compiled.
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("shared cores", deadline=None)  # an example may wait for another test
hypothesis.settings.load_profile("shared cores")


def pytest_collection_finish():
    """What the modules hold need not be searched for garbage again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def float32_matmul_precision():
    """The trainer sets it for its process: here the next test must not find it changed."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def datasets(tmp_path_factory):
    """A folder for prepared data that the tests share."""
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture
def command(datasets):
    """command("steps=3", …) -> the argument list of a debug run."""
    return functools.partial(debug_command, datasets)


#: Files whose tests take longest come first: begun last, one would keep the other processes waiting.
SLOW = ("test_compile_ahead.py", "test_ranks.py", "test_train.py", "test_faults.py")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(session, items):
    every_fixture_is_there(session, items)  # before pytest deselects tests
    yield
    items.sort(key=lambda item: item.path.name not in SLOW)


def every_fixture_is_there(session, items):
    """A test whose fixture is missing is an error, also where it would be deselected: without a GPU."""
    for item in {item.function: item for item in items}.values():
        given = {"request", *(item.callspec.params if hasattr(item, "callspec") else ())}
        for name in item.fixturenames:
            if name not in given and not session._fixturemanager.getfixturedefs(name, item):
                raise pytest.UsageError(f"{item.nodeid} asks for a fixture {name!r} that there is not")
