"""Runs that are killed, starved of disk, lied to about the time: each fault is done, and the run goes on.

Faults that need no run are tested where they are met: damaged checkpoints in trainer/test_checkpoint.py,
damaged tokens in test_train.py and data/, a run directory in use in trainer/test_run_directory.py.
"""

import contextlib
import ctypes
import errno
import functools
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import trainer.loop
import trainer.run
from tests import warm
from tests.cli import assert_same_run, metrics


@pytest.fixture
def debug(datasets, tmp_path):
    """debug("name", "steps=3", …) -> Settings of a debug run in tmp_path/name."""
    return lambda name, *overrides: warm.debug_settings(datasets, f"run_dir={tmp_path / name}", *overrides)


@pytest.fixture(scope="module")
def whole(datasets, tmp_path_factory):
    """whole("steps=3", …) -> the run directory of that run undisturbed; trained once."""

    @functools.cache
    def trained(*overrides, ranks=1):
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        settings = warm.debug_settings(datasets, f"run_dir={run_dir}", *overrides)
        warm.run(settings) if ranks == 1 else warm.two_ranks(settings, [], [])
        return run_dir

    return trained


SHORT = ("steps=8", "checkpoint_every=2", "sample_tokens=0")


def checkpoint_names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# ------------------------------------------------------------------ faults: called in the process of the run


def replaced(name, wrap):
    """Replace the function `module.function` by wrap(function)."""
    module, function = name.rsplit(".", 1)
    module = importlib.import_module(module)
    setattr(module, function, wrap(getattr(module, function)))


def slow_writes(seconds=0.001):
    """Every tensor of a checkpoint takes so long more, some 100 of them and the seal."""
    replaced("torch.save", lambda save: lambda *data: (time.sleep(seconds), save(*data)))
    replaced("trainer.checkpoint.write_seal", lambda seal: lambda *it: (time.sleep(20 * seconds), seal(*it)))


def dies_in(name, call):
    """SIGKILL in place of the given call, counted from 1, of a function."""
    calls = itertools.count(1)

    def wrap(function):
        def wrapped(*arguments, **options):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    replaced(name, wrap)


def disk_is_full(after, name="torch.save"):
    """A function that writes fails after so many calls."""
    calls = itertools.count()

    def wrap(function):
        def wrapped(*arguments, **options):
            if next(calls) >= after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        return wrapped

    replaced(name, wrap)


def fails_after(step, event):
    """A MemoryError in place of what the trainer does after a step."""
    original = getattr(trainer.loop, event)

    def replacement(run):
        if run.step == step:
            raise MemoryError("no memory for it")
        return original(run)

    setattr(trainer.loop, event, replacement)


def permissions_bind_root():
    """Give up root's rights to write and read where the permissions forbid it.

    They are CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, the capabilities 1 and 2.
    """
    if os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
        capabilities = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then for numbers from 32
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, capabilities) == 0
        capabilities[0] &= ~(1 << 1 | 1 << 2)
        assert libc.capset(header, capabilities) == 0


def clock_jumps():
    """The wall clock goes a day forwards and two backwards, in turn, each time it is read."""
    days = itertools.accumulate(itertools.cycle([1, -2]))
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + 86_400 * next(days)
    time.time_ns = lambda: now_ns() + 86_400 * 10**9 * next(days)


# ------------------------------------------------------------------ killed


KILLS, IN_A_WRITE = 5, 2


def test_killed_at_random_moments_and_continued_is_the_same_run(debug, whole):
    """At times, not steps, and some of them during a write; FAULTS_SEED=… repeats the moments."""
    seed = int(os.environ.get("FAULTS_SEED", random.randrange(2**32)))
    chance = random.Random(seed)
    in_a_write = set(chance.sample(range(KILLS), IN_A_WRITE))
    moments = [chance.uniform(0, 0.1 if kill in in_a_write else 0.9) for kill in range(KILLS)]
    print(f"FAULTS_SEED={seed}: killed after seconds", [round(moment, 3) for moment in moments])
    print("of which counted from the beginning of a write:", sorted(in_a_write))

    overrides = ("attention=sagebwd", "steps=40", "checkpoint_every=3", "eval_every=7", "sample_tokens=2")
    overrides += ("probe.every=5", "spike.window=8", "spike.threshold=2", "spike.skip=true")
    runs, torn = [debug("run_0", *overrides)], 0
    for kill, moment in enumerate(moments):
        while (left := killed_after(runs[-1], moment, in_a_write=kill in in_a_write)) is None:
            runs.append(debug(f"run_{len(runs)}", *overrides))  # it was at its end before
        torn += bool(left)
    print(f"{len(runs)} runs, {torn} times killed in a write")
    assert torn >= IN_A_WRITE / 2
    for settings in runs:
        warm.run(settings)
        assert_same_run(whole(*overrides), Path(settings.run_dir))
        spikes = Path(settings.run_dir, "spikes.jsonl").read_text()
        assert '"skipped": true' in spikes
        assert spikes == (whole(*overrides) / "spikes.jsonl").read_text()


