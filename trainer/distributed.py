"""The ranks of a run: start their processes, know which one this is, join the others, combine values."""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from common.errors import Interrupted, LostRanks, SettingsError, TrainingError
from trainer.processes import ForwardedStop, describe_death, watch_parent

T = TypeVar("T")

# Until the first step is done ranks may wait long for each other: one prepares the data, and compile times
# differ. The process that started the ranks of a machine notices if one of them dies meanwhile.
STARTUP_TIMEOUT_S = 4 * 3600.0

# A rank that lost the others reports it after this delay, so that the starting process sees the rank that
# died first and reports that failure.
REPORT_DELAY_S = 3.0

# Environment variable: the file through which ranks find each other that `start` started.
RENDEZVOUS_FILE = "SAGEBWD_RENDEZVOUS_FILE"

CONTINUES = "The same command continues from the newest checkpoint"


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier()

    def from_main(self, make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """Call `make()` on the main rank; return its result, or raise its error, on every rank."""
        if self.count == 1:
            return make()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = make()
            except (TrainingError, Interrupted, OSError, ValueError) as error:
                box[1] = error
        dist.broadcast_object_list(box, group=group)
        result, problem = box
        if problem is not None:
            raise problem
        return cast(T, result)

    def compare(self, facts: dict[str, Any]) -> None:
        """Raise SettingsError, on all ranks, if a rank has other `facts` than the main one; it names them."""
        if self.count == 1:
            return
        of_rank: list[Any] = [None] * self.count
        dist.all_gather_object(of_rank, facts)
        expected = of_rank[0]
        differing = [
            f"{name} is {found.get(name)} on rank {rank}, {expected.get(name)} on rank 0"
            for rank, found in enumerate(of_rank)
            for name in sorted(found.keys() | expected.keys())
            if found.get(name) != expected.get(name)
        ]
        if differing:
            more = [f"and {len(differing) - 8} more"] if len(differing) > 8 else []
            listed = "".join(f"\n  - {one}" for one in differing[:8] + more)
            raise SettingsError(
                f"the ranks of this run would not train the same thing:{listed}\nGive "
                "all ranks the same settings, code, packages and text"
            )

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values of all ranks, (ranks, …)."""
        gathered = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(gathered, values)
        return torch.stack(gathered)

    def largest(self, value: int) -> int:
        """The largest value of all ranks."""
        if self.count == 1:
            return value  # without a tensor: reading it would wait for the GPU
        return int(self.maximum(torch.tensor(value, device=self.device)))

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over ranks of each value, in place."""
        if self.count > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count
        return values

    def answer_within(self, seconds: float) -> None:
        """From now on the run ends if a rank keeps the others waiting for longer, in any of their groups."""
        for group in _world.pg_map if self.count > 1 else ():
            _set_pg_timeout(timedelta(seconds=seconds), group)

    @contextmanager
    def reporting_lost_ranks(self) -> Iterator[None]:
        """Turn a failed collective into LostRanks."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
                raise
            time.sleep(REPORT_DELAY_S)
            raise LostRanks(
                f"rank {self.rank} lost the other ranks: {str(error).splitlines()[0]}\n"
                "Either one of them died, which is reported here or above with the reason, or it kept the "
                f"others waiting for longer than hardware.timeout_s. {CONTINUES}"
            ) from error


def join(device: str) -> Ranks:
    """Join the ranks that torchrun or `start` started; a lone process joins none."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda":
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(local)
    else:
        local = torch.device("cpu")
        if count > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    if count > 1:
        # If a rank keeps the others waiting for too long NCCL ends them. By default it first dumps what they
        # were doing, which takes another minute (four times the time set here). Printing the Python stack in
        # that dump needs the interpreter lock, and deadlocks if the main thread holds it while its kernel
        # queue is full.
        if os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0") == "0":
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        file = os.environ.get(RENDEZVOUS_FILE)  # torchrun gives a network address instead
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            device_id=local if device == "cuda" else None,
            timeout=timedelta(seconds=STARTUP_TIMEOUT_S),
            store=dist.FileStore(file, count) if file else None,
            rank=rank,
            world_size=count,
        )
    return Ranks(rank, count, local)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """`join`, and leave the process group together at the end.

    Not after a failure, because leaving might wait for ranks that are gone. The process ends then.
    """
    ranks = join(device)
    try:
        yield ranks
    except Interrupted:  # raised by all ranks at the same step
        _leave(ranks)
        raise
    _leave(ranks)


def _leave(ranks: Ranks) -> None:
    if ranks.count > 1:
        ranks.answer_within(STARTUP_TIMEOUT_S)  # the main one may still send its curves to W&B
        ranks.barrier()  # one that leaves early would be taken for lost
        dist.destroy_process_group()


# ---------------------------------------------------------------------- starting the ranks of a machine
#
# They are the processes of torch.multiprocessing.spawn. They find each other through a file that only this
# user can read, and talk over the loopback device. A network port, as torchrun opens one, can be reached by
# every user and machine, and PyTorch unpickles what it reads from there. One process alone opens no socket at
# all. Several machines need torchrun.


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
