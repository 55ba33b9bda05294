"""What tests of kernels share: which kernel sets each runs for, and fixtures that call and compare them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sagebwd import dispatch, reference, sage_attention
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.ampere.shapes import SHARED_LIMIT
from sagebwd.kernels.cuda import plan
from sagebwd.kernels.cuda.compile import why_no_compiler
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels.cuda import sources_on_cpu
from tests.sagebwd.kernels.inputs import NAMES, of_document
from tests.sagebwd.kernels.sets import KERNEL_SETS, KernelSet

HAS_GPU = torch.cuda.is_available()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses ``kernel_set`` for each, with the parameters that :func:`sets.over` gives it."""
    if "kernel_set" not in metafunc.fixturenames:
        return
    compares = "attend_reference" in metafunc.fixturenames
    conditions = [mark.args[0] for mark in metafunc.definition.iter_markers("only")]
    axes = [mark.args for mark in metafunc.definition.iter_markers("over")]
    rows = [
        pytest.param(
            kernel_set,
            *(value for part in parts for value in part.values),
            marks=pytest.mark.gpu if kernel_set.is_gpu else (),
            id="-".join([str(kernel_set), *(part.id for part in parts)]),
        )
        for kernel_set in KERNEL_SETS
        if all(condition(kernel_set) for condition in conditions)
        if not kernel_set.is_emulated or metafunc.definition.get_closest_marker("emulated")
        if not (kernel_set.is_reference and compares) or metafunc.definition.get_closest_marker("reference")
        for parts in product(*([_row(names, x) for x in values(kernel_set)] for names, values in axes))
    ]
    if not rows:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} runs for no kernel set")
    names = ["kernel_set", *(name for names, _ in axes for name in names.split(", "))]
    metafunc.parametrize(names, rows, indirect=["kernel_set"])


def _row(names: str, x: Any) -> Any:
    """``x``, one value or a tuple of them, as a ``pytest.param`` with an id."""
    if isinstance(x, type(pytest.param())):
        return x
    values = x if isinstance(x, tuple) and ", " in names else (x,)
    return pytest.param(*values, id="-".join(map(_id, names.split(", "), values)))


def _id(name: str, value: Any) -> str:
    if name == "is_causal":
        return "causal" if value else "full"
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes with NumPy, which warns about the NaN and Inf that kernels must meet."""
    for item in items:
        if "sagebwd/kernels" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter in 60% of its time.

    It replaces the functions of ``triton.language`` by its own when a kernel begins, and would again at every
    call of a device function; and it asks after each sum of integers whether it has overflowed.
    """
    from triton import language
    from triton.runtime import interpreter

    private = ("_patch_lang", "_LangPatchScope", "interpreter_builder")
    if HAS_GPU or not all(hasattr(interpreter, name) for name in private):
        yield
        return
    replace_all, builder = interpreter._patch_lang, interpreter.interpreter_builder
    originals = {id(module): module.range for module in (language, language.core)}

    @functools.cache
    def modules_of(function: Any) -> list[Any]:
        return [x for x in function.__globals__.values() if inspect.ismodule(x) and id(x) in originals]

    def replace_once(function: Any) -> Any:
        is_done = all(module.range is not originals[id(module)] for module in modules_of(function))
        return interpreter._LangPatchScope() if is_done else replace_all(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture
def kernel_set(request: pytest.FixtureRequest) -> KernelSet:
    """The kernel set under test."""
    if reason := request.param.why_unavailable():
        pytest.skip(reason)
    if request.param.is_emulated:
        request.getfixturevalue("emulate")(request.param.name)
    return request.param


@pytest.fixture
def device(kernel_set) -> str:
    """Where the kernels run: "cpu" is Triton's interpreter."""
    return kernel_set.device


@pytest.fixture
def attend(kernel_set) -> Callable[..., dict[str, Tensor]]:
    """Return {out, dq, dk, dv} of ``kernel_set``, or of the set that is asked for."""

    def attend(q, k, v, grad_out, *, config=DEFAULT_CONFIG, **settings):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        settings = {"kernels": kernel_set.name, **settings}
        out = sage_attention(*leaves, enable_gqa=True, config=config, **settings)
        gradients = torch.autograd.grad(out, leaves, grad_out)
        return dict(zip(NAMES, (out.detach(), *gradients), strict=True))

    return attend


@pytest.fixture
def attend_reference(attend, monkeypatch) -> Callable[..., dict[str, Tensor]]:
    """The same by the reference; with ``saved_out`` gradients are those of a forward that returned this."""

    def attend_reference(*inputs, saved_out=None, **settings):
        backward = reference.backward

        def with_out(grad_out, q, k, v, saved, params, grad_lse):
            return backward(grad_out, q, k, v, saved._replace(out=saved_out), params, grad_lse)

        with monkeypatch.context() as patch:
            if saved_out is not None:
                patch.setattr(reference, "backward", with_out)
            return attend(*inputs, kernels="reference", **settings)

    return attend_reference


@pytest.fixture
def kernels(attend, device) -> Callable[..., dict[str, Tensor]]:
    """:func:`attend` on ``device``, for inputs from the CPU and results on it."""

    def kernels(*inputs, **settings):
        settings = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in settings.items()}
        result = attend(*(x.to(device) for x in inputs), **settings)
        return {name: x.cpu() for name, x in result.items()}

    return kernels


