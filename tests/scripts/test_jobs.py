"""The commands of a script: how many share a GPU, what becomes of failures and of a stop."""

import os
import signal
import threading

import pytest

from scripts.jobs import run_here, run_jobs
from tests.processes import wait_until
from trainer.errors import Interrupted
from trainer.run_queue import Job

UNTIL_STOPPED = 'trap "echo saved; exit 143" TERM INT; echo ready; while true; do sleep 0.05; done'


def job(folder, name, script):
    return Job(name, ["sh", "-c", script], folder / "logs" / f"{name}.log")


def test_every_gpu_is_used_before_it_is_shared_and_by_no_more_than_allowed(tmp_path):
    script = "echo $CUDA_VISIBLE_DEVICES; date +%s.%N; sleep 0.4; date +%s.%N"
    jobs = [job(tmp_path, str(i), script) for i in range(6)]
    assert run_jobs(jobs, ["5", "7"], per_gpu=2) == {}
    logs = [[float(line) for line in job.output.read_text().split()] for job in jobs]
    assert [gpu for gpu, *_ in logs[:4]] == [5, 7, 5, 7]
    for _, begin, _ in logs:
        shared = [gpu for gpu, other, end in logs if other <= begin < end]
        assert max(shared.count(5), shared.count(7)) <= 2
    assert max(begin for _, begin, _ in logs[:4]) < min(end for *_, end in logs[:4])


def test_without_gpus_so_many_run_at_a_time_on_what_is_visible(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    jobs = [job(tmp_path, str(i), "echo $CUDA_VISIBLE_DEVICES; date +%s.%N; sleep 0.4") for i in range(3)]
    assert run_jobs(jobs, [], per_gpu=2) == {}
    logs = [[float(line) for line in job.output.read_text().split()] for job in jobs]
    assert {gpu for gpu, _ in logs} == {3}
    *first_two, third = (begin for _, begin in logs)
    assert max(first_two) < min(first_two) + 0.4 <= third


def test_a_failure_is_shown_and_does_not_stop_the_others(tmp_path, capfd):
    lines = "for i in $(seq 30); do echo line $i; done; exit 3"
    bad, good = job(tmp_path, "bad", lines), job(tmp_path, "good", "echo fine")
    killed = job(tmp_path, "killed", "kill -TERM $$")
    diverged = Job("diverged", ["sh", "-c", "exit 1"], tmp_path / "d.log", ended_well=lambda code: True)
    done = []
    failed = run_jobs([bad, killed, diverged, good], on_success=done.append)
    assert [*failed] == ["bad", "killed"]
    assert failed["killed"] == "interrupted"
    assert done == [diverged, good]
    shown = capfd.readouterr().err
    assert f"failed bad after 0 s, see {bad.output}\n" in shown
    assert "ended with exit code 3\n" in shown
    assert "    line 30\n" in shown
    assert "line 18" not in shown
    assert "finished diverged" in shown
    assert good.output.read_text() == "fine\n"


def test_a_stop_saves_and_says_how_to_continue(tmp_path):
    first, second = (job(tmp_path, name, UNTIL_STOPPED) for name in ("first", "second"))
    stop_when_ready(first.output, signal.SIGTERM)
    with pytest.raises(Interrupted, match="stopped by SIGTERM; the same command continues") as stopped:
        run_jobs([first, second])
    assert stopped.value.signal == signal.SIGTERM
    assert first.output.read_text() == "ready\nsaved\n"
    assert not second.output.exists()


def test_a_command_on_the_terminal_returns_its_code(capfd):
    assert run_here(["sh", "-c", "echo on $CUDA_VISIBLE_DEVICES; exit 4"], "2") == 4
    assert capfd.readouterr().out == "on 2\n"


def test_a_command_on_the_terminal_ends_before_a_stop_is_raised(tmp_path):
    output = tmp_path / "output.txt"
    stop_when_ready(output, signal.SIGTERM)
    with pytest.raises(Interrupted) as stopped:
        run_here(["sh", "-c", f"exec > {output}; {UNTIL_STOPPED}"], None)
    assert stopped.value.signal == signal.SIGTERM
    assert output.read_text() == "ready\nsaved\n"


def stop_when_ready(output, number):
    """Send this process the signal, from a thread, once `ready` is in the file."""

    def stop():
        wait_until(lambda: output.exists() and "ready" in output.read_text(), 20)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
