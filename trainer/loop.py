"""A run from its settings to finished weights: its steps, and what follows each of them, in order."""

import logging
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

from common.errors import Interrupted, TrainingError, explain
from common.terminal import surviving_closed
from data.corpus import ValidationSet
from data.loader import Batch, stack_sequences
from model.config import flops_per_token
from model.generate import generate
from sagebwd.kernels.cuda.compile import use_private_caches
from trainer import distributed, identity, parallel, processes
from trainer.distributed import Ranks
from trainer.estimate import advise_smaller_batch, check_disk, check_memory
from trainer.export import draw, export, model_card
from trainer.processes import StopRequest
from trainer.record import log_to
from trainer.run import Run, validation_batches
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
        directory = TrainingDirectory(Path(settings.run_dir))
        if processes.under_torchrun() and ranks.from_main(lambda: directory.is_finished_with(settings)):
            if ranks.is_main:
                print(f"{directory.path} is finished; delete it to train it again")
            return
        with directory.locked() if ranks.is_main else nullcontext():
            ranks.from_main(lambda: directory.open(settings))
            ranks.from_main(lambda: check_disk(settings))
            if ranks.is_main:
                directory.note_environment(ranks.device, ranks.count)
            log_to(directory.path / "log.txt" if ranks.is_main else None)
            check_memory(settings, ranks.count)
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
        folder = run.directory.path
        sample = f"python -m scripts.sample {shlex.quote(str(folder))} lets the model write"
        log.info("finished: %s\n  %s", folder, sample)


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
        snapshot = Path(settings.run_dir, f"out_of_memory_rank_{ranks.rank}.pickle")
        written = f". What it held, for pytorch.org/memory_viz: {snapshot}" if dump_memory(snapshot) else ""
        smaller = advise_smaller_batch(settings, ranks.count)
        raise TrainingError(f"{str(error).split('.')[0]}, {smaller}{written}") from error


def dump_memory(path: Path) -> bool:
    """Write what is in the memory of the GPU; whether that was possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # `locked` removes the folder of a run without a step
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError, AssertionError) as error:  # another error is to be told
        log.warning("the memory's contents could not be written to %s: %s", path, error)
        return False
    return True


# ---------------------------------------------------------------------- what may be due after a step
#
# Each is called after every step, on all ranks, and knows itself whether it is due. values: `loss`, `lr` and
# `grad_norm` of the step, and what callbacks add.

COMPARE_EVERY = 100  # steps after which ranks compare their copies of the weights


def reserve_memory(run: Run, values: dict[str, Any]) -> None:
    """After the first step of a process, when everything is prepared and compiled."""
    if run.step == run.first_step + 1:
        with run.stopwatch.paused():
            run.checkpoints.reserve(run.llama, run.optimizer)
        run.ranks.answer_within(run.settings.hardware.timeout_s)


def call_callbacks(run: Run, values: dict[str, Any]) -> None:
    run.call("on_step", run.step, values)


def write_log(run: Run, values: dict[str, Any]) -> None:
    if run.step % run.settings.log_every == 0 or run.step in (1, run.sizes.steps):
        _write_step(run, values)
        run.logged_step = run.step
    if run.record:
        run.record.advance()


def _write_step(run: Run, values: dict[str, Any]) -> None:
    seconds = run.stopwatch.take()
    if not run.record:
        return
    settings = run.settings
    tokens_per_second = (run.step - run.logged_step) * run.sizes.tokens_per_step / seconds
    mfu = None
    if run.peak:
        flops = tokens_per_second * flops_per_token(settings.model, settings.context)
        mfu = flops / (run.peak * 1e12 * run.ranks.count)
    speed = {"tokens_per_second": tokens_per_second, "mfu": mfu, "peak_memory_gib": _peak_memory_gib(run)}
    run.record.write({"step": run.step, "tokens": run.tokens, **values, **speed})
    run.record.progress(values["loss"], tokens_per_second, mfu)


def _peak_memory_gib(run: Run) -> float | None:
    """Of tensors on this GPU so far; None on a CPU.

    That count leaves out the memory of CUDA graphs. With them this is all that PyTorch reserved, used or not.
    """
    if run.ranks.device.type != "cuda":
        return None
    with_graphs = run.settings.hardware.cuda_graphs
    peak = torch.cuda.max_memory_reserved if with_graphs else torch.cuda.max_memory_allocated
    return peak(run.ranks.device) / 2**30


def save(run: Run, values: dict[str, Any]) -> None:
    """A checkpoint; at the last step, too, which is a multiple of the run's length."""
    steps = run.sizes.steps
    saves = (run.settings.checkpoint_every, run.settings.milestone_every or steps, steps)
    if any(run.step % every == 0 for every in saves):
        with run.stopwatch.paused():
            run.save()


def compare_copies(run: Run, values: dict[str, Any]) -> None:
    """Of the weights on all ranks, unless saving did."""
    if run.step % COMPARE_EVERY == 0 and run.saved_step != run.step:
        with run.stopwatch.paused():
            run.guard.check_copies(run.step)


def stop_if_asked(run: Run, values: dict[str, Any]) -> None:
    """Save and raise Interrupted if any rank was asked to stop.

    One rank stops at the end of the step. Several agree on it in their next exchange, a step later at most.
    """
    asked = run.stop_asked if run.ranks.count > 1 else run.stop.signal is not None
    if asked and run.step < run.sizes.steps:
        signal = run.ranks.largest(run.stop.signal or 0)
        if run.saved_step != run.step:
            run.save()
        run.checkpoints.wait()
        raise Interrupted(
            f"stopped at step {run.step} of {run.sizes.steps} and saved; the same command continues", signal
        )