@pytest.fixture
def sample(draw, kernel_set) -> Callable[..., list[Tensor]]:
    """:func:`draw` with defaults that suit kernels: fp16, one head."""
    defaults = {"batch": 1, "heads": 1, "head_dim": kernel_set.head_dims[0], "dtype": torch.float16}
    return lambda *lengths, **settings: draw(*lengths, **{**defaults, **settings})


@pytest.fixture
def sample_on_device(sample, device) -> Callable[..., list[Tensor]]:
    """:func:`sample` where the kernels run."""
    return lambda *lengths, **settings: [x.to(device) for x in sample(*lengths, **settings)]


# --- CUDA sources on a CPU ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """folder_of(name): all sources and stand-ins of a CUDA kernel set."""

    @functools.cache
    def folder_of(name: str) -> Path:
        sources = hopper.SOURCES if name == "hopper" else ampere.sources_for("sm_80")
        return sources_on_cpu.gather(tmp_path_factory, sources, Path(__file__).parent / name / "on_cpu")

    return folder_of


@pytest.fixture
def emulate(folder_of, monkeypatch) -> Iterator[Callable[[str], None]]:
    """emulate(name): a CUDA kernel set runs on CPU tensors, if a call asks for it."""

    def emulate(name: str) -> None:
        def start_loading(sources, source, kernel, shared_bytes, **defines):
            assert name == "hopper" or shared_bytes <= SHARED_LIMIT
            return lambda: sources_on_cpu.load(folder_of(name), source, kernel, shared_bytes, defines)

        choose = dispatch.choose
        monkeypatch.setattr(dispatch, "choose", lambda *call: name if call[5:] == (name,) else choose(*call))
        monkeypatch.setattr("sagebwd.attention._calls", {})
        sources_on_cpu.no_gpu(monkeypatch, start_loading, sources_on_cpu.encode)

    yield emulate
    plan.plan_of.cache_clear()


@pytest.fixture
def in_order() -> Iterator[Callable[..., Any]]:
    """in_order(function, …): its results when threads run as ``sources_on_cpu.run_in_order`` says."""

    def in_order(function, **order):
        sources_on_cpu.run_in_order(**order)
        return function()

    yield in_order
    sources_on_cpu.run_in_order()


# --- Comparing ---------------------------------------------------------------------------------------------


