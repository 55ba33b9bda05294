"""Runs that are killed, starved of disk, lied to about the time: each fault is done, and the run goes on.

Faults that need no run are tested where they are met: damaged checkpoints in trainer/test_checkpoint.py,
damaged tokens in test_train.py and data/, a run directory in use in trainer/test_run_directory.py.
"""

import contextlib
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

import pytest

from tests import warm
from tests.cli import assert_same_run, metrics
from tests.processes import wait_until


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


def before_call(name, number, act):
    """act() comes before this call, counted from 1, of `module.function`; 0: before every one."""
    calls = itertools.count(1)
    module, function = name.rsplit(".", 1)
    module = importlib.import_module(module)
    original = getattr(module, function)

    def replacement(*arguments, **options):
        if next(calls) == number or not number:
            act()
        return original(*arguments, **options)

    setattr(module, function, replacement)


def dies(name, number):
    """SIGKILL in place of this call of a function."""
    before_call(name, number, lambda: os.kill(os.getpid(), signal.SIGKILL))


def fails(error, name, number):
    """The error in place of this call of a function."""

    def act():
        raise error

    before_call(name, number, act)


def slow_writes():
    """Every tensor of a checkpoint takes 1 ms more, some 100 of them, and the seal 20."""
    before_call("torch.save", 0, lambda: time.sleep(0.001))
    before_call("trainer.checkpoint.write_seal", 0, lambda: time.sleep(0.02))


def clock_jumps():
    """The wall clock goes a day forwards and two backwards, in turn, each time it is read."""
    days = itertools.accumulate(itertools.cycle([1, -2]))
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + 86_400 * next(days)
    time.time_ns = lambda: now_ns() + 86_400 * 10**9 * next(days)


# ------------------------------------------------------------------ killed


def test_killed_at_random_moments_and_continued_is_the_same_run(debug, whole, tmp_path):
    """At times, not steps; FAULTS_SEED=… repeats the moments."""
    seed = int(os.environ.get("FAULTS_SEED", random.randrange(2**32)))
    chance = random.Random(seed)
    moments = [chance.uniform(0.1, 0.7) for _ in range(3)]
    print(f"FAULTS_SEED={seed}: killed after seconds", [round(moment, 3) for moment in moments])
    overrides = ("attention=sagebwd", "steps=40", "checkpoint_every=3", "eval_every=7", "sample_tokens=2")
    overrides += ("probe.every=5", "spike.window=8", "spike.threshold=2", "spike.skip=true")
    settings = debug("run", *overrides)
    for moment in moments:
        process = warm.start(settings)
        process.join(moment)
        process.kill()
        process.join()
        if process.exitcode == 0:  # it was at its end before
            break
    warm.run(settings)
    assert_same_run(whole(*overrides), tmp_path / "run")
    spikes = (tmp_path / "run" / "spikes.jsonl").read_text()
    assert '"skipped": true' in spikes
    assert spikes == (whole(*overrides) / "spikes.jsonl").read_text()


#: And the steps of the checkpoints that it then leaves.
SPOTS = {
    "while the second is written": ("torch.save", 150, [2]),
    "sealed, without its name": ("os.rename", 2, [2]),
    "named, before old ones are dropped": ("trainer.checkpoint.sync", 1, [2, 4]),
}


def test_killed_at_every_stage_of_a_write(debug, tmp_path, whole):
    settings = debug("run", *SHORT, "keep_checkpoints=1")
    for spot, (name, number, steps) in SPOTS.items():
        warm.run(settings, functools.partial(dies, name, number), code=-signal.SIGKILL)
        named = [path for path in checkpoint_names(tmp_path / "run") if path.startswith("step_")]
        assert named == [f"step_{step:08d}" for step in steps], spot
    assert "records are missing" not in warm.run(settings)
    assert_same_run(whole(*SHORT), tmp_path / "run")
    assert checkpoint_names(tmp_path / "run") == ["step_00000008"]


