"""One optimizer step."""

import math

import torch
from torch import Tensor

from trainer import parallel
from trainer.distributed import Ranks
from trainer.optimizer import learning_rate, set_learning_rate
from trainer.run import Run
from trainer.spikes import log_spike


def train_step(run: Run) -> dict[str, float]:
    """One optimizer step: `loss`, the mean over its tokens, `lr`, and `grad_norm` before clipping.

    The GPU is waited for once, and several ranks exchange one tensor in addition to the gradients.
    """
    settings, sizes = run.settings, run.sizes
    rate = learning_rate(
        run.step, steps=sizes.steps, warmup_steps=sizes.warmup_steps, settings=settings.optimizer
    )
    set_learning_rate(run.optimizer, rate)
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
        log_spike(spike, run.directory, {**place, "skipped": skip, "sequences": sequences})
    return spike is not None and skip
