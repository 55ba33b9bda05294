"""The processes of a run: know which one this is, join the others, combine their values."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from common.errors import Interrupted, LostRanks, SettingsError, TrainingError

T = TypeVar("T")

# Until the first step is done ranks may wait long for each other: one prepares the data, and compile times
# differ. The process that started the ranks of a machine notices if one of them dies meanwhile.
STARTUP_TIMEOUT_S = 4 * 3600.0

# A rank that lost the others reports it after this delay, so that the starting process sees the rank that
# died first and reports that failure.
REPORT_DELAY_S = 3.0

# Environment variable: the file through which ranks find each other that trainer.launch started.
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


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(device: str) -> Ranks:
    """Join the ranks that torchrun or trainer.launch started; a lone process joins none."""
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
