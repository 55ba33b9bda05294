"""The loss of the output head, without storing all logits.

At the paper's shape the logits of a micro-batch, 65,536 tokens × 50,304 words, take 13 GB in float32, and
their gradient takes as much again. Here they exist for a chunk of tokens at a time. The forward also computes
the gradients of the inputs from each chunk, so the backward only scales them. No matrix product is computed
twice.
"""

import torch
from torch import Tensor

from model.kernels import cross_entropy as kernels

CHUNK = 8192  # tokens; at 50,304 words their logits take 0.8 GB in bfloat16
IGNORE_INDEX = -100  # a target that is ignored, as in torch.nn.functional.cross_entropy


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = CHUNK) -> Tensor:
    """Mean cross-entropy in nats, a float32 scalar, of the logits x · weightᵀ.

    x: (T, C); weight: (V, C); targets: (T,) int64, where IGNORE_INDEX ignores a token. Under autocast the
    matrix product has its dtype; everything after it is float32.
    Raises ValueError for targets of another length than x.
    """
    if targets.shape != x.shape[:1]:
        raise ValueError(f"{targets.numel()} targets for {len(x)} tokens; give one target per token")
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    return _LinearCrossEntropy.apply(x, weight, targets, chunk, dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        needs_gradients = any(ctx.needs_input_grad)
        with torch.autocast(x.device.type, enabled=False):
            loss, *gradients = _loss_and_gradients(
                x.to(dtype), weight.to(dtype), targets, chunk, needs_gradients
            )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return (grad_x * grad_loss).to(ctx.dtype), grad_weight * grad_loss, None, None, None


def _loss_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int, needs_gradients: bool
) -> tuple[Tensor, ...]:
    """The loss and, if needed, its gradients: of x in the dtype of x, of weight in float32."""
    share = 1.0 / (targets != IGNORE_INDEX).sum()  # weight of each token in the mean
    losses, grads_x = [], []
    grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    for part, target in zip(x.split(chunk), targets.split(chunk), strict=True):
        logits = part @ weight.T
        if not needs_gradients:
            losses.append(_losses(logits.float(), target)[0].sum())
            continue
        loss, grad = _losses_and_gradient(logits, target, share)
        losses.append(loss.sum())
        grads_x.append(grad @ weight)
        grad_weight += grad.T @ part  # summed over chunks in float32
    loss = torch.stack(losses).sum() * share
    return (loss, torch.cat(grads_x), grad_weight) if needs_gradients else (loss,)


def _losses_and_gradient(logits: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (T,), and `share` times the gradient of the logits (T, V), in their dtype."""
    if kernels and kernels.supports(logits):
        return kernels.cross_entropy(logits, targets, share, IGNORE_INDEX)
    exact = logits.float()
    losses, logsumexp = _losses(exact, targets)
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    grad = (exact - logsumexp[:, None]).exp() - is_target.float()
    return losses, (grad * ((targets != IGNORE_INDEX) * share)[:, None]).to(logits.dtype)


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (T,), zero for an ignored token, and logsumexps (T,) of float32 logits (T, V)."""
    logsumexp = logits.logsumexp(-1)
    counts = targets != IGNORE_INDEX
    hit = logits.gather(-1, targets.where(counts, 0)[:, None])[:, 0]
    return torch.where(counts, logsumexp - hit, 0.0), logsumexp
