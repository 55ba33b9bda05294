"""Loss on the validation text."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from trainer import parallel
from trainer.distributed import Ranks


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    micro_batch: int,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager],
    in_step: bool = False,
) -> float:
    """Mean cross-entropy per token, in nats, over the batches of all ranks.

    `batches` are this rank's (inputs, targets), each (b, context) with b ≤ micro_batch. Only full batches use
    the compiled model, which would be compiled again for any other size. in_step: every rank calls the model
    equally often, as a sharded model requires, although some ranks have a batch less.
    """
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # summed loss, tokens
    batches = list(batches)
    idle_rounds = ranks.largest(len(batches)) - len(batches) if in_step else 0
    for inputs, targets in batches:
        with autocast(), nullcontext() if len(inputs) == micro_batch else parallel.uncompiled():
            loss = model(inputs.to(ranks.device), targets.to(ranks.device))
        total += torch.stack([loss.double() * targets.numel(), total.new_tensor(targets.numel())])
    for _ in range(idle_rounds):
        with autocast(), parallel.uncompiled():
            model(torch.zeros(1, 1, dtype=torch.int64, device=ranks.device))
    summed, tokens = ranks.mean(total).tolist()
    return summed / tokens
