"""The training loop, from settings to finished weights."""

import functools
import logging
import math
import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

import model.config
import model.huggingface
from data.loader import evaluation_batches, stack_sequences
from model.config import flops_per_token
from model.generate import generate
from sagebwd.kernels.cuda.compile import use_private_caches
from trainer import build, distributed, identity, interrupt, parallel, start
from trainer.callbacks import Callbacks
from trainer.checkpoint import Checkpoints
from trainer.checks import report_warmup, sizes_of
from trainer.distributed import Ranks, is_sharded
from trainer.divergence import Guard, check_copies
from trainer.errors import Interrupted, TrainingError, explain, user_facing
from trainer.estimate import check_disk, check_memory, report_memory
from trainer.evaluate import bytes_per_token, described, validation_loss, validation_record
from trainer.export import draw, export, model_card
from trainer.interrupt import StopRequest
from trainer.machine import peak_memory_gib, peak_tflops
from trainer.optimizer import build_optimizer, learning_rate, set_learning_rate
from trainer.probe import Alarm, Probe, build_probe
from trainer.profiling import StepProfiler, dump_memory, remember_allocations
from trainer.record import Record, Stopwatch, TensorBoard, log_to, start_wandb, warn_of_holes
from trainer.run_directory import RunDirectory, read_metrics
from trainer.settings import Settings
from trainer.spikes import SpikeDetector, log_spike

log = logging.getLogger(__name__)

COMPARE_EVERY = 100  # steps after which ranks compare their copies of the weights


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
            Trainer(settings, directory, ranks, stop).run()


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


