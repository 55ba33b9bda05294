"""Commands side by side: where they run, how many at a time, what becomes of failures and of a stop."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scripts.paper.run_pool import Job, Stopped, run_all, run_here, slots
from tests.cli import ROOT


def job(folder, name, script):
    return Job(name, ["sh", "-c", script], folder / "logs" / f"{name}.log")


def test_slots_take_every_gpu_before_the_second_run_on_one():
    assert slots(["0", "3"], 2) == ["0", "3", "0", "3"]
    assert slots([], 2) == [None, None]


def test_runs_are_spread_and_never_more_than_there_is_room_for(tmp_path):
    script = "echo $CUDA_VISIBLE_DEVICES; date +%s.%N; sleep 0.3; date +%s.%N"
    jobs = [job(tmp_path, str(i), script) for i in range(4)]
    assert run_all(jobs, slots(["5", "7"], 1)) == []
    logs = [[float(line) for line in job.log.read_text().split()] for job in jobs]
    assert [log[0] for log in logs[:2]] == [5, 7]
    assert {log[0] for log in logs} == {5, 7}
    for _, begin, _ in logs:
        assert sum(other[1] <= begin < other[2] for other in logs) <= 2


def test_a_failure_is_shown_and_does_not_stop_the_others(tmp_path, capfd):
    lines = "for i in $(seq 30); do echo line $i; done; exit 3"
    bad, good = job(tmp_path, "bad", lines), job(tmp_path, "good", "echo fine")
    diverged = Job("diverged", ["sh", "-c", "exit 1"], tmp_path / "d.log", ended_well=lambda code: True)
    done = []
    assert run_all([bad, diverged, good], slots([], 1), on_success=done.append) == [bad]
    assert done == [diverged, good]
    shown = capfd.readouterr().err
    assert "bad failed with exit code 3" in shown
    assert "line 30" in shown
    assert "line 18" not in shown
    assert good.log.read_text() == "fine\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_reaches_the_runs_once_and_starts_no_more(tmp_path, number):
    script = 'trap "echo saved; exit 143" TERM; echo ready; while true; do sleep 0.05; done'
    first, second = (job(tmp_path, name, script) for name in ("first", "second"))
    threading.Thread(target=signal_when_ready, args=(first.log, number), daemon=True).start()
    with pytest.raises(Stopped, match="the same command continues") as stopped:
        run_all([first, second], slots([], 1))
    assert stopped.value.number == number
    assert first.log.read_text() == "ready\nsaved\n"
    assert not second.log.exists()
    assert signal.getsignal(signal.SIGTERM) is not None


#: A pool with one job; argument: its log.
POOL = """
import sys
from pathlib import Path
from scripts.paper.run_pool import Job, run_all

run = "from trainer.interrupt import *; end_with_sweep(); print('ready', flush=True); signal.pause()"
run_all([Job("run", [sys.executable, "-c", run], Path(sys.argv[1]))], [None])
"""


def test_jobs_end_with_a_pool_that_is_killed(tmp_path):
    log = tmp_path / "run.log"
    process = subprocess.Popen([sys.executable, "-c", POOL, str(log)], cwd=ROOT)
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    wait_for(lambda: not is_running(child))


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def signal_when_ready(log, number):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (log.exists() and "ready" in log.read_text()):
        time.sleep(0.02)
    os.kill(os.getpid(), number)


def test_a_command_on_the_terminal_returns_its_code(capfd):
    assert run_here(["sh", "-c", "echo on $CUDA_VISIBLE_DEVICES; exit 4"], "2") == 4
    assert capfd.readouterr().out == "on 2\n"
