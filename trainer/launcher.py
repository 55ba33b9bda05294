"""Starts the processes of a run on this machine, waits for them, and tells which failed first and why.

They find each other through a file that only this user can read, and talk over the loopback device. A network
port would be open to every user and machine that reaches it, and PyTorch unpickles what it reads from there.
One process alone opens no socket at all. Several machines need torchrun.
"""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.distributed import CONTINUES, RENDEZVOUS_FILE
from trainer.errors import Interrupted, TrainingError
from trainer.interrupt import ForwardedStop, end_with_parent

log = logging.getLogger(__name__)

# When a rank has failed, the others have this long to end by themselves.
GRACE_S = 30.0


def start(work: Callable[..., None], *arguments: object, processes: int) -> None:
    """Run `work(*arguments)` in `processes` fresh processes of this machine and wait for all.

    If one fails the others are stopped, those that do not react within 30 s by SIGKILL. If this process ends
    in any way, they end too. Raises TrainingError with the first failure's message, and Interrupted if the
    processes were asked to stop.
    """
    # The folder is private to this user: mkdtemp gives it the mode 0700.
    with ForwardedStop() as stop, TemporaryDirectory(prefix="sagebwd-", ignore_cleanup_errors=True) as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(processes):
                environment = _environment(rank, processes, Path(folder))
                ranks.append(_Rank.start(rank, environment, work, arguments))
            failed = _first_failure(ranks)
        finally:
            _end(ranks)
    stopped = next((rank.error for rank in ranks if isinstance(rank.error, Interrupted)), None)
    if failed:
        # 1: Ctrl-C reached it while it was importing.
        if stop.signal and not failed.error and failed.process.exitcode in (-stop.signal, -signal.SIGTERM, 1):
            raise Interrupted(f"stopped before its first step. {CONTINUES}", stop.signal)
        death = describe_death(failed.process.pid, failed.process.exitcode)
        raise failed.error or TrainingError(f"rank {failed.rank} {death}. {CONTINUES}")
    if stopped and stop.signal:
        stop.call_previous_handler()
        raise Interrupted(stopped.message, stop.signal)
    if stopped:
        raise stopped


@dataclass
class _Rank:
    """A process of the run, seen from the one that started it."""

    rank: int
    process: BaseProcess
    results: connection.Connection
    error: TrainingError | Interrupted | None = None

    @classmethod
    def start(
        cls, rank: int, environment: dict[str, str], work: Callable[..., None], arguments: tuple[object, ...]
    ) -> "_Rank":
        # spawn: a forked process cannot use CUDA, and inherits locks that nobody will release.
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(rank, environment, sender, work, arguments), name=f"rank {rank}"
        )
        process.start()
        sender.close()  # the process has its own; when that is closed, `receiver` is at its end
        return cls(rank, process, receiver)

    def receive(self) -> None:
        """Take the error that the process sent, if it did."""
        try:
            if self.results.poll():
                self.error = self.results.recv()
        except EOFError:
            pass


def _run(
    rank: int,
    environment: dict[str, str],
    results: connection.Connection,
    work: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    """The process of a rank. Being asked to stop is no failure: the other ranks may still be saving."""
    end_with_parent()
    os.environ.update(environment)
    try:
        work(*arguments)
    except Interrupted as stop:
        results.send(stop)
    except TrainingError as error:
        results.send(TrainingError(str(error)))
        sys.exit(1)
    except Exception as error:
        name = f"{type(error).__name__}: {error}"
        results.send(TrainingError(f"{traceback.format_exc()}\nrank {rank} failed: {name}\n{CONTINUES}"))
        sys.exit(1)


def _environment(rank: int, processes: int, folder: Path) -> dict[str, str]:
    """What torchrun would set, without its network address."""
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    if processes == 1:
        return environment
    environment[RENDEZVOUS_FILE] = str(folder / "rendezvous")
    # As torchrun: NCCL ends a process whose neighbours do not answer.
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if loopback := _loopback():
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return environment


def _loopback() -> str | None:
    """The name of the loopback device: lo on Linux, lo0 on macOS."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _first_failure(ranks: list[_Rank]) -> _Rank | None:
    """Wait until a process fails, and return it; None when all have ended well."""
    # Errors are received while the process still runs: it cannot end before a long one is read.
    sources = {rank.process.sentinel: rank for rank in ranks} | {rank.results: rank for rank in ranks}
    while sources:
        for source in connection.wait(list(sources)):
            rank = sources.pop(source)
            rank.receive()
            if source == rank.process.sentinel:
                rank.process.join()
                if rank.process.exitcode != 0:
                    return rank
    return None


def _end(ranks: list[_Rank]) -> None:
    """Stop the processes that still run: by SIGTERM, and after GRACE_S by SIGKILL."""
    running = [rank for rank in ranks if rank.process.is_alive()]
    for rank in running:
        rank.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in running:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            log.warning("rank %d did not end within %g s; killing it", rank.rank, GRACE_S)
            rank.process.kill()
            rank.process.join()


def describe_death(pid: int, code: int) -> str:
    """How a process ended that sent no error, from its exit code."""
    if code > 0:
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