def killed_after(settings, seconds, *, in_a_write):
    """Kill the run so many seconds after its start or that of a write.

    What it then leaves half written, or None if it came to its end before.
    """
    before = half_written(settings)
    process = warm.start(settings, *([slow_writes] if in_a_write else []))
    while in_a_write and process.is_alive() and half_written(settings) <= before:
        time.sleep(0.001)
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), warm.finish(process, settings)
    return half_written(settings) - before if process.exitcode else None


def half_written(settings):
    """Checkpoints without a name yet, and when they were begun."""
    found = set()
    for path in Path(settings.run_dir, "checkpoints").glob(".writing_*"):
        with contextlib.suppress(FileNotFoundError):  # it has just got its name
            found.add((path.name, path.stat().st_ctime_ns))
    return found


SPOTS = {
    "while the second is written": ("torch.save", 150),
    "sealed, without its name": ("os.rename", 2),
    "named, before old ones are dropped": ("trainer.checkpoint.sync", 5),
}


@pytest.mark.parametrize("spot", SPOTS)
def test_killed_at_every_stage_of_a_write(debug, tmp_path, whole, spot):
    settings = debug("run", *SHORT, "keep_checkpoints=1")
    warm.run(settings, functools.partial(dies_in, *SPOTS[spot]), code=-signal.SIGKILL)
    assert "records are missing" not in warm.run(settings)
    assert_same_run(whole(*SHORT), tmp_path / "run")
    assert checkpoint_names(tmp_path / "run") == ["step_00000008"]


@pytest.mark.parametrize(("step", "event"), [(4, "_measure_attention"), (8, "_evaluate")])
def test_what_is_measured_fails_and_no_step_is_lost(debug, tmp_path, whole, step, event):
    """The probe and the validation follow the checkpoint; the run that resumes makes up for them."""
    overrides = ("steps=8", "checkpoint_every=4", "probe.every=4", "sample_tokens=4")
    output = warm.run(debug("run", *overrides), functools.partial(fails_after, step, event), code=1)
    assert "no memory for it" in output
    assert f"from step {step}" in warm.run(debug("run", *overrides))
    assert_same_run(whole(*overrides), tmp_path / "run")


def test_asked_to_stop_during_a_write_it_waits_for_it(debug, tmp_path):
    settings = debug("run", "steps=400", "checkpoint_every=4", "sample_tokens=0", "eval_every=1000")
    process = warm.start(settings, slow_writes)
    while process.is_alive() and not half_written(settings):
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGQUIT)
    output = warm.finish(process, settings, code=128 + signal.SIGQUIT)
    last = metrics(tmp_path / "run")[-1]["step"]
    assert f"stopped at step {last} of 400 and saved" in output
    assert checkpoint_names(tmp_path / "run")[-1] == f"step_{last:08d}"


# ------------------------------------------------------------------ a disk that refuses


SHORT_ON_TWO = (*SHORT, "hardware.micro_batch=2")
FULL_DISKS = {
    "for the part of the second rank": (1, "torch.save", 100),
    "for the seal": (0, "trainer.checkpoint.write_seal", 1),
}


@pytest.mark.parametrize("full", FULL_DISKS)
def test_disk_of_one_rank_is_full_and_all_ranks_stop_with_that_message(debug, tmp_path, whole, full):
    rank, name, after = FULL_DISKS[full]
    faults = [[], []]
    faults[rank] = [functools.partial(disk_is_full, after, name)]
    output = warm.two_ranks(debug("run", *SHORT_ON_TWO), *faults, codes=(1, 1))
    assert output.count("could not write the checkpoint of step") == 2  # each rank has said so
    assert "the disk is full. Make room" in output
    assert all(name.startswith("step_") for name in checkpoint_names(tmp_path / "run"))
    warm.two_ranks(debug("run", *SHORT_ON_TWO), [], [])
    assert_same_run(whole(*SHORT_ON_TWO, ranks=2), tmp_path / "run")


def test_rank_that_dies_in_a_write_ends_the_other_and_the_one_before_is_used(debug, tmp_path, whole):
    faults = [functools.partial(dies_in, "torch.save", 100)], []
    warm.two_ranks(debug("run", *SHORT_ON_TWO), *faults, codes=(-signal.SIGKILL, 1))
    assert "continuing" in warm.two_ranks(debug("run", *SHORT_ON_TWO), [], [])
    assert_same_run(whole(*SHORT_ON_TWO, ranks=2), tmp_path / "run")


