"""torch.profiler around a few steps: a trace to look at, and a table of the most expensive operators.

And what was in the memory of a GPU when it ran out.
"""

import logging
from contextlib import suppress
from pathlib import Path

import torch.profiler
from torch.profiler import ProfilerActivity

from trainer.distributed import Ranks
from trainer.settings import ProfileSettings

log = logging.getLogger(__name__)

ROWS = 25  # operators in the table
ALLOCATIONS = 100_000  # the newest ones, whose places in the code are remembered


def remember_allocations(device: torch.device) -> None:
    """From now on remember where in Python each tensor on the GPU was allocated."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=ALLOCATIONS)


def dump_memory(path: Path) -> bool:
    """Write what is in the memory of the GPU, and where it was allocated; whether that was possible."""
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError, AssertionError) as error:  # another error is to be told
        log.warning("the memory's contents could not be written to %s: %s", path, error)
        return False
    return True


class StepProfiler:
    """Records `settings.steps` steps, after `settings.start` others of this process, on every rank.

    The first steps of a process compile and allocate, so they are left out; the last of these warms the
    profiler up.
    """

    def __init__(self, settings: ProfileSettings, folder: Path, ranks: Ranks):
        self._settings, self._folder, self._ranks = settings, folder, ranks
        self._on_gpu = ranks.device.type == "cuda"
        self._steps_left = settings.start + settings.steps
        self._profiler: torch.profiler.profile | None = torch.profiler.profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu,
            schedule=torch.profiler.schedule(
                wait=settings.start - 1, warmup=1, active=settings.steps, repeat=1
            ),
            acc_events=True,  # there is one cycle; without it torch warns that later ones clear its events
        )
        self._profiler.start()

    def advance(self) -> bool:
        """After each step: whether it was the last to be recorded, so that `write` is due."""
        if self._profiler is None:
            return False
        self._steps_left -= 1
        if self._steps_left:
            self._profiler.step()
        return not self._steps_left

    def write(self, step: int) -> None:
        """Write the files of this rank to `folder`; `step` (counted from 1) is the last that was recorded."""
        finished, self._profiler = self._profiler, None
        finished.stop()
        name = f"steps_{step - self._settings.steps + 1}-{step}_rank_{self._ranks.rank}"
        trace, table = self._folder / f"{name}.json.gz", self._folder / f"{name}.txt"
        order = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        try:
            self._folder.mkdir(exist_ok=True)
            finished.export_chrome_trace(str(trace))
            table.write_text(finished.key_averages().table(sort_by=order, row_limit=ROWS) + "\n")
        except (OSError, RuntimeError) as error:  # a profile must not end a training run
            log.warning("profile: could not be written to %s: %s", self._folder, error)
        else:
            log.info("profile: %s (for ui.perfetto.dev) and %s", trace, table.name)

    def close(self) -> None:
        """Stop recording. A profile that is not complete is not written."""
        if self._profiler is not None:
            log.warning("profile: not written, training ended %d step(s) too early", self._steps_left)
            with suppress(RuntimeError):  # of a GPU that failed, for example, which is reported elsewhere
                self._profiler.stop()
            self._profiler = None
