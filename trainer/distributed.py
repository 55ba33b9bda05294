"""Processes of a run: who am I, start several, combine their numbers."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.errors import Interrupted, LostRanks, SettingsError, TrainingError
from trainer.interrupt import PassedOn

log = logging.getLogger(__name__)

T = TypeVar("T")

# Until the first step is done ranks may wait long for each other: one prepares the data, and compiling takes
# each its own time. A rank that dies meanwhile is noticed all the same, by the process that started it.
STARTUP_TIMEOUT_S = 4 * 3600.0

# A rank that lost the others waits so long before it says so: the one that died is then the first failure
# that the starting process sees, and the one it reports.
LET_THE_CAUSE_BE_SEEN_S = 3.0

# A rank that lost its neighbour ends so much later, if it has not noticed by itself: NCCL waits for ever.
NOTICE_WITHIN_S = 10.0

CONTINUES = "The same command continues from the newest checkpoint"


@dataclass(frozen=True)
class Ranks:
    """This process among all of the run's."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier()

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make()` gives on the main rank, on every rank."""
        if self.count == 1:
            return make()
        box = [make() if self.is_main else None]
        dist.broadcast_object_list(box)
        return cast(T, box[0])

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
        """From now on a rank that keeps the others waiting for longer ends the run."""
        if self.count > 1:
            _set_pg_timeout(timedelta(seconds=seconds))

    @contextmanager
    def reporting_lost_ranks(self) -> Iterator[None]:
        """Turn a failed exchange with the other ranks into LostRanks."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
                raise
            time.sleep(LET_THE_CAUSE_BE_SEEN_S)
            raise LostRanks(
                f"rank {self.rank} lost the other ranks: {str(error).splitlines()[0]}\n"
                "One of them died, and is named here or above with the reason, or it kept the others waiting "
                f"for longer than hardware.timeout_s. {CONTINUES}"
            ) from error


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(device: str) -> Ranks:
    """Join the process group that torchrun or `start` set up; a lone process needs none."""
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda":
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(local)
    else:
        local = torch.device("cpu")
        if count > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    if count > 1:
        # When a rank keeps the others waiting for too long NCCL ends them. Writing down first what they were
        # doing, which nobody asked for, would take another minute: it waits four times the time set here.
        # And to print the Python stack that it recorded it would wait for the interpreter: for ever, if the
        # main thread holds that while its queue of kernels is full.
        if os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0") == "0":
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            device_id=local if device == "cuda" else None,
            timeout=timedelta(seconds=STARTUP_TIMEOUT_S),
        )
    return Ranks(rank, count, local)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """`join`, and leave the process group together at the end.

    After a failure leaving might wait for ranks that are gone: the process is to end, which leaves as well.
    """
    ranks = join(device)
    neighbours = _Neighbours(ranks) if ranks.count > 1 else None
    try:
        yield ranks
    except Interrupted:  # raised by all ranks at the same step
        _leave(neighbours)
        raise
    except BaseException:
        if neighbours:
            neighbours.let_go()
        raise
    _leave(neighbours)


def _leave(neighbours: "_Neighbours | None") -> None:
    if neighbours:
        neighbours.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


class _Neighbours:
    """Ends this process when the rank after it dies, whatever its own main thread waits for.

    A thread receives from that rank, over TCP, what it only sends when it leaves. When the rank dies instead,
    the connection breaks. Without this a rank on a GPU would wait for the dead one until it is killed.
    """

    def __init__(self, ranks: Ranks):
        self.next, self.previous = (ranks.rank + 1) % ranks.count, (ranks.rank - 1) % ranks.count
        self.ending = False  # of this rank's own accord
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self.thread = threading.Thread(target=self._watch, name="neighbours", daemon=True)
        self.thread.start()

    def leave(self) -> None:
        """Say good-bye, and wait for the neighbour's."""
        dist.send(torch.zeros(1), self.previous, group=self.group)
        self.thread.join()

    def let_go(self) -> None:
        """This rank is ending with an error of its own, and may take its time."""
        self.ending = True

    def _watch(self) -> None:
        try:
            dist.recv(torch.zeros(1), self.next, group=self.group)
        except RuntimeError:
            time.sleep(NOTICE_WITHIN_S)
            if self.ending:
                return
            log.error("rank %d died, and this one cannot go on without it. %s", self.next, CONTINUES)
            os._exit(1)


def start(work: Callable[..., None], *arguments: object, processes: int) -> None:
    """Run `work(*arguments)` in `processes` fresh processes of this machine and wait for all.

    When one fails the others are stopped, those that do not react within 30 s by SIGKILL. Raises
    TrainingError with the first failure's message, and Interrupted when the processes were asked to stop.
    """
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        # The launcher would kill the processes 30 s after a signal it handles, saved or not; PassedOn lets
        # them finish. Not handling SIGHUP either lets nohup have its way.
        signals_to_handle="SIGQUIT",
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the message is raised below
    with PassedOn() as stop:
        try:
            stopped = next(filter(None, elastic_launch(launch, _worker)(work, *arguments).values()), None)
        except SignalException as quit:
            raise Interrupted(f"ended by SIGQUIT. {CONTINUES}", quit.sigval) from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if stop.signal and failure.exitcode in (-stop.signal, -signal.SIGTERM):
                raise Interrupted(f"stopped before its first step. {CONTINUES}", stop.signal) from None
            raise TrainingError(_message(rank, failure)) from None
    if stopped and stop.signal:
        stop.hand_on()
        raise Interrupted(stopped.message, stop.signal)
    if stopped:
        raise stopped


@record  # keeps the error of a process for the one that started it
def _worker(work: Callable[..., None], *arguments: object) -> Interrupted | None:
    """Being asked to stop is a result, not a failure upon which the launcher would kill the other ranks."""
    try:
        work(*arguments)
    except Interrupted as stop:
        return stop
    return None


def _message(rank: int, failure: ProcessFailure) -> str:
    """What the process said: of an error meant for the user its message, of any other its traceback too."""
    if not isinstance(failure.message, dict):
        return f"rank {rank} {_death(failure)}. {CONTINUES}"
    name, _, text = failure.message["message"].partition(": ")
    if name in {kind.__name__ for kind in (TrainingError, SettingsError, LostRanks)}:
        return text
    return f"{failure.message['extraInfo']['py_callstack']}\nrank {rank} failed: {name}: {text}\n{CONTINUES}"


def _death(failure: ProcessFailure) -> str:
    """How a process ended that could say nothing itself."""
    if failure.exitcode > 0:
        return f"(process {failure.pid}) ended with exit code {failure.exitcode}"
    hints = {
        "SIGKILL": ": the kernel does that when memory runs out (dmesg tells), a cluster to end a job",
        "SIGABRT": ": NCCL does that when another rank keeps it waiting for longer than hardware.timeout_s",
    }
    name = failure.signal_name()
    return f"(process {failure.pid}) was ended by {name}{hints.get(name, '')}"
