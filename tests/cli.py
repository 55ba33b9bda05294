"""Running train.py in a process of its own, as a user does, and reading what it left."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
TIMINGS = ("tokens_per_second", "mfu", "probe/seconds")


def debug_command(datasets, *overrides):
    """train.py with experiment=debug, prepared data in `datasets`, and these arguments."""
    flags = [text for text in overrides if text.startswith("-")]
    settings = [text for text in overrides if not text.startswith("-")]
    return [sys.executable, "train.py", *flags, "experiment=debug", f"data.root={datasets}", *settings]


def run(command, code=0):
    """Run to the end, expecting this exit code; all that was printed."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = start(command, Path(output.name))
        process.join(300)
        printed = output.read()
    assert process.exitcode == code, printed
    return printed


def kill_at_step(command, run_dir, step, kill=signal.SIGKILL):
    """Start the run and send it a signal as soon as it has reported `step`; its exit code and output."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = start(command, Path(output.name))
        wait_for_step(process.is_alive, run_dir, step)
        os.kill(process.pid, kill)
        process.join(120)
        return process.exitcode, output.read()


def run_fresh(command, code=0):
    """The same in a process that imports everything itself; for any command."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_takes(module, arguments):
    """The command `python -m module` takes these arguments; it does nothing. As if there were a GPU."""

    class Parsed(Exception):
        pass

    def parse_and_stop(parser, given=None, namespace=None):
        _, unknown = parser.parse_known_args(given, namespace)
        assert not unknown
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed):
            importlib.import_module(module).main()


def start(command, output):
    from tests import warm  # imports the trainer

    return warm.start_script(command, output)


def wait_for_step(is_running, run_dir, step):
    """Return when the run has reported `step`, or has ended, or after two minutes."""
    file, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
    while is_running() and time.monotonic() < deadline:
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        time.sleep(0.005)


def metrics(run_dir):
    """The run's records, without what depends on the clock."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines]


def losses(run_dir):
    return [record["loss"] for record in metrics(run_dir) if "loss" in record]


def assert_same_run(left, right):
    """The same metrics and final weights, bit for bit."""
    assert metrics(left) == metrics(right)
    assert_same_weights(left, right)


def assert_same_weights(left, right):
    """The same final weights, bit for bit."""
    a, b = (load_file(run_dir / "weights" / "model.safetensors") for run_dir in (left, right))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def flip(file, byte, bits=1):
    """Flip bits of a byte of a file."""
    content = bytearray(file.read_bytes())
    content[byte] ^= bits
    file.write_bytes(content)
