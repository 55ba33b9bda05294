"""Ways to call attention with one kernel set, all of which must give the same bits."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sagebwd import sage_attention
from sagebwd.config import DEFAULT_CONFIG, encode
from sagebwd.window import Window

Function = Callable[..., Tensor]


class Watch(TorchDispatchMode):
    """The names of the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


SAVED = [torch.ops.sagebwd.forward.default]


def attention(kernels: str | None, **settings: object) -> Function:
    """q, k, v -> out, causal unless ``settings`` say otherwise."""
    settings = {"is_causal": True, "enable_gqa": True, "kernels": kernels, **settings}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sage_attention(q, k, v, **settings)

    return attention


def forward(
    kernels, q, k, v, cu_seqlens=None, cu_seqlens_kv=None, *, scale=None, config=DEFAULT_CONFIG, **mask
):
    """All results of the operator ``sagebwd::forward``, past the checks of its arguments."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = Window.of(mask.get("is_causal", True), mask.get("window_size", (-1, -1)))
    settings = (cu_seqlens, cu_seqlens_kv, *window, scale, encode(config), kernels)
    return torch.ops.sagebwd.forward(q, k, v, *settings)


def ways(kernels: str) -> dict[str, Function]:
    """Ways to call causal attention, by name."""
    function = attention(kernels)

    def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return forward(kernels, q, k, v)[0]

    def checkpointed(function: Function, **settings: object) -> Function:
        return lambda *inputs: checkpoint(function, *inputs, **settings)

    return {
        "function": function,
        "operator": operator,
        "checkpoint": checkpointed(function, use_reentrant=False),
        "reentrant checkpoint": checkpointed(function, use_reentrant=True),
        "selective checkpoint": checkpointed(
            function, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(SAVED)
        ),
        "checkpointed operator": checkpointed(operator, use_reentrant=False),
        "vmap": lambda *inputs: torch.vmap(function)(*(x[None] for x in inputs))[0],
    }
