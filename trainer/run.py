"""What a run is built of, and how far it is.

Its steps, and what follows each, are in trainer.loop.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import model.config
import model.huggingface
from common.errors import TrainingError, user_facing
from data.corpus import Corpus, ValidationSet, open_corpus
from data.loader import Batch, BatchLoader, evaluation_batches
from data.tokenizers import Tokenizer
from data.tokens import count_sequences
from model.backends import Backend
from model.llama import Llama
from trainer import parallel
from trainer.callbacks import Callbacks
from trainer.checkpoint import Checkpoints, restore
from trainer.checks import Sizes, groups, report_warmup, sizes_of
from trainer.distributed import Ranks
from trainer.divergence import Guard, SpikeDetector, check_copies
from trainer.estimate import peak_tflops, report_length
from trainer.optimizer import build_optimizer, learning_rate, set_learning_rate
from trainer.probe import build_probe
from trainer.processes import StopRequest
from trainer.record import Record, Stopwatch, TensorBoard, start_wandb, warn_of_holes
from trainer.settings import Settings
from trainer.start import TrainingDirectory, check_checkpoint, find_branch, find_weights

log = logging.getLogger(__name__)


class Run:
    """One run on one rank.

    Attributes:
        step: the number of optimizer steps done; first_step: when this process began.
        saved_step, logged_step: of the newest checkpoint, and of the newest record of a training loss.
        stop_asked: whether a rank was asked to stop, as all ranks know since the last step.
    """

    def __init__(self, settings: Settings, directory: TrainingDirectory, ranks: Ranks, stop: StopRequest):
        self.settings, self.directory, self.ranks, self.stop = settings, directory, ranks, stop
        report_warmup(settings)
        self.sizes = sizes_of(settings, ranks.count)
        weights = find_weights(settings, directory)
        self.branch = ranks.from_main(lambda: find_branch(settings, directory))
        self.corpus = open_text(settings, ranks, stop)
        if ranks.is_main:
            stop.announce()
        self.prompt = encode_prompt(settings, self.corpus.tokenizer)
        self.loader = make_loader(settings, self.sizes, self.corpus, ranks)
        self.backend = build_attention(settings, ranks)
        self.llama = build_llama(settings, self.sizes, self.backend, ranks)
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
        batches = functools.partial(all_validation_batches, self)
        self.callbacks = Callbacks(settings.callbacks, batches) if settings.callbacks else None
        self.guard = Guard(self.llama, self.optimizer, ranks, directory.note_divergence)
        self.checkpoints = Checkpoints(
            directory.checkpoints,
            ranks=ranks,
            keep=settings.keep_checkpoints,
            milestone_every=settings.milestone_every,
            published=directory.note_checkpoint,
            completed=lambda step, path: self.call("on_checkpoint", step, {"path": str(path)}),
        )
        restored = self._restore()
        self.step: int = restored.get("step", 0)
        self.first_step = self.saved_step = self.logged_step = self.step
        self.spikes = SpikeDetector(settings.spike, restored.get("recent", ()))
        self.probe = build_probe(
            settings, self.llama, self.backend, device=ranks.device, dtype=settings.dtype
        )
        self.stop_asked = False
        self.stopwatch = Stopwatch(ranks.device)
        self.peak = settings.hardware.peak_tflops or peak_tflops(ranks.device)
        self.record = _start_record(self) if ranks.is_main else None

    def close(self) -> None:
        """Whether it ended or failed."""
        self.checkpoints.close()
        if self.record:
            self.record.close()

    def set_learning_rate(self) -> float:
        """That of the next step, for the optimizer."""
        sizes, settings = self.sizes, self.settings.optimizer
        rate = learning_rate(self.step, steps=sizes.steps, warmup_steps=sizes.warmup_steps, settings=settings)
        set_learning_rate(self.optimizer, rate)
        return rate

    def save(self) -> None:
        """Save a checkpoint. Raises TrainingError if the state is not finite: it would be of no use."""
        self.guard.check_state(self.step)
        if self.record:
            self.record.sync()
        extra = {  # what the main rank says counts
            "logged": self.record.logged if self.record else None,
            "data": self.corpus.manifest.fingerprint,
            "tokenizer": self.corpus.manifest.recipe["tokenizer"],
            "settings": self.settings.recorded(),
            "recent": self.spikes.history,
        }
        self.checkpoints.save(self.step, self.llama, self.optimizer, extra)
        self.saved_step = self.step

    def call(self, hook: str, step: int, record: dict[str, Any]) -> None:
        """That of all callbacks."""
        if self.callbacks:
            with self.stopwatch.paused():
                self.callbacks.call(hook, step, record, self.llama)

    def autocast(self) -> AbstractContextManager:
        dtype = self.settings.dtype
        return torch.autocast(self.ranks.device.type, dtype, enabled=dtype is not torch.float32)

    def to_device(self, tokens: Tensor) -> Tensor:
        return tokens.to(self.ranks.device, non_blocking=True)

    @property
    def tokens(self) -> int:
        """Trained on so far."""
        return self.step * self.sizes.tokens_per_step

    @functools.cached_property
    def bytes_per_token(self) -> list[float]:
        """Of the text of each validation set."""
        return bytes_per_token(
            self.corpus.validation,
            self.corpus.tokenizer,
            context=self.settings.context,
            sequences=self.settings.eval_sequences,
        )

    # --- Resuming and recording ------------------------------------------------------------

    def _restore(self) -> dict[str, Any]:
        restored = self.checkpoints.load_newest(self.llama, self.optimizer, self._check_run)
        if restored is None and self.branch:
            restored = load_branch(self.branch, self.llama, self.optimizer)
        restored = restored or {}
        step = restored.get("step", 0)
        if self.ranks.is_main:
            with user_facing(ValueError):
                self.directory.truncate_metrics(step)
            if step and self.branch is None:
                log.info("continuing %s from step %d", self.directory.path, step)
                warn_of_holes(self.directory.metrics, restored.get("logged", 0))
        return restored

    def _check_run(self, path: Path, sealed: dict[str, Any]) -> None:
        """Raise TrainingError if the checkpoint is of another run, or of a run on other text."""
        check_checkpoint(path, sealed, self.settings)
        if sealed.get("data") != self.corpus.manifest.fingerprint:
            raise TrainingError(
                f"{self.directory.path} was trained on other text or with another tokenizer than these data "
                "settings give; set them to the text of the run, or give this run its own run_dir=…"
            )


def validation_batches(run: Run, one: ValidationSet) -> Iterator[Batch]:
    """Those of this rank, of the first `eval_sequences` sequences of a set, on its device."""
    batches = evaluation_batches(
        one.tokens,
        context=run.settings.context,
        sequences=run.settings.eval_sequences,
        micro_batch=run.sizes.micro_batch,
        rank=run.ranks.rank,
        ranks=run.ranks.count,
        separator=run.corpus.separator,
    )
    return (tuple(map(run.to_device, batch)) for batch in batches)


def all_validation_batches(run: Run) -> Iterator[Batch]:
    """Of all sets, one after the other."""
    for one in run.corpus.validation:
        yield from validation_batches(run, one)


def _start_record(run: Run) -> Record:
    settings, sizes, folder = run.settings, run.sizes, run.directory.path
    derived = {
        "parameters": model.config.parameter_count(settings.model),
        "steps": sizes.steps,
        "tokens_per_step": sizes.tokens_per_step,
        "total_tokens": sizes.steps * sizes.tokens_per_step,
        "devices": run.ranks.count,
        "attention": run.backend.description,  # the kernel that was chosen
    }
    config = {**settings.recorded(), "derived": derived}
    loggers = {"W&B": start_wandb(settings.logger, folder=folder, config=config)}
    if settings.logger.tensorboard:
        loggers["TensorBoard"] = TensorBoard(folder / "tensorboard", run.step)
    return Record(
        run.directory.metrics,
        loggers,
        steps=sizes.steps,
        first_step=run.step,
        name=folder.name,
    )


# ---------------------------------------------------------------------- the parts


def open_text(settings: Settings, ranks: Ranks, stop: StopRequest) -> Corpus:
    """The text, which must be the same on all ranks; on first use the main one prepares it before."""

    def open_unless_stopped() -> None:
        with stop.at_once("stopped before the first step; the same command continues"):
            opened.append(open_corpus(settings.data, settings.recipes))

    opened: list[Corpus] = []
    with user_facing(ValueError, OSError):
        ranks.from_main(open_unless_stopped)
        if not opened:
            open_unless_stopped()
    (corpus,) = opened
    ranks.compare({f"the text of {name}": checksum for name, checksum in corpus.checksums.items()})
    return corpus


def encode_prompt(settings: Settings, tokenizer: Tokenizer) -> list[int]:
    """The tokens of sample_prompt, or end-of-text, after which a text begins. Raises TrainingError."""
    if not settings.sample_tokens:
        return []
    try:
        return tokenizer.encode(settings.sample_prompt) or [tokenizer.end_of_text]
    except ValueError as error:
        raise TrainingError(
            f"sample_prompt={settings.sample_prompt!r}: {error}, or another prompt"
        ) from error


def make_loader(settings: Settings, sizes: Sizes, corpus: Corpus, ranks: Ranks) -> BatchLoader:
    """The batches of this rank. Raises TrainingError for texts that are too short."""
    with user_facing(ValueError):
        for one in corpus.validation:
            count_sequences(one.tokens, settings.context)  # raises now, not at an evaluation
        loader = BatchLoader(
            corpus.train,
            context=settings.context,
            sequences_per_step=sizes.sequences_per_step,
            micro_batch=sizes.micro_batch,
            seed=settings.seed,
            sequences=settings.train_sequences,
            rank=ranks.rank // settings.hardware.context_parallel,
            ranks=groups(settings, ranks.count),
            separator=corpus.separator,
            pin_memory=ranks.device.type == "cuda",
        )
    needed = sizes.steps * sizes.sequences_per_step
    report_length(settings, ranks.count, passes=needed / loader.sequences)
    for line in loader.order.description(needed, context=settings.context):
        log.info("data: %s", line)
    return loader


def build_attention(settings: Settings, ranks: Ranks) -> Backend:
    """The attention, with the same kernels on all ranks. Raises TrainingError if it cannot run here."""
    with user_facing(ValueError):
        backend = settings.attention.build(
            device=ranks.device, dtype=settings.dtype, **settings.attention_shape
        )
    ranks.compare({"the attention": backend.description})
    return backend


def build_llama(settings: Settings, sizes: Sizes, backend: Backend, ranks: Ranks) -> Llama:
    """The model with the run's initial weights, on the CPU."""
    if settings.dtype is torch.bfloat16:  # what autocast leaves in float32 may use TF32
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(settings.seed)
    made = Llama(settings.model, backend.attend)
    if settings.model.linear == "float8":
        use_float8(made, emulate=settings.hardware.device == "cpu")
    log.info(
        "model: %s parameters; attention: %s; %s steps of %s tokens on %d × %s",
        f"{model.config.parameter_count(settings.model):,}",
        backend.description,
        f"{sizes.steps:,}",
        f"{sizes.tokens_per_step:,}",
        ranks.count,
        torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU",
    )
    return made


def use_float8(llama: Llama, *, emulate: bool) -> None:
    """Compute the products with the blocks' weights in FP8, one scale a tensor. Weights and their names stay.

    emulate: on devices without FP8, with its rounding, slowly.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(llama.layers, config=Float8LinearConfig(emulate=emulate))


def bytes_per_token(
    sets: Sequence[ValidationSet], tokenizer: Tokenizer, *, context: int, sequences: int
) -> list[float]:
    """UTF-8 bytes of the source for each token that a validation predicts, of each set."""
    found = []
    for one in sets:
        targets = min(count_sequences(one.tokens, context), sequences) * context  # tokens 1 … targets
        first, last = (one.tokens.source_bytes(stop, tokenizer.count_bytes) for stop in (1, targets + 1))
        found.append((last - first) / targets)
    return found


def load_branch(
    branch: tuple[Path, dict[str, Any]], llama: Llama, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Restore what `find_branch` found, and return what of its seal holds for the branch, too.

    The settings of the optimizer stay as they are: torch would take those of the checkpoint.
    """
    path, sealed = branch
    own = [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups]
    restore(path, sealed, llama, optimizer)
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)
    log.info("going on from %s", path)
    return {name: sealed[name] for name in ("step", "recent") if name in sealed}
