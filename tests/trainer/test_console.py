"""A sweep that is interrupted, and a run whose output nobody reads any more."""

import os
import signal
import sys
import threading

from tests import cli, warm

SHORT = ("steps=8", "sample_tokens=0")

INTERRUPTED_SWEEP = """
import train
from pathlib import Path
from trainer import settings, sweep
from common.errors import Interrupted

def run(run_settings):
    with Path(__file__).with_name("started").open("a") as file:
        print(run_settings.seed, file=file)
    raise Interrupted("stopped", 2)

train.run = run
settings.register()
sweep.register()
train.main()
"""


def test_an_interrupted_sweep_starts_no_other_run(tmp_path):
    (tmp_path / "sweep.py").write_text(INTERRUPTED_SWEEP)
    arguments = ["-m", "experiment=debug", "seed=1,2", f"runs_dir={tmp_path / 'runs'}"]
    cli.run([sys.executable, str(tmp_path / "sweep.py"), *arguments], code=128 + signal.SIGINT)
    assert (tmp_path / "started").read_text() == "1\n"


def loses_its_reader():
    """The other end of its output is closed after its first line; no signal says so."""
    reader, writer = os.pipe()
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(writer)
    threading.Thread(target=lambda: (os.read(reader, 1), os.close(reader))).start()


def test_a_run_goes_on_without_a_reader(datasets, tmp_path):
    """As with `2>&1 | head -1`."""
    run_dir = tmp_path / "run"
    settings = warm.debug_settings(datasets, *SHORT, f"run_dir={run_dir}")
    warm.run(settings, loses_its_reader)
    assert (run_dir / "DONE").exists()
    lines = (run_dir / "log.txt").read_text().splitlines()
    assert len([line for line in lines if line.startswith("nobody reads <stderr> any more")]) == 1
    assert any(line.startswith("finished: ") for line in lines[-4:])
