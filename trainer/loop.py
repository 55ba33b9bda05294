"""A run from its settings to finished weights: what it is built of, its steps, and the events after each."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch._inductor.config
from torch import Tensor

from common.errors import TrainingError, explain
from common.terminal import surviving_closed
from sagebwd.kernels.cuda.compile import use_private_caches
from trainer import distributed, identity, parallel, processes
from trainer.checks import sizes_of
from trainer.distributed import Ranks
from trainer.estimate import check_disk, check_memory, report_memory
from trainer.events import AFTER_A_STEP, catch_up
from trainer.export import draw, export, model_card
from trainer.machine import dump_memory, remember_allocations
from trainer.processes import StopRequest
from trainer.record import log_to
from trainer.run import Run
from trainer.settings import Settings
from trainer.start import TrainingDirectory

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
        surviving_closed(),
        distributed.joined(settings.hardware.device) as ranks,
        StopRequest() as stop,  # outside: torchrun asks the ranks to stop while they report a lost one
        with_user_facing_errors(settings, ranks),
        ranks.reporting_lost_ranks(),
    ):
        if ranks.count > 1:
            ranks.compare(identity.of_rank(settings))
        estimate = check_memory(settings, ranks.count)
        directory = TrainingDirectory(Path(settings.run_dir))
        if processes.under_torchrun() and ranks.from_main(lambda: directory.is_finished_with(settings)):
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
            values = train_step(run)
            run.step += 1
            for event in AFTER_A_STEP:
                event(run, values)
        run.checkpoints.wait()
        finish(run)
        run.ranks.barrier()
    finally:
        run.close()


def train_step(run: Run) -> dict[str, float]:
    """One optimizer step: `loss`, the mean over its tokens, `lr`, and `grad_norm` before clipping.

    The GPU is waited for once, and several ranks exchange one tensor in addition to the gradients.
    """
    settings, sizes = run.settings, run.sizes
    rate = run.set_learning_rate()
    parallel.expect_gradients(run.llama, settings.hardware)
    loss = torch.zeros((), device=run.ranks.device)
    for micro_step, batch in enumerate(run.loader.micro_batches(run.step)):
        last = micro_step == sizes.micro_steps - 1
        with parallel.gradients_exchanged(run.wrapped, last), run.sharing_tokens() as own:
            with run.autocast():
                micro_loss = run.compiled(*own(*map(run.to_device, batch))) / sizes.micro_steps
            micro_loss.backward()
        loss += micro_loss.detach()
    grad_norm = parallel.clip_gradients(run.llama, settings.optimizer.grad_clip)
    mean_loss, norm, stop, writing, failed = _exchange(
        run.ranks, loss, grad_norm, run.stop.signal is not None, *run.checkpoints.status()
    )
    run.stop_asked = stop > 0  # on any rank: all come to the same conclusion
    if not (math.isfinite(mean_loss) and math.isfinite(norm)):
        run.guard.check_step(
            run.step + 1,
            f"loss {mean_loss}, gradient norm {norm}, learning rate {rate:.3g}",
            run.loader.sequence_indices(run.step),
            skip=settings.skip_nonfinite,
        )
    elif not _skips_spike(run, mean_loss, norm):
        run.optimizer.step()
    parallel.forget_gradients(run.optimizer, settings.hardware)
    run.checkpoints.poll(writing=writing > 0, failed=failed > 0)  # not before: it may call a callback
    return {"loss": mean_loss, "lr": rate, "grad_norm": norm}


def _exchange(ranks: Ranks, loss: Tensor, grad_norm: Tensor, *flags: bool) -> list[float]:
    """[mean loss over ranks, grad_norm (equal on all ranks), mean of each flag over ranks]."""
    # Filled on the device: copying the flags from the host would wait for the GPU once more.
    values = torch.stack([loss, *(torch.full_like(loss, float(flag)) for flag in flags)])
    mean_loss, *means = ranks.mean(values)
    return torch.stack([mean_loss, grad_norm, *means]).tolist()  # the step's only wait


def _skips_spike(run: Run, loss: float, grad_norm: float) -> bool:
    """Report a step with an outlier loss or gradient norm; return whether its optimizer step is skipped.

    All ranks return the same, because both values are equal on all ranks.
    """
    spike, skip = run.spikes.judge(loss, grad_norm), run.settings.spike.skip
    if spike and run.ranks.is_main:
        step, sequences = run.step + 1, run.loader.sequence_indices(run.step).tolist()
        place = {"step": step, "tokens": step * run.sizes.tokens_per_step}
        spike.log(run.directory.spikes, {**place, "skipped": skip, "sequences": sequences})
    return spike is not None and skip


def finish(run: Run) -> None:
    """Export the weights, draw the pictures, and mark the run finished."""
    records = run.ranks.from_main(run.directory.records)
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
def with_user_facing_errors(settings: Settings, ranks: Ranks) -> Iterator[None]:
    """Turn a full disk and an out-of-memory GPU into TrainingErrors that name the fix."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{explain(error)}. Make room or correct the place; the same command then continues"
        ) from error
    except torch.OutOfMemoryError as error:
        micro_batch = sizes_of(settings, ranks.count).micro_batch
        snapshot = Path(settings.run_dir, "profile", f"out_of_memory_rank_{ranks.rank}.pickle")
        written = f". What it held, for pytorch.org/memory_viz: {snapshot}" if dump_memory(snapshot) else ""
        raise TrainingError(
            f"{str(error).split('.')[0]}, with hardware.micro_batch={micro_batch} sequences of "
            f"{settings.context} tokens. Use hardware.micro_batch={max(micro_batch // 2, 1)}: the tokens per "
            f"step, and so the training, stay the same{written}"
        ) from error
