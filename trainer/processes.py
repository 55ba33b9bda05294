"""Processes on this machine: what asks them to stop, the death of a parent, and commands in parallel."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from common.errors import Interrupted, explain
from common.files import no_link
from common.terminal import say, surviving_closed

SWEEP_PID = "SAGEBWD_SWEEP_PID"  # environment variable: the process of the sweep that started this one
SECOND = "; a second Ctrl-C stops at once, without saving"


class StopRequest:
    """Within this context, remembers the first signal that asks to stop: the run ends its step and saves.

    A second SIGINT stops at once, but a checkpoint that is being written is completed. Clusters send SIGUSR1
    or SIGUSR2 some time before they end a job. SIGHUP comes when a terminal or a connection is closed; under
    nohup, which ignores it, it stays ignored.
    """

    SIGNALS = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )

    def __init__(self) -> None:
        self.signal: int | None = None
        self.interrupts = 0  # how many SIGINTs came
        self._at_once = False
        self._wakeup: int | None = None

    def __enter__(self) -> "StopRequest":
        ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
        self._previous = {
            number: signal.signal(number, self._handle) for number in self.SIGNALS if number not in ignored
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup)

    def announce(self) -> None:
        """From now on say, when a signal comes, what it does.

        In a thread that Python's C handler wakes: `_handle` waits until this one is back from C, which may
        take a whole step.
        """
        reader, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        threading.Thread(target=_say_what_stops, args=(reader,), name="stop", daemon=True).start()

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Within this context a signal raises Interrupted, with this message, wherever the run is.

        For work before the first step that has nothing to save.
        """
        self._at_once = True
        try:
            if self.signal:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            raise Interrupted(message, self.signal or signal.SIGINT) from None
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.interrupts += number == signal.SIGINT
        self._react(number)

    def _react(self, number: int) -> None:
        if self._at_once or (number == signal.SIGINT and self.interrupts >= 2):
            self._at_once = False  # the next signal must not interrupt the cleaning up
            # Not Interrupted: code that handles every Exception would go on with its work.
            raise KeyboardInterrupt


class ForwardedStop(StopRequest):
    """In the process that started the ranks: asks them to stop."""

    def _react(self, number: int) -> None:
        ranks = multiprocessing.active_children()
        if not ranks:
            raise Interrupted("stopped before the run began; the same command starts it", number)
        for process in ranks:
            # A terminal sends SIGINT to the ranks, too, and a second SIGINT would stop them at once.
            os.kill(process.pid, signal.SIGTERM)

    def call_previous_handler(self) -> None:
        """After the ranks have saved: run the handler installed before, in which submitit requeues a job."""
        previous = self._previous[self.signal]
        if callable(previous) and previous not in (signal.default_int_handler, _exit):
            previous(self.signal, None)


class StopSignal(StopRequest):
    """In a process that starts commands of their own: only remembers."""

    def _react(self, number: int) -> None:
        pass


def _say_what_stops(reader: int) -> None:
    """Say once what a signal that asks to stop does; `reader` gives the numbers of all signals."""
    said = False
    with open(reader, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] in StopRequest.SIGNALS and not said:
                tqdm.write(f"stopping when this step is done and saved{SECOND}", file=sys.stderr)
                said = True


def exit_on_signals() -> None:
    """Let signals that ask to stop end this process like sys.exit, so that it can say what it has done."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def end_with_sweep() -> None:
    """`watch_parent`, if a sweep started this process as a command of its own."""
    if parent := os.environ.pop(SWEEP_PID, None):
        watch_parent(int(parent))


def watch_parent(parent: int) -> None:
    """Kill this process, within a second or two, when its parent is no longer the process `parent`.

    Without its parent a rank would train on, hold the run's lock, and at the end wait forever. What it had
    not saved is trained again.
    """
    threading.Thread(target=_kill_without, args=(parent,), name="parent", daemon=True).start()


def _kill_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


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
    call `end_with_sweep`, as train.py does, end.
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


def forget_one_run(planned: int) -> None:
    """Drop W&B's variables that name one run, where several are planned: all would write into that one."""
    for variable in ("WANDB_RUN_ID", "WANDB_NAME"):
        if planned > 1 and os.environ.pop(variable, None):
            say(f"{variable} is ignored: it names one run, and {planned} are planned")
