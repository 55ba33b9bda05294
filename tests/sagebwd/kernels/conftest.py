"""Tests of this folder run kernels on the CPU, in Triton's interpreter, and with `-m gpu` on a GPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sagebwd import SageConfig, sage_attention
from sagebwd.config import DEFAULT_CONFIG

HAS_GPU = torch.cuda.is_available()
GPU_ONLY = pytest.mark.gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes with NumPy, which warns about the NaN and Inf that kernels must meet."""
    for item in items:
        if "sagebwd/kernels" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(autouse=True, scope="session")
def interpreter_that_remembers_builtins() -> Iterator[None]:
    """Search ``triton.language`` for its builtins once, not at every call of a device function.

    That search is 40% of the interpreter's time. It is private to Triton: where it has moved, tests only
    take longer.
    """
    from triton import language
    from triton.runtime import interpreter

    if HAS_GPU or not hasattr(interpreter, "_patch_builtin") or not hasattr(interpreter, "_patch_attr"):
        yield
        return

    @functools.cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if language.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU_ONLY)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run: "cpu" is Triton's interpreter."""
    if request.param == "cpu" and HAS_GPU:
        pytest.skip("with a GPU at hand kernels are compiled, not interpreted")
    return request.param


@pytest.fixture
def kernel_set() -> str | None:
    """The kernel set that these tests are about."""
    return "triton"


@pytest.fixture
def attend(kernel_set) -> Callable[..., dict[str, Tensor]]:
    """Return {out, dq, dk, dv} of ``kernel_set``, or of the set that is asked for."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grad_out: Tensor,
        *,
        config: SageConfig = DEFAULT_CONFIG,
        **settings: object,
    ) -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        settings = {"kernels": kernel_set, **settings}
        out = sage_attention(*leaves, enable_gqa=True, config=config, **settings)
        gradients = torch.autograd.grad(out, leaves, grad_out)
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))

    return attend


@pytest.fixture
def attend_reference(attend) -> Callable[..., dict[str, Tensor]]:
    """The same by the reference."""

    def attend_reference(*inputs: Tensor, **settings: object) -> dict[str, Tensor]:
        return attend(*inputs, kernels="reference", **settings)

    return attend_reference


@pytest.fixture
def kernels(attend, device) -> Callable[..., dict[str, Tensor]]:
    """:func:`attend` on ``device``, for inputs from the CPU and results on it."""

    def kernels(*inputs: Tensor, **settings: object) -> dict[str, Tensor]:
        settings = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in settings.items()
        }
        result = attend(*(x.to(device) for x in inputs), **settings)
        return {name: x.cpu() for name, x in result.items()}

    return kernels


@pytest.fixture
def sample(draw) -> Callable[..., list[Tensor]]:
    """:func:`draw` with defaults that suit kernels: fp16, one head."""

    def sample(*lengths: int, **settings: Any) -> list[Tensor]:
        return draw(*lengths, **{"batch": 1, "heads": 1, "head_dim": 32, "dtype": torch.float16, **settings})

    return sample


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory starts as NaN, 127 in INT8: what a kernel does not write, or reads too early, shows."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), fill
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
