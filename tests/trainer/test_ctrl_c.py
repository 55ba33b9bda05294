"""Ctrl-C before train.py can handle it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.cli import ROOT


@pytest.mark.parametrize(
    ("error", "code", "told"), [("KeyboardInterrupt", -signal.SIGINT, 0), ("OSError", 1, 1)]
)
def test_during_the_imports_it_prints_no_traceback(tmp_path, error, code, told):
    for module in ("hydra", "torch"):
        (tmp_path / f"{module}.py").write_text(f"raise {error}\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert done.stderr.count("Traceback") == told
    assert bool(done.stdout + done.stderr) == told