def test_what_is_measured_fails_and_no_step_is_lost(debug, tmp_path, whole):
    """The probe and the validation follow the checkpoint; the run that resumes makes up for them."""
    overrides = ("steps=8", "checkpoint_every=4", "probe.every=4", "sample_tokens=4")
    settings, error = debug("run", *overrides), MemoryError("no memory for it")
    assert str(error) in warm.run(
        settings, functools.partial(fails, error, "trainer.loop._measure_attention", 1), code=1
    )
    resumed = warm.run(settings, functools.partial(fails, error, "trainer.loop._evaluate", 2), code=1)
    assert "from step 4" in resumed
    assert "from step 8" in warm.run(settings)
    assert_same_run(whole(*overrides), tmp_path / "run")


def test_asked_to_stop_during_a_write_it_waits_for_it(debug, tmp_path):
    settings = debug("run", "steps=400", "checkpoint_every=4", "sample_tokens=0", "eval_every=1000")
    process = warm.start(settings, slow_writes)
    assert wait_until(lambda: [*(tmp_path / "run").glob("checkpoints/.writing_*")], 60)
    os.kill(process.pid, signal.SIGQUIT)
    output = warm.finish(process, settings, code=128 + signal.SIGQUIT)
    last = metrics(tmp_path / "run")[-1]["step"]
    assert f"stopped at step {last} of 400 and saved" in output
    assert checkpoint_names(tmp_path / "run")[-1] == f"step_{last:08d}"


# ------------------------------------------------------------------ a disk that refuses


SHORT_ON_TWO = (*SHORT, "hardware.micro_batch=2")
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_or_the_death_of_one_rank_ends_all_and_the_checkpoint_before_is_used(
    debug, tmp_path, whole
):
    settings = debug("run", *SHORT_ON_TWO)
    part = functools.partial(fails, NO_SPACE, "torch.save", 101)  # of the second rank
    seal = functools.partial(fails, NO_SPACE, "trainer.checkpoint.write_seal", 2)
    for said, faults in enumerate(([[], [part]], [[seal], []]), start=1):
        output = warm.two_ranks(settings, *faults, codes=(1, 1))
        assert output.count("could not write the checkpoint of step") == 2 * said  # by each rank
        assert output.count("the disk is full. Make room") == 2 * said
        assert all(name.startswith("step_") for name in checkpoint_names(tmp_path / "run"))
    death = functools.partial(dies, "torch.save", 20)
    warm.two_ranks(settings, [death], [], codes=(-signal.SIGKILL, 1))
    assert warm.two_ranks(settings, [], []).count("continuing") == 3
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


def disk_fills(disk, leave, name, number):
    """The disk is full, but for some bytes, from this call of a function on."""
    before_call(name, number, lambda: fill(disk, leave))


#: Before which call of which function the disk is full, up to how many bytes; and what is said.
FULL = [
    ("trainer.loop.make_deterministic", 1, 1 << 16, "the disk is too full: a checkpoint takes"),
    ("trainer.run.start_wandb", 1, 0, "the disk is full. Make room"),
    ("torch.save", 150, 1 << 16, "could not write the checkpoint of step 4.*the disk is full"),
    ("model.huggingface.save", 1, 1 << 16, "could not write the trained weights.*the disk is full"),
]


def test_disk_that_is_really_full_and_then_is_not(debug, disk, tmp_path, whole):
    settings, run_dir = debug("run", *SHORT), tmp_path / "run"
    (disk / "run").mkdir()
    run_dir.symlink_to(disk / "run")
    for name, number, leave, told in FULL:
        output = warm.run(settings, functools.partial(disk_fills, disk, leave, name, number), code=1)
        assert re.search(told, output)
        assert "Traceback" not in output
        assert not (run_dir / "DONE").exists()
        (disk / "filler").unlink()
    warm.run(settings)
    assert_same_run(whole(*SHORT), run_dir)


def test_a_place_that_refuses_a_file(debug, tmp_path, whole):
    settings, lock = debug("run", *SHORT), tmp_path / "run" / ".lock"
    lock.mkdir(parents=True)
    output = warm.run(settings, code=1)
    assert f"Is a directory: {lock}" in output
    assert "Traceback" not in output
    lock.rmdir()
    warm.run(settings)
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
