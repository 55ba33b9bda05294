"""A run, or a sweep, whose output nobody reads any more."""

import signal
import subprocess
import sys

from tests.cli import ROOT

INTERRUPTED_SWEEP = """
import os, sys, train
from trainer import settings, local_gpus
from trainer.errors import Interrupted

def run(run_settings):
    with open("started", "a") as file:
        print(run_settings.seed, file=file)
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (1, 2):
        os.dup2(writer, stream)
    raise Interrupted("stopped", 2)

train.run = run
settings.register()
local_gpus.register()
train.main()
"""


def test_an_interrupted_sweep_ends_although_nobody_reads_its_output(tmp_path):
    """As after Ctrl-C with `2>&1 | tee log`, which ends tee, too."""
    arguments = ["-m", "experiment=debug", "seed=1,2", f"runs_dir={tmp_path / 'runs'}"]
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}){INTERRUPTED_SWEEP}"
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True)
    assert done.returncode == 128 + signal.SIGINT, done.stderr.decode()
    assert (tmp_path / "started").read_text() == "1\n"
