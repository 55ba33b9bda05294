"""Commands in parallel, each with its GPUs and its output in a file."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from trainer.errors import explain
from trainer.interrupt import SWEEP_PID, StopRequest, StopSignal
from trainer.launch import describe_death

FINISHED, FAILED, INTERRUPTED = "finished", "failed", "interrupted"
#: Exit codes of a process that was asked to stop: it saved and said so, or had nothing to save yet.
STOPPED = {code for number in StopRequest.SIGNALS for code in (128 + number, -number)}
TAIL = 12  # lines of a failed command's output that are its reason
POLL_S = 0.2


@dataclass(frozen=True)
class Job:
    """A command, the file that its output is added to, the number of its GPUs, and its environment.

    ended_well: whether this exit code counts as success.
    """

    name: str
    command: list[str]
    output: Path
    gpus: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    ended_well: Callable[[int], bool] = lambda code: code == 0


@dataclass(frozen=True)
class Outcome:
    """How a job ended: FINISHED, FAILED or INTERRUPTED; `reason` of a failure."""

    kind: str
    reason: str = ""


def run_all(
    jobs: Sequence[Job],
    *,
    gpus: Sequence[str],
    limit: int,
    on_start: Callable[[Job], None] = lambda job: None,
    on_end: Callable[[Job, Outcome], None],
) -> int | None:
    """Run the jobs in their order, each as soon as enough GPUs are free, and at most `limit` at a time.

    gpus: as CUDA_VISIBLE_DEVICES names them; at least as many as any job needs. A GPU that is listed n times
    is shared by up to n jobs; then each job must need one GPU. A signal that asks to stop is passed on to the
    running jobs as SIGTERM, once, and no new ones begin. Returns its number, or None. If this process is
    killed, the jobs that call `interrupt.end_with_sweep`, as train.py does, end.
    """
    waiting, running, told = deque(jobs), list[_Running](), False
    with StopSignal() as stop, tqdm(total=len(jobs), unit="run", disable=None) as progress:
        while running or (waiting and not stop.signal):
            while not stop.signal and waiting and len(running) < limit:
                free = _free(gpus, running)
                if len(free) < waiting[0].gpus:
                    break
                job = waiting.popleft()
                on_start(job)
                running.append(_Running(job, free[: job.gpus]))
            if stop.signal and not told:
                _ask_to_stop(running, len(waiting))
                told = True
            time.sleep(POLL_S)
            for ended in [one for one in running if one.has_ended()]:
                running.remove(ended)
                on_end(ended.job, ended.report())
                progress.update()
    return stop.signal


def _free(gpus: Sequence[str], running: list["_Running"]) -> list[str]:
    free = list(gpus)
    for one in running:
        for gpu in one.gpus:
            free.remove(gpu)
    return free


def _ask_to_stop(running: list["_Running"], waiting: int) -> None:
    _say(f"stopping: {len(running)} running, which save first; {waiting} not started")
    for one in running:
        one.ask_to_stop()


class _Running:
    """A job that was started; one that could not be has ended at once."""

    def __init__(self, job: Job, gpus: list[str]):
        self.job, self.gpus, self.began = job, gpus, time.monotonic()
        self.process: subprocess.Popen | None = None
        self.problem = ""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        try:
            job.output.parent.mkdir(parents=True, exist_ok=True)
            with open(job.output, "ab") as output:
                self.printed_before = output.tell()
                self.process = subprocess.Popen(
                    job.command,
                    stdin=subprocess.DEVNULL,  # nobody could answer it
                    stdout=output,
                    stderr=output,
                    env={**os.environ, SWEEP_PID: str(os.getpid()), **job.environment, **visible},
                    start_new_session=True,  # so that Ctrl-C reaches it once, through us
                )
        except OSError as error:
            self.problem = f"cannot start it: {explain(error)}"
            return
        _say(f"started {job.name}" + (f" on GPU {','.join(gpus)}" if gpus else ""))

    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def ask_to_stop(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGTERM)

    def report(self) -> Outcome:
        """How it ended, said on the terminal, too."""
        outcome = self._outcome()
        seconds = f"{time.monotonic() - self.began:.0f} s"
        where = f", see {self.job.output}" if outcome.kind == FAILED and self.process else ""
        _say(f"{outcome.kind} {self.job.name} after {seconds}{where}")
        return outcome

    def _outcome(self) -> Outcome:
        if self.process is None:
            return Outcome(FAILED, self.problem)
        code = self.process.returncode
        if self.job.ended_well(code):
            return Outcome(FINISHED)
        if code in STOPPED:
            return Outcome(INTERRUPTED)
        end = self._last_lines()
        return Outcome(
            FAILED, end if code == 1 and end else f"{describe_death(self.process.pid, code)}\n{end}"
        )

    def _last_lines(self) -> str:
        """The end of what it printed, without what progress bars wrote over."""
        with open(self.job.output, errors="replace", newline="\n") as output:
            output.seek(self.printed_before)
            lines = [line.rstrip("\r\n").rpartition("\r")[-1] for line in output]
        return "\n".join([line for line in lines if line.strip()][-TAIL:])


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