class Trainer:
    """One run on one rank. `step` is the number of optimizer steps done."""

    def __init__(self, settings: Settings, directory: RunDirectory, ranks: Ranks, stop: StopRequest):
        self.settings, self.directory, self.ranks, self.stop = settings, directory, ranks, stop
        self.sizes = sizes_of(settings, ranks.count)
        weights = start.find_weights(settings, directory)
        self.branch = ranks.from_main(lambda: start.find_branch(settings, directory))
        self.corpus = build.open_text(settings, ranks, stop)
        if ranks.is_main:
            stop.announce()
        self.prompt = build.encode_prompt(settings, self.corpus.tokenizer)
        self.loader = build.make_loader(settings, self.sizes, self.corpus, ranks)
        self.backend = build.attention(settings, ranks)
        self.llama = build.llama(settings, self.sizes, self.backend, ranks)
        if weights:
            with user_facing(ValueError, OSError):
                model.huggingface.load_into(self.llama, weights)
            check_copies(self.llama, ranks, step=0)
            log.info("starting from the weights in %s", weights)
        self.wrapped, self.compiled = parallel.place(
            self.llama, settings.hardware, ranks, saved_operators=self.backend.saved_operators
        )
        self.sharing_tokens = parallel.sharing_tokens(self.llama, settings.hardware, ranks)
        self.optimizer = build_optimizer(self.llama, settings.optimizer)
        self.callbacks = Callbacks(settings.callbacks)
        self.guard = Guard(self.llama, self.optimizer, ranks, directory)
        self.checkpoints = Checkpoints(
            directory.checkpoints,
            ranks=ranks,
            keep=settings.keep_checkpoints,
            milestone_every=settings.milestone_every,
            background=settings.checkpoint_background,
            published=directory.note_checkpoint,
            completed=self._on_checkpoint,
        )
        restored = self._restore()
        self.step: int = restored.get("step", 0)
        self.saved_step = self.step
        self.spikes = SpikeDetector(settings.spike, restored.get("recent", ()))
        self.probe = build_probe(
            settings, self.llama, self.backend, device=ranks.device, dtype=build.dtype_of(settings)
        )
        self.alarm = Alarm(settings.probe.alarm, self.probe)
        self.stop_asked = False
        self.stopwatch = Stopwatch(ranks.device)
        self.peak = settings.hardware.peak_tflops or peak_tflops(ranks.device)
        self.record = self._start_record(restored.get("wandb_id")) if ranks.is_main else None
        profile = settings.profile
        self.profiler = StepProfiler(profile, directory.profile, ranks) if profile.steps else None

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        """Train from `self.step` to the end of the plan."""
        settings, sizes = self.settings, self.sizes
        try:
            self.stopwatch.start()
            if self.step:
                check_copies(self.llama, self.ranks, self.step)
                records = self.ranks.from_main(lambda: read_metrics(self.directory.metrics))
                self._measure({key for one in records if one["step"] == self.step for key in one})
            steps_timed, first_step = 0, True
            while self.step < sizes.steps:
                loss, grad_norm, rate = self._train_step()
                self.step += 1
                steps_timed += 1
                if first_step:  # of this process: everything is prepared and compiled now
                    with self._off_the_clock():
                        self.checkpoints.reserve(self.llama, self.optimizer)
                    self.ranks.answer_within(settings.hardware.timeout_s)
                    first_step = False
                values = {"loss": loss, "lr": rate, "grad_norm": grad_norm}
                if self.callbacks:
                    with self._off_the_clock():
                        self.callbacks.call("on_step", self.step, values, self.llama)
                last = self.step == sizes.steps
                if self.step % settings.log_every == 0 or last or self.step == 1:
                    self._log(values, steps_timed)
                    steps_timed = 0
                if self.record:
                    self.record.advance()
                if self.profiler and self.profiler.advance():
                    with self._off_the_clock():
                        self.profiler.write(self.step)
                # The last step of the run is a multiple of its length.
                saves = (settings.checkpoint_every, settings.milestone_every or sizes.steps, sizes.steps)
                if any(self.step % every == 0 for every in saves):
                    with self._off_the_clock():
                        self._save()
                elif self.step % COMPARE_EVERY == 0:
                    with self._off_the_clock():
                        check_copies(self.llama, self.ranks, self.step)
                self._stop_if_asked()
                self._measure()
            self.checkpoints.wait()
            self._finish()
            self.ranks.barrier()
        finally:
            if self.profiler:
                self.profiler.close()
            self.checkpoints.close()
            if self.record:
                self.record.close()

    def _train_step(self) -> tuple[float, float, float]:
        """One optimizer step: mean loss over its tokens, gradient norm before clipping, learning rate.

        The GPU is waited for once, and several ranks exchange one tensor in addition to the gradients.
        """
        settings, sizes = self.settings, self.sizes
        rate = learning_rate(
            self.step, steps=sizes.steps, warmup_steps=sizes.warmup_steps, settings=settings.optimizer
        )
        set_learning_rate(self.optimizer, rate)
        parallel.expect_gradients(self.llama, settings.hardware)
        loss = torch.zeros((), device=self.ranks.device)
        for micro_step, batch in enumerate(self.loader.micro_batches(self.step)):
            last = micro_step == sizes.micro_steps - 1
            with parallel.gradients_exchanged(self.wrapped, last), self.sharing_tokens() as own:
                with self._autocast():
                    micro_loss = self.compiled(*own(*map(self._to_device, batch))) / sizes.micro_steps
                micro_loss.backward()
            loss += micro_loss.detach()
        grad_norm = parallel.clip_gradients(self.llama, settings.optimizer.grad_clip)
        mean_loss, norm, stop, writing, failed = self._exchange(
            loss, grad_norm, self.stop.signal is not None, *self.checkpoints.status()
        )
        self.stop_asked = stop > 0  # on any rank: all come to the same conclusion
        if not (math.isfinite(mean_loss) and math.isfinite(norm)):
            self.guard.check_step(
                self.step + 1,
                f"loss {mean_loss}, gradient norm {norm}, learning rate {rate:.3g}",
                self.loader.sequence_indices(self.step),
                skip=settings.skip_nonfinite,
            )
        elif not self._skips_spike(mean_loss, norm):
            self.optimizer.step()
        parallel.forget_gradients(self.optimizer, settings.hardware)
        self.checkpoints.poll(writing=writing > 0, failed=failed > 0)  # not before: it may call a callback
        return mean_loss, norm, rate

    def _exchange(self, loss: Tensor, grad_norm: Tensor, *flags: bool) -> list[float]:
        """[mean loss over ranks, grad_norm (equal on all ranks), mean of each flag over ranks]."""
        # Filled on the device: copying the flags from the host would wait for the GPU once more.
        values = torch.stack([loss, *(torch.full_like(loss, float(flag)) for flag in flags)])
        mean_loss, *means = self.ranks.mean(values)
        return torch.stack([mean_loss, grad_norm, *means]).tolist()  # the step's only wait

    def _measure(self, done: Collection[str] = ()) -> None:
        """What is due after this step, unless a record of it has the key in `done`: probe and validation.

        After the checkpoint, so that whatever fails here loses no step. A run that resumes makes up for it.
        """
        settings = self.settings
        if self.probe and self.step % settings.probe.every == 0 and "probe/seconds" not in done:
            with self._off_the_clock():
                self._probe(self.probe)
        due = self.step % settings.eval_every == 0 or self.step == self.sizes.steps
        if due and "val_loss" not in done:
            with self._off_the_clock():
                self._evaluate()

    def _probe(self, probe: Probe) -> None:
        """Measure the attention with the current weights, on the first sequences of the step just done."""
        indices = self.loader.sequence_indices(self.step - 1)[: self.settings.probe.sequences]
        tokens, context, separator = self.loader.tokens, self.settings.context, self.loader.separator
        batch = map(self._to_device, stack_sequences(tokens, indices, context, separator=separator))
        with parallel.uncompiled():
            values = probe.measure(*batch, autocast=self._autocast, is_main=self.ranks.is_main)
        if self.record:
            self.record.write({"step": self.step, "tokens": self._tokens(), **values})
            for warning in self.alarm.warnings(self.step, values, probe.layers):
                log.warning(warning)
                self.record.alert("attention gradients are inaccurate", warning)

    def _evaluate(self) -> None:
        """Loss on the first `eval_sequences` sequences of each validation set, and a sample."""
        settings, ranks = self.settings, self.ranks
        sharded = is_sharded(settings.model, settings.hardware, ranks.count)
        losses = [
            validation_loss(
                self.compiled,
                evaluation_batches(
                    one.tokens,
                    context=settings.context,
                    sequences=settings.eval_sequences,
                    micro_batch=settings.hardware.micro_batch,
                    rank=ranks.rank,
                    ranks=ranks.count,
                    separator=self.corpus.separator,
                ),
                micro_batch=settings.hardware.micro_batch,
                ranks=ranks,
                autocast=self._autocast,
                in_step=sharded,
            )
            for one in self.corpus.validation
        ]
        # All ranks of a sharded model take part in generating each token.
        sample = self._sample() if settings.sample_tokens and (ranks.is_main or sharded) else None
        values = validation_record(self.corpus.validation, losses, self._bytes_per_token)
        values["sample"] = sample
        self.callbacks.call("on_evaluate", self.step, values, self.llama)
        if self.record:
            self.record.write({"step": self.step, "tokens": self._tokens(), **values})
            log.info("step %d: %s%s", self.step, described(values), f"\n  | {sample!r}" if sample else "")

    @functools.cached_property
    def _bytes_per_token(self) -> list[float]:
        """Of the text of each validation set."""
        return bytes_per_token(
            self.corpus.validation,
            self.corpus.tokenizer,
            context=self.settings.context,
            sequences=self.settings.eval_sequences,
        )

    def _sample(self) -> str:
        prompt = torch.tensor([self.prompt], device=self.ranks.device)
        with self._autocast(), parallel.uncompiled():
            tokens = generate(
                self.llama,
                prompt,
                self.settings.sample_tokens,
                vocab_size=self.corpus.tokenizer.vocab_size,
                seed=self.settings.seed,
            )
        return self.corpus.tokenizer.decode(tokens[0].tolist())

    def _log(self, values: dict[str, Any], steps_timed: int) -> None:
        seconds = self.stopwatch.take()
        if not self.record:
            return
        tokens_per_second = steps_timed * self.sizes.tokens_per_step / seconds
        mfu = None
        if self.peak:
            flops = tokens_per_second * flops_per_token(self.settings.model, self.settings.context)
            mfu = flops / (self.peak * 1e12 * self.ranks.count)
        self.record.write(
            {
                "step": self.step,
                "tokens": self._tokens(),
                **values,
                "tokens_per_second": tokens_per_second,
                "mfu": mfu,
                "peak_memory_gib": peak_memory_gib(
                    self.ranks.device, cuda_graphs=self.settings.hardware.cuda_graphs
                ),
            }
        )
        self.record.progress(values["loss"], tokens_per_second, mfu)

    def _finish(self) -> None:
        """Export the weights, draw the pictures, and mark the run finished."""
        records = self.ranks.from_main(lambda: read_metrics(self.directory.metrics))
        self.guard.check_end(self.step, records)
        weights = parallel.whole_weights(self.llama)
        if self.ranks.is_main:
            card = model_card(self.settings, self.directory, self.step, records)
            export(self.llama, weights, self.directory.weights, tokenizer=self.corpus.tokenizer, card=card)
            title = self.probe.backend.title if self.probe else "attention"
            draw(self.directory, records, alarm=self.settings.probe.alarm, title=title)
            self.directory.finish()
            log.info("finished: %s", self.directory.results())

    # ------------------------------------------------------------------ stopping and resuming

    def _save(self) -> None:
        """Save a checkpoint. Raises TrainingError if the state is not finite: it would be of no use."""
        self.guard.check_state(self.step)
        if self.record:
            self.record.sync()
        extra = {  # what the main rank says counts
            "wandb_id": self.record.wandb_id if self.record else None,
            "logged": self.record.logged if self.record else None,
            "data": self.corpus.manifest.fingerprint,
            "tokenizer": self.corpus.manifest.recipe["tokenizer"],
            "settings": identity.recorded(self.settings),
            "recent": self.spikes.history,
        }
        self.checkpoints.save(self.step, self.llama, self.optimizer, extra)
        self.saved_step = self.step

    def _on_checkpoint(self, step: int, path: Path) -> None:
        with self._off_the_clock():
            self.callbacks.call("on_checkpoint", step, {"path": str(path)}, self.llama)

    def _restore(self) -> dict[str, Any]:
        restored = self.checkpoints.load_newest(self.llama, self.optimizer, self._check_run)
        if restored is None and self.branch:
            restored = start.load_branch(self.branch, self.checkpoints, self.llama, self.optimizer)
        restored = restored or {}
        step = restored.get("step", 0)
        if self.ranks.is_main:
            with user_facing(ValueError):
                self.directory.truncate_metrics(step)
            if step and self.branch is None:
                log.info("continuing %s from step %d", self.directory.path, step)
                warn_of_holes(
                    self.directory.metrics,
                    step=step,
                    logged=restored.get("logged", 0),
                    log_every=self.settings.log_every,
                )
        return restored

    def _check_run(self, path: Path, sealed: dict[str, Any]) -> None:
        """Raise TrainingError if the checkpoint is of another run, or of a run on other text."""
        self.directory.check_checkpoint(path, sealed, self.settings)
        if sealed.get("data") != self.corpus.manifest.fingerprint:
            raise TrainingError(
                f"{self.directory.path} was trained on other text or with another tokenizer than these data "
                "settings give; set them to the text of the run, or give this run its own run_dir=…"
            )

    def _stop_if_asked(self) -> None:
        """Save and raise Interrupted if any rank was asked to stop.

        One rank stops at the end of the step. Several agree on it in their next exchange, a step later at
        most.
        """
        asked = self.stop_asked if self.ranks.count > 1 else self.stop.signal is not None
        if asked and self.step < self.sizes.steps:
            signal = self.ranks.largest(self.stop.signal or 0)
            if self.saved_step != self.step:
                self._save()
            self.checkpoints.wait()
            raise Interrupted(
                f"stopped at step {self.step} of {self.sizes.steps} and saved; the same command continues",
                signal,
            )

    def _skips_spike(self, loss: float, grad_norm: float) -> bool:
        """Report a step with an outlier loss or gradient norm; return whether its optimizer step is skipped.

        All ranks return the same, because both values are equal on all ranks.
        """
        spike, skip = self.spikes.judge(loss, grad_norm), self.settings.spike.skip
        if spike and self.ranks.is_main:
            step, sequences = self.step + 1, self.loader.sequence_indices(self.step).tolist()
            place = {"step": step, "tokens": step * self.sizes.tokens_per_step}
            log_spike(spike, self.directory, {**place, "skipped": skip, "sequences": sequences})
        return spike is not None and skip

    # ------------------------------------------------------------------ building

    def _start_record(self, wandb_id: str | None) -> Record:
        settings, sizes, folder = self.settings, self.sizes, self.directory.path
        derived = {
            "parameters": model.config.parameter_count(settings.model),
            "steps": sizes.steps,
            "tokens_per_step": sizes.tokens_per_step,
            "total_tokens": sizes.steps * sizes.tokens_per_step,
            "devices": self.ranks.count,
            "attention": self.backend.description,  # the kernel that was chosen
        }
        config = {**identity.recorded(settings), "derived": derived}
        with_tensorboard = settings.logger.tensorboard
        return Record(
            self.directory.metrics,
            wandb=start_wandb(settings.logger, folder=folder, config=config, run_id=wandb_id),
            tensorboard=TensorBoard(folder / "tensorboard", self.step) if with_tensorboard else None,
            steps=sizes.steps,
            first_step=self.step,
            name=folder.name,
        )

    # ------------------------------------------------------------------ small things

    def _autocast(self) -> AbstractContextManager:
        dtype = build.dtype_of(self.settings)
        return torch.autocast(self.ranks.device.type, dtype, enabled=dtype is not torch.float32)

    def _to_device(self, tokens: Tensor) -> Tensor:
        return tokens.to(self.ranks.device, non_blocking=True)

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        self.stopwatch.pause()
        yield
        self.stopwatch.start()

    def _tokens(self) -> int:
        return self.step * self.sizes.tokens_per_step
