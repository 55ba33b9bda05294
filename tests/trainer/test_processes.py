import functools
import os
import pty
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from common.errors import Interrupted, TrainingError
from tests import warm
from tests.cli import wait_for_step
from tests.processes import LOOPBACK, descendants, is_running, listening_addresses, wait_until
from trainer import distributed
from trainer.loop import train
from trainer.processes import Job, run_all
from trainer.settings import Settings
from trainer.start import TrainingDirectory

TIMES = "echo $CUDA_VISIBLE_DEVICES; date +%s.%N; sleep 0.25; date +%s.%N"


def job(folder, name, script, gpus=0, **environment):
    return Job(name, ["sh", "-c", script], folder / name / "output.txt", gpus, environment)


def run(jobs, gpus=(), limit=1):
    """The signal that stopped them, and how each ended by its name; None for those that began and did not."""
    ended = {}
    note = {"on_start": lambda job: ended.update({job.name: None})}
    note["on_end"] = lambda job, outcome: ended.update({job.name: outcome})
    return run_all(jobs, gpus=gpus, limit=limit, **note), ended


def test_each_has_gpus_of_its_own_and_begins_in_its_turn(tmp_path):
    needs = [1, 1, 2, 1]
    jobs = [job(tmp_path, str(i), TIMES, gpus) for i, gpus in enumerate(needs)]
    stopped_by, ended = run(jobs, gpus=["5", "GPU-7"], limit=2)
    assert stopped_by is None
    assert [outcome.kind for outcome in ended.values()] == ["finished"] * 4
    seen = [job.output.read_text().split() for job in jobs]
    assert [gpus for gpus, *_ in seen] == ["5", "GPU-7", "5,GPU-7", "5"]
    begin, end = ([float(times[i]) for times in seen] for i in (1, 2))
    assert max(begin[:2]) < min(end[:2])  # side by side
    assert max(end[:2]) < begin[2]
    assert end[2] < begin[3]


def test_without_gpus_the_limit_counts_and_the_environment_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")
    jobs = [job(tmp_path, str(i), f"echo $OWN; {TIMES}", OWN=f"own{i}") for i in range(3)]
    run(jobs, limit=2)
    first, second, third = (job.output.read_text().splitlines() for job in jobs)
    assert first[:2] == ["own0", "as it was"]
    assert float(second[2]) < float(first[3])
    assert float(third[2]) > min(float(first[3]), float(second[3]))


def test_a_failure_has_its_reason_and_stops_no_other(tmp_path, capfd):
    printed = r"printf 'step 1\rstep 2\rlast step\n\n'; echo lr is bad >&2; exit 1"
    scripts = {"bad": printed, "killed": "kill -KILL $$", "stopped": "kill -TERM $$", "saved": "exit 138"}
    jobs = [job(tmp_path, *one) for one in (*scripts.items(), ("good", "echo fine"))]
    jobs.append(Job("absent", ["no-such-program"], tmp_path / "absent" / "output.txt"))
    jobs[0].output.parent.mkdir()
    jobs[0].output.write_text("of the start before\n")
    stopped_by, ended = run(jobs, limit=6)
    assert stopped_by is None
    kinds = {name: outcome.kind for name, outcome in ended.items()}
    failed, asked = dict.fromkeys(["bad", "killed", "absent"], "failed"), ["stopped", "saved"]
    assert kinds == failed | dict.fromkeys(asked, "interrupted") | {"good": "finished"}
    assert ended["bad"].reason == "last step\nlr is bad"
    assert "was ended by SIGKILL: the kernel does that when memory runs out" in ended["killed"].reason
    assert "cannot start it: No such file or directory: no-such-program" in ended["absent"].reason
    told = capfd.readouterr().err
    assert f"failed bad after 0 s, see {jobs[0].output}" in told
    assert "started good\n" in told


