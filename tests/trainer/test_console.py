"""A run, or a sweep, whose output nobody reads any more."""

import functools
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from tests import warm
from tests.cli import ROOT

SHORT = ("steps=8", "sample_tokens=0")

INTERRUPTED_SWEEP = """
import os, sys, train
from trainer import settings, sweep
from common.errors import Interrupted

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
sweep.register()
train.main()
"""


def test_an_interrupted_sweep_ends_although_nobody_reads_its_output(tmp_path):
    """As after Ctrl-C with `2>&1 | tee log`, which ends tee, too."""
    arguments = ["-m", "experiment=debug", "seed=1,2", f"runs_dir={tmp_path / 'runs'}"]
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}){INTERRUPTED_SWEEP}"
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True)
    assert done.returncode == 128 + signal.SIGINT, done.stderr.decode()
    assert (tmp_path / "started").read_text() == "1\n"


def loses_its_reader(open_ends, when):
    """The other end of its output is closed, after its first line or three steps; no signal says so."""
    reader, writer = open_ends()
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(writer)
    if when == "first line":
        threading.Thread(target=lambda: (os.read(reader, 1), os.close(reader))).start()
    else:
        warm.at_step(3, lambda trainer: os.close(reader))


@pytest.mark.parametrize(
    ("open_ends", "when"),
    [(os.pipe, "first line"), (pty.openpty, "three steps")],
)
def test_a_run_goes_on_without_a_reader(datasets, tmp_path, open_ends, when):
    """As with `2>&1 | head -1`."""
    run_dir = tmp_path / "run"
    settings = warm.debug_settings(datasets, *SHORT, f"run_dir={run_dir}")
    warm.run(settings, functools.partial(loses_its_reader, open_ends, when))
    assert (run_dir / "DONE").exists()
    lines = (run_dir / "log.txt").read_text().splitlines()
    assert len([line for line in lines if line.startswith("nobody reads <stderr> any more")]) == 1
    assert any(line.startswith("finished: ") for line in lines[-4:])
