"""A run from its settings to finished weights: what it is built of, its steps, and the events after each."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch._inductor.config

from common.errors import TrainingError, explain
from sagebwd.kernels.cuda.compile import use_private_caches
from trainer import distributed, identity, interrupt, parallel, step
from trainer.checks import report_warmup
from trainer.estimate import check_disk, check_memory, report_memory
from trainer.events import AFTER_A_STEP, catch_up
from trainer.export import draw, export, model_card
from trainer.interrupt import StopRequest
from trainer.profiling import dump_memory, remember_allocations
from trainer.record import log_to
from trainer.run import Run
from trainer.run_directory import RunDirectory, read_metrics
from trainer.settings import Settings

log = logging.getLogger(__name__)


def train(settings: Settings) -> None:
    """Train one run to its end on this process's device; resume it if its directory holds a checkpoint.

    The settings have passed trainer.checks, and name a run_dir.
    Raises TrainingError for what the user can fix, LostRanks if another rank is gone, and Interrupted, with
    the state saved, on a signal of StopRequest.
    """
    make_deterministic(settings.hardware.deterministic)
    use_private_caches()  # where a cluster's launcher calls this, train.py has not
    with (
        interrupt.surviving_closed(),
        distributed.joined(settings.hardware.device) as ranks,
        StopRequest() as stop,  # outside: torchrun asks the ranks to stop while they report a lost one
        with_user_facing_errors(settings),
        ranks.reporting_lost_ranks(),
    ):
        if ranks.count > 1:
            ranks.compare(identity.of_rank(settings))
        estimate = check_memory(settings, ranks.count)
        directory = RunDirectory(Path(settings.run_dir))
        if distributed.under_torchrun() and ranks.from_main(lambda: directory.is_finished_with(settings)):
            if ranks.is_main:
                print(f"{directory.path} is finished; rerun_finished=true trains it again")
            return
        with directory.locked() if ranks.is_main else nullcontext():
            ranks.from_main(lambda: directory.open(settings))
            ranks.from_main(lambda: check_disk(settings))
            if ranks.is_main:
                directory.note_environment(ranks.device, ranks.count)
            log_to(directory.path / "log.txt" if ranks.is_main else None)
            report_memory(estimate)
            report_warmup(settings)
            if settings.profile.memory:
                remember_allocations(ranks.device)
            loop(Run(settings, directory, ranks, stop))


def loop(run: Run) -> None:
    """Train from `run.step` to the end of the plan."""
    try:
        run.stopwatch.start()
        if run.step:
            catch_up(run)
        while run.step < run.sizes.steps:
            values = step.train_step(run)
            run.step += 1
            for event in AFTER_A_STEP:
                event(run, values)
        run.checkpoints.wait()
        finish(run)
        run.ranks.barrier()
    finally:
        run.close()


def finish(run: Run) -> None:
    """Export the weights, draw the pictures, and mark the run finished."""
    records = run.ranks.from_main(lambda: read_metrics(run.directory.metrics))
    run.guard.check_end(run.step, records)
    weights = parallel.whole_weights(run.llama)
    if run.ranks.is_main:
        card = model_card(run.settings, run.directory, run.step, records)
        export(run.llama, weights, run.directory.weights, tokenizer=run.corpus.tokenizer, card=card)
        title = run.probe.backend.title if run.probe else "attention"
        draw(run.directory, records, alarm=run.settings.probe.alarm, title=title)
        run.directory.finish()
        log.info("finished: %s", run.directory.results())


def make_deterministic(deterministic: bool) -> None:
    """Choose whether PyTorch may use nondeterministic kernels. Call it before anything runs on the GPU."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts; 8 buffers of 4096 KiB
    torch.use_deterministic_algorithms(deterministic)
    # PyTorch would fill all new memory, to expose reads of uninitialized values. That costs 4% of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # The compiler must not choose by timing among kernels that round differently.
    torch._inductor.config.deterministic = deterministic


@contextmanager
def with_user_facing_errors(settings: Settings) -> Iterator[None]:
    """Turn a full disk and an out-of-memory GPU into TrainingErrors that name the fix."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{explain(error)}. Make room or correct the place; the same command then continues"
        ) from error
    except torch.OutOfMemoryError as error:
        micro_batch = settings.hardware.micro_batch
        rank = os.environ.get("RANK", "0")
        snapshot = RunDirectory(Path(settings.run_dir)).profile / f"out_of_memory_rank_{rank}.pickle"
        written = f". What it held, for pytorch.org/memory_viz: {snapshot}" if dump_memory(snapshot) else ""
        raise TrainingError(
            f"{str(error).split('.')[0]}, with hardware.micro_batch={micro_batch} sequences of "
            f"{settings.context} tokens. Use hardware.micro_batch={max(micro_batch // 2, 1)}: the tokens per "
            f"step, and so the training, stay the same{written}"
        ) from error
