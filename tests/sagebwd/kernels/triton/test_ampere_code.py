"""The Triton kernels as the code that an A100 or a GeForce gets, on whatever GPU there is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1]
#: Against the reference, against float64, and what must hold bit for bit.
FILES = (
    "test_against_reference.py",
    "test_against_float64.py",
    "test_causality.py",
    "test_documents.py",
    "test_edge_values.py",
)


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES)
def test_comparisons_hold_for_ampere_code(file):
    """In a process of its own: Triton's target is forced for the whole process."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "gpu", "-k", "triton-cuda"]
    command += ["-p", "tests.sagebwd.kernels.triton.ampere_code", str(KERNELS / file)]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = subprocess.run(command, cwd=KERNELS.parents[2], env=alone, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
