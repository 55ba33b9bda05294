"""The list of faults names tests that there are, and counts them rightly."""

import re
from types import SimpleNamespace

import pytest

from tests import faults
from tests.cli import ROOT


@pytest.mark.parametrize("test", sorted({test for fault in faults.FAULTS for test in fault.tests}))
def test_there_is_such_a_test(test):
    file, beginning = test.split("::")
    assert re.search(rf"^def {beginning or 'test_'}", (ROOT / "tests" / file).read_text(), re.MULTILINE)


def report(name, when="call", outcome="passed"):
    passed, skipped = outcome == "passed", outcome == "skipped"
    return SimpleNamespace(nodeid=f"tests/{name}", when=when, passed=passed, skipped=skipped)


def test_cases_are_counted():
    clock, wandb = "test_faults.py::test_clock_jumps", "test_faults.py::test_wandb_breaks"
    counting = faults.Counting()
    for one in (
        *(report(clock, when) for when in ("setup", "call", "teardown")),
        *(report(wandb, outcome="failed"), report(wandb, "setup", "skipped")),
        report("test_train.py::test_help_teaches"),
    ):
        counting.pytest_runtest_logreport(one)
    (row,) = [row for row in counting.rows() if "W&B" in row["what"]]
    assert (row["tried"], row["held"], row["skipped"]) == (2, 1, 1)
    assert sum(row["tried"] for row in counting.rows()) == 2
    assert "| 2 (1 not possible here) | 1 |" in faults.table(counting.rows())
