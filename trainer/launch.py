"""Starts the ranks of a run on this machine, waits for them, and tells which failed first and why.

The processes are those of torch.multiprocessing.spawn. They find each other through a file that only this
user can read, and talk over the loopback device. A network port, as torchrun opens one, can be reached by
every user and machine, and PyTorch unpickles what it reads from there. One process alone opens no socket at
all. Several machines need torchrun.
"""

import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from trainer.distributed import CONTINUES, RENDEZVOUS_FILE
from trainer.errors import Interrupted, TrainingError
from trainer.interrupt import ForwardedStop, end_with_parent


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
        end_with_parent()
        os.environ.update(_environment(rank, processes, folder))
        work(*arguments)
    except Interrupted as stop:
        _tell(folder, rank, stop)
    except TrainingError as error:
        _tell(folder, rank, TrainingError(str(error)))
        sys.exit(1)
    except KeyboardInterrupt:  # a second Ctrl-C; torch would take it for success
        sys.exit(1)


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