@pytest.fixture
def assert_same(kernel_set) -> Callable[..., None]:
    """Assert that relative L2 is below ``agrees_to`` and no element further off than one step of INT8.

    INT8 itself costs 0.02; a wrong scale, tile or mask would cost as much or more. Largest measured on a CPU:
    2e-4 and 0.2 steps, with scales of tiles 9e-4 and 0.9.

    A GPU is allowed one element more: its 1/127 is off by up to 2 ulp, so that now and then an element of Q,
    K, V or dO falls to the other side. That one is off by a step where all n are by √(1/12) of one, at
    random, which together cost 0.02: √12 · 0.02 / √n. Values that are zero do not count.

    In bf16 the bound is ``kernel_set.bf16_error``. ``slack``: the scale of a tile has larger steps.
    """

    def assert_same(found, wanted, names=NAMES, *, slack=1.0):
        for name in names:
            assert found[name].dtype == wanted[name].dtype
            assert found[name].isfinite().all(), name
            x, y = found[name].float(), wanted[name].float()
            if found[name].dtype == torch.bfloat16:
                assert relative_l2(x, y) < kernel_set.bf16_error, name
                continue
            n = max(int(y.count_nonzero()), 1)
            bound = slack * kernel_set.agrees_to + (0.07 / n**0.5 if kernel_set.is_gpu else 0.0)
            steps = 2 if kernel_set.is_gpu else 1
            assert relative_l2(x, y) < bound, name
            assert (x - y).abs().max() <= steps * y.abs().max() / 127, name

    return assert_same


@pytest.fixture
def kernels_and_reference(kernels, attend_reference) -> Callable[..., tuple[dict[str, Tensor], ...]]:
    """Return what the kernels make of CPU inputs, and what the reference does.

    The reference's gradients are those of the kernels' O. fp16 rounds few elements of it otherwise than the
    reference's, but δ carries each into a whole row of dS. Tensor cores, which cut sums off, leave up to 0.7%
    of them: dK moves by 1.1e-3 (results/log.md). A compensated O has no such error.
    """

    def kernels_and_reference(inputs, config=DEFAULT_CONFIG, **settings):
        found = kernels(*inputs, config=config, **settings)
        saved_out = None if config.compensate_o else found["out"]
        return found, attend_reference(*inputs, config=config, saved_out=saved_out, **settings)

    return kernels_and_reference


@pytest.fixture
def check(kernels_and_reference, kernel_set, assert_same) -> Callable[..., dict[str, Tensor]]:
    """Assert that the kernels give on CPU inputs what the reference does; return their result."""

    def check(inputs, *, names=NAMES, config=DEFAULT_CONFIG, **settings):
        found, wanted = kernels_and_reference(inputs, config, **settings)
        of_tiles = 5.0 if kernel_set.is_emulated else 2.0
        assert_same(found, wanted, names, slack=of_tiles if config.granularity == "block" else 1.0)
        return found

    return check


@pytest.fixture
def alone(kernels) -> Callable[..., dict[str, Tensor]]:
    """Return {out, dq, dk, dv} of a pack, put together from one call for each document."""

    def alone(inputs, boundaries, boundaries_kv, **settings):
        wanted = {name: torch.zeros_like(inputs[n]) for name, n in zip(NAMES, (0, 0, 1, 2), strict=True)}
        for row, column in zip(pairwise(boundaries), pairwise(boundaries_kv), strict=True):
            rows, columns = slice(*row), slice(*column)
            if rows.start == rows.stop or columns.start == columns.stop:
                continue
            result = kernels(*of_document(inputs, rows, columns), **settings)
            for name in NAMES:
                tokens = rows if name in ("out", "dq") else columns
                wanted[name][..., tokens, :] = result[name]
        return wanted

    return alone


# --- Memory ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """For tests that compile CUDA."""
    if reason := why_no_compiler():
        pytest.skip(reason)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory starts as NaN, 127 in INT8: what a kernel does not write, or reads too early, shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        assert torch.empty(1).isnan()
        yield
    torch.use_deterministic_algorithms(before)
