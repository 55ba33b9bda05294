"""The checks of scripts.check_install, without an installation."""

import contextlib
import io
import subprocess
import sys

import pytest

from scripts import check_install


@pytest.fixture
def in_this_process(monkeypatch):
    """Programs run in this process, and their messages are what the list says, one for each."""

    def use(*messages, program=None):
        messages = iter(messages)

        def run(command):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(program or command[-1], {})
            return subprocess.CompletedProcess(command, 0, output.getvalue(), next(messages))

        monkeypatch.setattr(check_install, "run", run)

    return use


def test_training(in_this_process):
    in_this_process("no NumPy\n", "no NumPy\n")
    assert check_install.check_training(sys.executable) == []


def test_training_that_prints_or_learns_nothing(in_this_process):
    in_this_process("no NumPy\nno Triton\n", "no NumPy\n", program="print(1.0), print(0.9), print(0.6)")
    stuck, noisy = check_install.check_training(sys.executable)
    assert stuck == "the loss did not halve"
    assert "no Triton" in noisy


def test_what_else_is_wrong(monkeypatch):
    assert check_install.check_packages({"sagebwd==0.1.0"}) == []
    (extra,) = check_install.check_packages({"numpy==2.4.6", "sagebwd==0.1.0"})
    assert "numpy==2.4.6" in extra
    for seconds, failures in ((1.79, 0), (1.81, 1)):
        monkeypatch.setattr(check_install, "import_seconds", lambda *_, seconds=seconds: (1.5, seconds))
        assert len(check_install.check_import(sys.executable, 9)) == failures
    done = subprocess.CompletedProcess([], 1, "", "ImportError: numpy")
    monkeypatch.setattr(check_install, "run", lambda command: done)
    (failed,) = check_install.check_training(sys.executable)
    assert "ImportError: numpy" in failed
