"""What a run is made of before its first step: text, batches, attention and model."""

import logging
from typing import Any

import torch

import model.config
from common.errors import TrainingError, user_facing
from data.corpus import Corpus, open_corpus
from data.loader import BatchLoader
from data.tokenizers import Tokenizer
from data.tokens import count_sequences
from model.backends import Backend
from model.llama import Llama
from trainer.checks import Sizes, groups
from trainer.distributed import Ranks
from trainer.estimate import report_length
from trainer.interrupt import StopRequest
from trainer.settings import Settings

log = logging.getLogger(__name__)


def open_text(settings: Settings, ranks: Ranks, stop: StopRequest) -> Corpus:
    """The text, which must be the same on all ranks; on first use the main one prepares it before."""

    def open_unless_stopped() -> None:
        with stop.at_once("stopped before the first step; the same command continues"):
            opened.append(open_corpus(settings.data))

    opened: list[Corpus] = []
    with user_facing(ValueError, OSError):
        ranks.from_main(open_unless_stopped)
        if not opened:
            open_unless_stopped()
    (corpus,) = opened
    ranks.compare({f"the text of {name}": checksum for name, checksum in corpus.checksums.items()})
    return corpus


def encode_prompt(settings: Settings, tokenizer: Tokenizer) -> list[int]:
    """The tokens of sample_prompt. Raises TrainingError, before the first step, if there are none."""
    if not settings.sample_tokens:
        return []
    reason = "it has no token"
    try:
        if tokens := tokenizer.encode(settings.sample_prompt):
            return tokens
    except Exception as error:  # the library tokenizers raises no other kind
        reason = str(error)
    raise TrainingError(
        f"sample_prompt={settings.sample_prompt!r} cannot be continued: {reason}. Give it another "
        "beginning, or use sample_tokens=0"
    )


def make_loader(settings: Settings, sizes: Sizes, corpus: Corpus, ranks: Ranks) -> BatchLoader:
    """The batches of this rank. Raises TrainingError for texts that are too short."""
    with user_facing(ValueError):
        for one in corpus.validation:
            count_sequences(one.tokens, settings.context)  # raises now, not at an evaluation
        loader = BatchLoader(
            corpus.train,
            context=settings.context,
            sequences_per_step=sizes.sequences_per_step,
            micro_batch=settings.hardware.micro_batch,
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


def attention(settings: Settings, ranks: Ranks) -> Backend:
    """The attention, with the same kernels on all ranks. Raises TrainingError if it cannot run here."""
    with user_facing(ValueError):
        backend = settings.attention.build(
            device=ranks.device, dtype=dtype_of(settings), **attention_shape(settings)
        )
    ranks.compare({"the attention": backend.description})
    return backend


def attention_shape(settings: Settings) -> dict[str, Any]:
    """The shape that the attentions of a run are built for."""
    shape = {"d_head": settings.model.d_head, "is_gqa": settings.model.is_gqa}
    return shape | ({"longest_document": settings.context} if settings.data.mask_documents else {})


def llama(settings: Settings, sizes: Sizes, backend: Backend, ranks: Ranks) -> Llama:
    """The model with the run's initial weights, on the CPU."""
    if dtype_of(settings) is torch.bfloat16:  # what autocast leaves in float32 may use TF32
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(settings.seed)
    made = Llama(settings.model, backend.attend)
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


def dtype_of(settings: Settings) -> torch.dtype:
    """That of autocast: of matrix products and of attention."""
    return getattr(torch, settings.hardware.dtype)