@pytest.fixture(params=[signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def number(request):
    """A signal that is not ignored, as SIGHUP is where the tests themselves run under nohup."""
    before = signal.signal(request.param, lambda number, frame: None)
    yield request.param
    signal.signal(request.param, before)


def test_a_stop_lets_the_running_ones_save_and_starts_no_more(tmp_path, capfd, number):
    def asked(then):
        return f'trap "echo saved; {then}" TERM INT; echo ready; while true; do sleep 0.05; done'

    ends = {"saves": "exit 143", "finishes": "exit 0", "fails": "exit 1", "waits": ""}
    jobs = [job(tmp_path, name, asked(then)) for name, then in ends.items()]
    before = signal.getsignal(number)
    threading.Thread(target=signal_when, args=("ready", jobs[:3], number), daemon=True).start()
    stopped_by, ended = run(jobs, limit=3)
    assert stopped_by == number
    kinds = {name: outcome.kind for name, outcome in ended.items()}
    assert kinds == {"saves": "interrupted", "finishes": "finished", "fails": "failed"}
    assert all(job.output.read_text() == "ready\nsaved\n" for job in jobs[:3])
    assert "stopping: 3 running, which save first; 1 not started" in capfd.readouterr().err
    assert signal.getsignal(number) == before


def signal_when(said, jobs, number):
    wait_until(lambda: all(job.output.exists() and said in job.output.read_text() for job in jobs), 20)
    os.kill(os.getpid(), number)


def test_a_second_ctrl_c_reaches_the_running_ones_too(tmp_path):
    saves = "trap 'trap \"exit 130\" INT; echo saving' INT; echo ready; "
    jobs = [job(tmp_path, "saves", f"{saves} for _ in $(seq 400); do sleep 0.05; done")]
    for said in ("ready", "saving"):
        threading.Thread(target=signal_when, args=(said, jobs, signal.SIGINT), daemon=True).start()
    stopped_by, ended = run(jobs)
    assert (stopped_by, ended["saves"].kind) == (signal.SIGINT, "interrupted")
    assert jobs[0].output.read_text() == "ready\nsaving\n"


def loses_its_terminal(folder):
    """As when a connection breaks while a job runs: what it prints to is gone, and SIGHUP says so."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, and jobs then shall go on
    screen, terminal = pty.openpty()
    for stream in (1, 2):
        os.dup2(terminal, stream)
    os.close(terminal)
    one = job(folder, "one", 'trap "echo saved; exit 143" TERM; echo ready; while true; do sleep 0.05; done')

    def hang_up():
        wait_until(lambda: one.output.exists() and "ready" in one.output.read_text(), 20)
        os.close(screen)
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=hang_up, daemon=True).start()
    run([one])


def test_the_running_ones_save_when_the_terminal_is_gone(tmp_path):
    queue = warm.SERVER.Process(target=loses_its_terminal, args=(tmp_path,))
    queue.start()
    queue.join(60)
    assert (tmp_path / "one" / "output.txt").read_text() == "ready\nsaved\n"
    assert queue.exitcode == 0


CHILD = """
import time
from trainer.processes import end_with_sweep
end_with_sweep()
print("ready", flush=True)
time.sleep(60)
"""


def queue_one(folder):
    command = [sys.executable, "-c", CHILD]
    run_all([Job("run", command, folder / "output.txt")], gpus=[], limit=1, on_end=print)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
def test_killing_the_sweep_ends_its_runs(tmp_path):
    sweep = warm.SERVER.Process(target=queue_one, args=(tmp_path,))
    sweep.start()
    output = tmp_path / "output.txt"
    assert wait_until(lambda: output.exists() and "ready" in output.read_text(), 30)
    running = descendants(sweep.pid)
    assert len(running) == 2
    assert os.getsid(running[1]) == running[1]  # so a terminal's Ctrl-C reaches it through the queue alone
    sweep.kill()
    sweep.join()
    assert wait_until(lambda: not any(map(is_running, running)), seconds=5)


ON_TWO = ("steps=8", "checkpoint_every=2", "sample_tokens=0", "hardware.micro_batch=2")
HELD_AT = 5


def train_and_hold(settings):
    warm.at_step(HELD_AT, lambda trainer: time.sleep(600))
    train(settings)


def start_forked(work, argument, processes):
    """distributed.start in a process whose ranks need not import all again."""
    warm.ranks_are_forked()
    distributed.start(work, argument, processes=processes)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("processes", [1, 2])  # 1: as each run of a sweep
def test_sockets_are_on_the_loopback_device_and_killing_the_launcher_ends_all(datasets, tmp_path, processes):
    killed = warm.debug_settings(datasets, *ON_TWO, f"run_dir={tmp_path / 'killed'}")
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


def end_with(code):
    """Be asked to stop before the first step, as Ctrl-C does, and end with this exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the launcher sends on
    time.sleep(0.3)  # its parent knows it by then: a fork may run before that
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
    os._exit(code)


def test_a_second_ctrl_c_is_said_to_stop_at_once():
    with pytest.raises(Interrupted, match=r"^stopped at once"):
        warm.call(functools.partial(distributed.start, exec, "raise KeyboardInterrupt", processes=1))


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
