import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import Interrupted, TrainingError
from tests import warm
from tests.cli import wait_for_step
from tests.processes import LOOPBACK, descendants, is_running, listening_addresses, wait_until
from trainer import distributed
from trainer.loop import train
from trainer.settings import Settings
from trainer.start import TrainingDirectory

SHORT = ("steps=8", "checkpoint_every=2", "sample_tokens=0", "hardware.micro_batch=2")
HELD_AT = 5

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")


def train_and_hold(settings: Settings) -> None:
    warm.at_step(HELD_AT, lambda trainer: time.sleep(600))
    train(settings)


def start_forked(work: Callable[..., None], argument: object, processes: int) -> None:
    """distributed.start in a process whose ranks need not import all again."""
    warm.ranks_are_forked()
    distributed.start(work, argument, processes=processes)


@needs_proc
@pytest.mark.parametrize("processes", [1, 2])  # 1: as each run of a sweep
def test_sockets_are_on_the_loopback_device_and_killing_the_launcher_ends_all(datasets, tmp_path, processes):
    killed = warm.debug_settings(datasets, *SHORT, f"run_dir={tmp_path / 'killed'}")
    start = warm.SERVER.Process(target=start_forked, args=(train_and_hold, killed, processes))
    start.start()
    wait_for_step(start.is_alive, tmp_path / "killed", HELD_AT)
    running = descendants(start.pid)
    assert len(running) > processes
    addresses = listening_addresses(running)
    start.kill()
    start.join()
    assert wait_until(lambda: not any(map(is_running, running)), seconds=5)
    with TrainingDirectory(tmp_path / "killed").locked():
        pass
    if processes == 1:
        assert addresses == []
        return
    assert addresses  # gloo has some: the test sees what it looks for
    assert set(addresses) <= LOOPBACK


def end_with(code: int) -> None:
    """Be asked to stop before the first step, as Ctrl-C does, and end with this exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the launcher sends on
    time.sleep(0.3)  # its parent knows it by then: a fork may run before that
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
    os._exit(code)


def is_interrupted_twice() -> None:
    raise KeyboardInterrupt


def test_a_second_ctrl_c_is_said_to_stop_at_once():
    with pytest.raises(Interrupted, match=r"^stopped at once"):
        warm.call(functools.partial(distributed.start, is_interrupted_twice, processes=1))


@pytest.mark.parametrize(
    ("code", "raised", "told"),
    [(1, Interrupted, "stopped before its first step"), (7, TrainingError, "ended with exit code 7")],
)
def test_a_process_that_ended_because_it_was_asked_to_did_not_fail(code, raised, told):
    with pytest.raises(raised, match=told):
        warm.call(functools.partial(distributed.start, end_with, code, processes=1))


def test_an_error_for_the_user_arrives_without_a_traceback():
    """From a process that is started, not forked, as users' are; here of a place where no run can be."""
    no_place = TrainingDirectory(Path("x" * 300))
    with pytest.raises(TrainingError, match=r"^cannot use the run dir.*: File name too long.*set run_dir=…$"):
        distributed.start(no_place.is_finished_with, Settings(), processes=1)
