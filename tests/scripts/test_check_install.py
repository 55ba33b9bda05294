"""The check of training in scripts.check_install, without an installation."""

import contextlib
import io
import subprocess
import sys

from scripts import check_install


def test_training_is_judged_by_its_loss_and_what_it_prints(monkeypatch):
    def judged(*printed, program=None):
        """Programs run in this process, and their messages are those given, one for each."""
        messages = iter(printed)

        def run(command):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(program or command[-1], {})
            return subprocess.CompletedProcess(command, 0, output.getvalue(), next(messages))

        monkeypatch.setattr(check_install, "run", run)
        return check_install.check_training(sys.executable)

    assert judged("no NumPy\n", "no NumPy\n") == []
    stuck, noisy = judged("no NumPy\nno Triton\n", "no NumPy\n", program="print(1.0), print(0.9), print(0.6)")
    assert stuck == "the loss did not halve"
    assert "no Triton" in noisy
