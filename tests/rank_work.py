"""What the ranks of a test do."""

import time
from pathlib import Path

import torch.distributed as dist

from common.errors import Interrupted
from trainer import distributed
from trainer.processes import StopRequest


def fail_on_rank_1() -> None:
    with distributed.joined("cpu") as ranks:
        if ranks.rank == 1:
            raise KeyError("no such thing")
        with ranks.reporting_lost_ranks():
            ranks.barrier()


def hang_on_rank_1(own_group: bool) -> None:
    with distributed.joined("cpu") as ranks:
        group = dist.new_group(backend="gloo") if own_group else None
        dist.barrier(group)
        ranks.answer_within(1)
        if ranks.rank == 1:
            time.sleep(600)
        with ranks.reporting_lost_ranks():
            dist.barrier(group)


def save_when_asked(started: Path) -> None:
    with distributed.joined("cpu") as ranks, StopRequest() as stop:
        (started / str(ranks.rank)).touch()
        while not ranks.largest(stop.signal or 0):
            time.sleep(0.01)
        (started / f"{ranks.rank}_saved").touch()
        raise Interrupted("saved", ranks.largest(stop.signal or 0))