@pytest.fixture
def disk(tmp_path):
    """A disk of 16 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "sagebwd-test", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk, leave):
    """Write until the disk refuses, then free `leave` bytes."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    os.truncate(filler, max(filler.stat().st_size - leave, 0))


def disk_fills_before(name, call, disk, leave):
    """The disk is full, but for some bytes, from the given call of a function on, counted from 1."""
    calls = itertools.count(1)

    def wrap(function):
        def wrapped(*arguments, **options):
            if next(calls) == call:
                fill(disk, leave)
            return function(*arguments, **options)

        return wrapped

    replaced(name, wrap)


#: Before which call of which function the disk is full, up to how many bytes; and what is said.
FULL = {
    "at the start": ("trainer.loop.make_deterministic", 1, 1 << 16, "a checkpoint takes"),
    "for the metrics": ("trainer.run.start_wandb", 1, 0, "the disk is full. Make room"),
    "in a checkpoint": ("torch.save", 150, 1 << 16, "could not write the checkpoint of step 4"),
    "for the weights": ("model.huggingface.save", 1, 1 << 16, "could not write the trained weights"),
}


@pytest.mark.parametrize("moment", FULL)
def test_disk_that_is_really_full_and_then_is_not(debug, disk, tmp_path, whole, moment):
    name, call, leave, told = FULL[moment]
    settings, run_dir = debug("run", *SHORT), tmp_path / "run"
    (disk / "run").mkdir()
    run_dir.symlink_to(disk / "run")
    output = warm.run(settings, functools.partial(disk_fills_before, name, call, disk, leave), code=1)
    assert re.search("the disk is (too )?full", output)
    assert told in output
    assert "Traceback" not in output
    assert not (run_dir / "DONE").exists()
    (disk / "filler").unlink()
    warm.run(settings)
    assert_same_run(whole(*SHORT), run_dir)


def test_a_place_that_became_read_only(debug, tmp_path, whole):
    settings, path = debug("run", *SHORT), tmp_path / "run"
    path.mkdir(mode=0o555)
    output = warm.run(settings, permissions_bind_root, code=1)
    assert "Permission denied" in output
    assert str(path) in output
    assert "Traceback" not in output
    path.chmod(0o755)
    warm.run(settings, permissions_bind_root)
    assert_same_run(whole(*SHORT), tmp_path / "run")


# ------------------------------------------------------------------ a past that is not what it was


def test_checkpoint_of_another_run_ends_all_ranks_with_that_message(debug, tmp_path):
    for seed in (1, 2):
        warm.run(debug(f"run_{seed}", *SHORT_ON_TWO, f"seed={seed}"))
    run_dir = tmp_path / "run_1"
    (run_dir / "DONE").unlink()
    shutil.rmtree(run_dir / "checkpoints" / "step_00000006")
    newest = run_dir / "checkpoints" / "step_00000008"
    seal = newest / "seal.json"
    seal.write_text(seal.read_text().replace('"seed": 1', '"seed": 3'))  # damaged: the one before is read
    (tmp_path / "run_2" / "checkpoints" / "step_00000006").rename(newest.with_name("step_00000006"))
    output = warm.two_ranks(debug("run_1", *SHORT_ON_TWO, "seed=1"), [], [], codes=(1, 1))
    assert output.count("seed was 2, is now 1") == 2
    assert "lost the other ranks" not in output


def test_a_curve_that_is_damaged_or_does_not_reach_the_checkpoint_is_told(debug, tmp_path):
    """A line in it, cut short, and with a tail of NUL as a power failure leaves it."""
    settings = debug("run", *SHORT)
    warm.run(settings)
    (tmp_path / "run" / "DONE").unlink()
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], "{damaged\n", *lines[2:]]))
    output = warm.run(settings, code=1)
    assert f"line 3 of {file} is damaged" in output
    assert "Traceback" not in output
    file.write_text("".join(lines[:4]) + "\0" * 100)
    assert f"{file}: 4 of 8 records are missing" in warm.run(settings)


# ------------------------------------------------------------------ the world around


def test_clock_jumps_and_nothing_measured_is_negative(debug, tmp_path, whole):
    warm.run(debug("run", *SHORT), clock_jumps)
    assert_same_run(whole(*SHORT), tmp_path / "run")  # the same records in the same order
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [record["tokens_per_second"] for record in records if "loss" in record]
    assert all(1 < rate < 1e7 for rate in rates), rates