def measure_attention(run: Run, values: dict[str, Any]) -> None:
    """The probe, with the current weights, on the first sequences of the step just done."""
    if run.probe and run.step % run.settings.probe.every == 0:
        with run.stopwatch.paused():
            _measure_attention(run)


def _measure_attention(run: Run) -> None:
    indices = run.loader.sequence_indices(run.step - 1)[: run.settings.probe.sequences]
    tokens, context, separator = run.loader.tokens, run.settings.context, run.loader.separator
    batch = map(run.to_device, stack_sequences(tokens, indices, context, separator=separator))
    with parallel.uncompiled():
        values = run.probe.measure(*batch, autocast=run.autocast, is_main=run.ranks.is_main)
    if run.record:
        run.record.write({"step": run.step, "tokens": run.tokens, **values})
        for warning in run.probe.warnings(run.step, values):
            log.warning(warning)


def evaluate(run: Run, values: dict[str, Any]) -> None:
    """Loss on the first `eval_sequences` sequences of each validation set, and a sample."""
    if run.step % run.settings.eval_every == 0 or run.step == run.sizes.steps:
        with run.stopwatch.paused():
            _evaluate(run)


def _evaluate(run: Run) -> None:
    settings, ranks = run.settings, run.ranks
    sharded = settings.hardware.is_sharded(settings.model, ranks.count)
    losses = [
        validation_loss(
            run.compiled,
            validation_batches(run, one),
            micro_batch=run.sizes.micro_batch,
            ranks=ranks,
            autocast=run.autocast,
            in_step=sharded,
        )
        for one in run.corpus.validation
    ]
    # All ranks of a sharded model take part in generating each token.
    sample = _sample(run) if settings.sample_tokens and (ranks.is_main or sharded) else None
    values = validation_record(run.corpus.validation, losses, run.bytes_per_token)
    values["sample"] = sample
    with torch.no_grad(), run.autocast():
        run.call("on_evaluate", run.step, values)
    if run.record:
        run.record.write({"step": run.step, "tokens": run.tokens, **values})
        log.info("step %d: %s%s", run.step, described(values), f"\n  | {sample!r}" if sample else "")


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    micro_batch: int,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager],
    in_step: bool = False,
) -> float:
    """Mean cross-entropy per token, in nats, over the batches of all ranks.

    `batches` are this rank's, on its device. Only full batches of micro_batch sequences
    use the compiled model, which would be compiled again for any other size. in_step: every rank calls the
    model equally often, as a sharded model requires, although some ranks have a batch less.
    """
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # summed loss, tokens
    batches = list(batches)
    idle_rounds = ranks.largest(len(batches)) - len(batches) if in_step else 0
    for batch in batches:
        sequences, tokens = len(batch[0]), batch[0].numel()
        with autocast(), nullcontext() if sequences == micro_batch else parallel.uncompiled():
            loss = model(*batch)
        total += torch.stack([loss.double() * tokens, total.new_tensor(tokens)])
    for _ in range(idle_rounds):
        with autocast(), parallel.uncompiled():
            model(torch.zeros(1, 1, dtype=torch.int64, device=ranks.device))
    summed, tokens = ranks.mean(total).tolist()
    return summed / tokens


def validation_record(
    sets: Sequence[ValidationSet], losses: Sequence[float], bytes_of: Sequence[float]
) -> dict[str, float]:
    """What is logged of a validation: losses in nats per token, and bits per byte of text.

    `val_loss` is the mean over the sets by their weights, in bits per byte that of text in which their tokens
    have these weights. Sets that have a name follow under it. bytes_of: `bytes_per_token`; a text without
    bytes gives NaN.
    """
    loss = sum(one.weight * value for one, value in zip(sets, losses, strict=True))
    size = sum(one.weight * value for one, value in zip(sets, bytes_of, strict=True))
    record = {"val_loss": loss, "val_bits_per_byte": _bits_per_byte(loss, size)}
    for one, value, its_bytes in zip(sets, losses, bytes_of, strict=True):
        if one.name is not None:
            record[f"val_loss/{one.name}"] = value
            record[f"val_bits_per_byte/{one.name}"] = _bits_per_byte(value, its_bytes)
    return record


def described(record: dict[str, float]) -> str:
    """A validation_record as a line for people."""
    text = f"validation loss {record['val_loss']:.4f}, {record['val_bits_per_byte']:.4f} bits per byte"
    names = [key.removeprefix("val_loss/") for key in record if key.startswith("val_loss/")]
    for name in names:
        text += f"; {name} {record[f'val_loss/{name}']:.4f}, {record[f'val_bits_per_byte/{name}']:.4f}"
    return text


def _bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token if bytes_per_token else math.nan


def _sample(run: Run) -> str:
    prompt = torch.tensor([run.prompt], device=run.ranks.device)
    with run.autocast(), parallel.uncompiled():
        tokens = generate(
            run.llama,
            prompt,
            run.settings.sample_tokens,
            vocab_size=run.corpus.tokenizer.vocab_size,
            seed=run.settings.seed,
        )
    return run.corpus.tokenizer.decode(tokens[0].tolist())


#: What measures comes after the checkpoint, so that whatever fails there loses no step.
AFTER_A_STEP = (
    reserve_memory,
    call_callbacks,
    write_log,
    save,
    compare_copies,
    stop_if_asked,
    measure_attention,
    evaluate,
)


def catch_up(run: Run) -> None:
    """Of a run that resumes: measure what was due at its checkpoint's step and is not recorded."""
    run.guard.check_copies(run.step)
    records = run.ranks.from_main(run.directory.records)
    done = {key for one in records if one["step"] == run.step for key in one}
    for event, key in ((measure_attention, "probe/seconds"), (evaluate, "val_loss")):
        if key not in done:
            event(run, {})
