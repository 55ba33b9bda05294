"""What may be due after a step, in the order in which it happens.

Each is called after every step, on all ranks, and knows itself whether it is due. values: `loss`, `lr` and
`grad_norm` of the step, and what callbacks add.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from common.errors import Interrupted
from data.corpus import ValidationSet
from data.loader import Batch, stack_sequences
from model.config import flops_per_token
from model.generate import generate
from trainer import parallel
from trainer.distributed import Ranks
from trainer.machine import peak_memory_gib
from trainer.run import Run

log = logging.getLogger(__name__)

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
    memory = peak_memory_gib(run.ranks.device, cuda_graphs=settings.hardware.cuda_graphs)
    speed = {"tokens_per_second": tokens_per_second, "mfu": mfu, "peak_memory_gib": memory}
    run.record.write({"step": run.step, "tokens": run.tokens, **values, **speed})
    run.record.progress(values["loss"], tokens_per_second, mfu)


def write_profile(run: Run, values: dict[str, Any]) -> None:
    if run.profiler and run.profiler.advance():
        with run.stopwatch.paused():
            run.profiler.write(run.step)


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
        for warning in run.alarm.warnings(run.step, values, run.probe.layers):
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
            run.validation_batches(one),
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
    write_profile,
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
