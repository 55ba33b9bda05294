"""Starts processes on this machine: the ranks of a run, or commands in parallel, each with its GPUs.

Waits for them, and tells which failed and why. The ranks are the processes of torch.multiprocessing.spawn.
They find each other through a file that only this user can read, and talk over the loopback device. A network
port, as torchrun opens one, can be reached by every user and machine, and PyTorch unpickles what it reads
from there. One process alone opens no socket at all. Several machines need torchrun.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from tqdm import tqdm

from common.errors import Interrupted, TrainingError, explain
from common.files import no_link
from trainer.distributed import CONTINUES, RENDEZVOUS_FILE
from trainer.interrupt import (
    SECOND,
    SWEEP_PID,
    ForwardedStop,
    StopRequest,
    StopSignal,
    surviving_closed,
    watch_parent,
)

# ---------------------------------------------------------------------- the ranks of a run


def start(work: Callable[..., None], *arguments: object, processes: int) -> None:
    """Run `work(*arguments)` in `processes` fresh processes of this machine and wait for all.

    If one fails the others are stopped, those that do not react within 30 s by SIGKILL. If this process ends
    in any way, they end too. Raises TrainingError with the first failure's message, and Interrupted if the
    processes were asked to stop.
    """
    # The folder is private to this user: mkdtemp gives it the mode 0700.
    with (
        ForwardedStop() as stop,
        tempfile.TemporaryDirectory(prefix="sagebwd-", ignore_cleanup_errors=True) as name,
    ):
        folder = Path(name)
        try:
            with _temporary_files_in(name):
                started = torch.multiprocessing.spawn(
                    _run, (processes, folder, work, arguments), nprocs=processes, join=False
                )
            while not started.join():
                pass
        except ProcessRaisedException as error:
            raise TrainingError(f"{error}\nrank {error.error_index} failed. {CONTINUES}") from None
        except ProcessExitedException as error:
            rank, code = error.error_index, error.exit_code
            if told := _told(folder, rank):
                raise told from None
            if stop.signal and code in (-stop.signal, -signal.SIGTERM, 1):  # 1: while it was importing
                raise Interrupted(f"stopped before its first step. {CONTINUES}", stop.signal) from None
            death = describe_death(error.error_pid, code)
            raise TrainingError(f"rank {rank} {death}. {CONTINUES}") from None
        stopped = next(filter(None, (_told(folder, rank) for rank in range(processes))), None)
    if stopped and stop.signal:
        stop.call_previous_handler()
        raise Interrupted(str(stopped), stop.signal)
    if stopped:
        raise stopped


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """torch unpickles what a rank that fails leaves in a temporary file: nobody else may write it."""
    before = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _run(
    rank: int, processes: int, folder: Path, work: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    """The process of a rank. Being asked to stop is no failure: the other ranks may still be saving."""
    try:
        watch_parent(multiprocessing.parent_process().pid)
        os.environ.update(_environment(rank, processes, folder))
        work(*arguments)
    except Interrupted as stop:
        _tell(folder, rank, stop)
    except TrainingError as error:
        _tell(folder, rank, TrainingError(str(error)))
        sys.exit(1)
    except KeyboardInterrupt:  # a second Ctrl-C
        _tell(folder, rank, Interrupted(f"stopped at once. {CONTINUES}", signal.SIGINT))


def _tell(folder: Path, rank: int, error: Exception) -> None:
    (folder / f"rank_{rank}").write_bytes(pickle.dumps(error))


def _told(folder: Path, rank: int) -> TrainingError | Interrupted | None:
    """The error that a rank left."""
    file = folder / f"rank_{rank}"
    return pickle.loads(file.read_bytes()) if file.exists() else None


def _environment(rank: int, processes: int, folder: Path) -> dict[str, str]:
    """What torchrun would set, without its network address."""
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    if processes == 1:
        return environment
    environment[RENDEZVOUS_FILE] = str(folder / "rendezvous")
    # As torchrun: NCCL ends a process whose neighbours do not answer.
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # The loopback device: lo on Linux, lo0 on macOS.
    for _, device in socket.if_nameindex():
        if device in ("lo", "lo0"):
            environment |= {"GLOO_SOCKET_IFNAME": device, "NCCL_SOCKET_IFNAME": device}
    return environment


def describe_death(pid: int, code: int) -> str:
    """How a process ended that sent no error, from its exit code."""
    if code >= 0:
        return f"(process {pid}) ended with exit code {code}"
    hints = {
        "SIGKILL": ": the kernel does that when memory runs out (see dmesg), a cluster to end a job",
        "SIGABRT": ": NCCL does that if another rank keeps it waiting for longer than hardware.timeout_s",
    }
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"(process {pid}) was ended by {name}{hints.get(name, '')}"


# ---------------------------------------------------------------------- commands in parallel

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
    is shared by up to n jobs; then each job must need one GPU. When a signal asks to stop, the running jobs
    are asked to, and no new ones begin. Returns its number, or None. If this process is killed, the jobs that
    call `interrupt.end_with_sweep`, as train.py does, end.
    """
    waiting, running, told = deque(jobs), list[_Running](), 0
    with (
        surviving_closed(),
        StopSignal() as stop,
        tqdm(total=len(jobs), unit="run", disable=None) as bar,
    ):
        while running or (waiting and not stop.signal):
            while not stop.signal and waiting and len(running) < limit:
                free = _free(gpus, running)
                if len(free) < waiting[0].gpus:
                    break
                job = waiting.popleft()
                on_start(job)
                running.append(_Running(job, free[: job.gpus]))
            if stop.signal and not told:
                counts = f"{len(running)} running, which save first; {len(waiting)} not started"
                _say(f"stopping: {counts}{SECOND}")
            while told < stop.interrupts + (stop.signal not in (None, signal.SIGINT)):
                for one in running:
                    one.ask_to_stop(signal.SIGINT if told else stop.signal)
                told += 1
            time.sleep(POLL_S)
            for ended in [one for one in running if one.has_ended()]:
                running.remove(ended)
                on_end(ended.job, ended.report())
                bar.update()
    return stop.signal


def _free(gpus: Sequence[str], running: list["_Running"]) -> list[str]:
    free = list(gpus)
    for one in running:
        for gpu in one.gpus:
            free.remove(gpu)
    return free


class _Running:
    """A job that was started; one that could not be has ended at once."""

    def __init__(self, job: Job, gpus: list[str]):
        self.job, self.gpus, self.began = job, gpus, time.monotonic()
        self.process: subprocess.Popen | None = None
        self.problem, self.was_asked = "", False
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        try:
            job.output.parent.mkdir(parents=True, exist_ok=True)
            with open(job.output, "ab", opener=no_link) as output:
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

    def ask_to_stop(self, number: int) -> None:
        """A Ctrl-C reaches its ranks, too, as from a terminal; SIGTERM it passes on to them itself."""
        self.was_asked = True
        if self.process and number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        elif self.process:
            self.process.send_signal(signal.SIGTERM)

    def report(self) -> Outcome:
        """How it ended, said on the terminal, too, unless it was asked to."""
        outcome = self._outcome()
        if outcome.kind == INTERRUPTED and self.was_asked:
            return outcome
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
