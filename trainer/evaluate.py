"""Loss on the validation text."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from data.corpus import ValidationSet
from data.loader import Batch
from data.tokenizers import Tokenizer
from data.tokens import count_sequences
from trainer import parallel
from trainer.distributed import Ranks


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

    `batches` are this rank's, as `evaluation_batches` makes them. Only full batches of micro_batch sequences
    use the compiled model, which would be compiled again for any other size. in_step: every rank calls the
    model equally often, as a sharded model requires, although some ranks have a batch less.
    """
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # summed loss, tokens
    batches = list(batches)
    idle_rounds = ranks.largest(len(batches)) - len(batches) if in_step else 0
    for batch in batches:
        sequences, tokens = len(batch[0]), batch[0].numel()
        with autocast(), nullcontext() if sequences == micro_batch else parallel.uncompiled():
            loss = model(*(x.to(ranks.device) for x in batch))
        total += torch.stack([loss.double() * tokens, total.new_tensor(tokens)])
    for _ in range(idle_rounds):
        with autocast(), parallel.uncompiled():
            model(torch.zeros(1, 1, dtype=torch.int64, device=ranks.device))
    summed, tokens = ranks.mean(total).tolist()
    return summed / tokens


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
