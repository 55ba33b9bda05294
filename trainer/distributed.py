"""Processes of a run: who am I, start several, combine their numbers."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.errors import Interrupted, TrainingError

T = TypeVar("T")


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

    def any(self, value: int) -> int:
        """The largest value of all ranks: not zero if any is not."""
        if self.count == 1:
            return value
        largest = torch.tensor(value, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count
        return values


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
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", device_id=local if device == "cuda" else None
        )
    return Ranks(rank, count, local)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def start(work: Callable[..., None], *arguments: object, processes: int) -> None:
    """Run `work(*arguments)` in `processes` fresh processes of this machine and wait for all.

    When one fails the others are stopped. Raises TrainingError with the first failure's message, and
    Interrupted when this process was asked to stop.
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
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the message is raised below
    try:
        elastic_launch(launch, _worker)(work, *arguments)
    except SignalException as stop:  # passed on to the processes, which have saved
        raise Interrupted("stopped and saved; the same command continues", stop.sigval) from None
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        raise TrainingError(_message(first)) from None


@record  # keeps the error of a process for the one that started it
def _worker(work: Callable[..., None], *arguments: object) -> None:
    work(*arguments)


def _message(failure: ProcessFailure) -> str:
    """What the process said: of an error meant for the user its message, of any other its traceback too."""
    if not isinstance(failure.message, dict):
        return failure.message  # it was killed
    name, _, text = failure.message["message"].partition(": ")
    if name == TrainingError.__name__:
        return text
    return f"{failure.message['extraInfo']['py_callstack']}\n{name}: {text}"
