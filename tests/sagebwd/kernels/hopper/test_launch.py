"""What is launched, with which arguments; none of it needs a GPU."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.hopper import packets, runtime
from sagebwd.kernels.layout import Axis
from tests.sagebwd.kernels.hopper.cases import without_int8

# --- Python and CUDA agree ---------------------------------------------------------------------------------

SCALARS = {"int": ctypes.c_int, "i64": ctypes.c_int64, "float": ctypes.c_float}


def fields_in_c(name, text):
    """(name, type, whether it is a pointer) of all fields of a struct."""
    body = re.sub(r"//.*", "", re.search(rf"struct {name} {{(.*?)}};", text, re.DOTALL)[1])
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+)\s*(.*)", declaration, re.DOTALL).groups()
        for field in map(str.strip, names.split(",")):
            yield field.lstrip("* "), kind, field.startswith("*")


def assert_same_fields(structure, name, text):
    for (in_c, kind, is_pointer), (in_python, ctype) in zip(
        fields_in_c(name, text), structure._fields_, strict=True
    ):
        assert in_c == in_python
        if is_pointer:
            assert ctype is ctypes.c_void_p, in_c
        elif kind in SCALARS:
            assert ctype is SCALARS[kind], in_c
        else:
            assert ctype.__name__.lstrip("_") == kind, in_c
            assert_same_fields(ctype, kind, text)


@pytest.mark.parametrize(
    ("source", "structure"),
    [("forward", hopper._Forward), ("dk_dv", hopper._DkDv), ("dq", hopper._Dq)],
    ids=["forward", "dk_dv", "dq"],
)
def test_arguments_are_those_of_the_source(source, structure):
    """Names, order and types: the driver sees nothing but their size."""
    files = ("common.cuh", f"{source}.cu")
    text = "".join((runtime.SOURCES / file).read_text(encoding="utf-8") for file in files)
    assert_same_fields(structure, "Arguments", text)


def check_syntax(source, head_dim, p_half, threads, shared_bytes):
    """Compile as far as static_assert, which takes milliseconds; raise what the compiler says."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=f"{source}.cu",
        arch=runtime.ARCHITECTURE,
        std="c++17",
        include_path=[str(runtime.SOURCES)],
        define_macro=[
            ("HEAD_DIM", str(head_dim)),
            ("IS_CAUSAL", "1"),
            ("LAUNCH_THREADS", str(threads)),
            ("LAUNCH_BYTES", str(shared_bytes)),
            *(["P_HALF"] if p_half else []),
        ],
        fdevice_syntax_only=True,
    )
    Program((runtime.SOURCES / f"{source}.cu").read_text("utf-8"), "c++", options).compile("cubin")


@pytest.mark.parametrize(("source", "head_dim", "p_half"), hopper.LAUNCHES, ids=str)
def test_launches_are_what_the_sources_are_written_for(source, head_dim, p_half):
    pytest.importorskip("cuda.core", exc_type=ImportError)
    if reason := runtime.why_no_compiler():
        pytest.skip(reason)
    launch = hopper.LAUNCHES[source, head_dim, p_half]
    assert launch.own == hopper.LAUNCHES[source, head_dim, False].own  # which is how _axes cuts items
    assert launch.shared_bytes <= 226 * 1024  # of the 227 KiB that a block may have; barriers lie beside
    check_syntax(source, head_dim, p_half, launch.threads, launch.shared_bytes)
    for change in ({"warpgroups": launch.warpgroups + 1}, {"shared_bytes": launch.shared_bytes + 16}):
        wrong = launch._replace(**change)
        with pytest.raises(Exception, match="static assertion failed"):
            check_syntax(source, head_dim, p_half, wrong.threads, wrong.shared_bytes)


# --- What is launched --------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """[(kernel, macros, arguments)] in the order of the launches, none of which computes anything."""
    launches = []

    def kernel(source, name, shared_bytes, **defines):
        def launch(grid, threads, *arguments):
            launches.append((name.removesuffix("_kernel"), defines, arguments))

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(runtime, "kernel", kernel)
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 1)
    return launches


def address(x):
    return None if x is None else x.data_ptr()


@pytest.mark.parametrize("smooth_k", [True, False], ids=["smooth_k", "plain K"])
@pytest.mark.parametrize("smooth_v", [True, False], ids=["smooth_v", "plain V"])
@pytest.mark.parametrize("boundaries", [None, [0, 3, 3, 9]], ids=["whole", "packed"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "made again"])
def test_only_the_means_that_are_asked_for_are_taken(launched, sample, smooth_k, smooth_v, boundaries, keep):
    """And each reaches the tensor that it is of; the forward gets V's, which the backward never sees."""
    q, k, v, grad_out = sample(9, heads=4, kv_heads=2, head_dim=64)
    config = SageConfig(smooth_k=smooth_k, smooth_v=smooth_v)
    axes = [Axis.of(9, n, None if boundaries is None else torch.tensor(boundaries)) for n in (64, 128)]
    options = {"is_causal": True, "scale": 0.1, "config": config}
    saved = hopper.forward(q, k, v, *axes, keep=keep, **options)
    hopper.backward(grad_out, q, k, v, *saved, *axes, **options)
    names = [name for name, _, _ in launched]
    forward = [*["sum", "mean"] * (smooth_k + smooth_v), "query", "key_value", "forward"]
    backward = ["query_gradient", "dk_dv", "key_columns", "dq"]
    assert names == [*forward, *([] if keep else ["key"]), *backward]

    sources = [arguments[0].tensor.data for name, _, arguments in launched if name == "sum"]
    results = [arguments[1] for name, _, arguments in launched if name == "mean"]
    means = dict(zip(sources, results, strict=True))
    assert set(means) == {x.data_ptr() for x, on in ((k, smooth_k), (v, smooth_v)) if on}
    documents = 1 if boundaries is None else 3
    assert all(mean.shape == (2 * documents, 64) for mean in means.values())
    first = {name: (defines, arguments) for name, defines, arguments in reversed(launched)}
    of_k, of_v = (means.get(x.data_ptr()) for x in (k, v))
    assert [address(x) for x in first["key_value"][1][2:4]] == [address(of_k), address(of_v)]
    kept = first["key_value"][1][5]
    if keep:
        assert kept is saved[4]
    else:
        assert kept is None
        assert address(first["key"][1][2]) == address(of_k)
    assert first["dk_dv"][1][0].k_rows == address(kept if keep else first["key"][1][3])
    defines, (arguments,) = first["forward"]
    assert defines["SMOOTH_V"] is smooth_v
    assert arguments.v_mean == address(of_v)
    assert arguments.documents == documents
    assert not any("SMOOTH_V" in first[name][0] for name in ("dk_dv", "dq"))


@pytest.mark.parametrize("unsigned_p", [False, True])
def test_unsigned_p_reaches_the_kernels_that_round_p(launched, sample, unsigned_p):
    q, k, v, grad_out = sample(9, head_dim=64)
    axes = [Axis.of(9, block, None) for block in (64, 128)]
    options = {"is_causal": True, "scale": 0.1, "config": SageConfig(unsigned_p=unsigned_p)}
    saved = hopper.forward(q, k, v, *axes, keep=True, **options)
    hopper.backward(grad_out, q, k, v, *saved, *axes, **options)
    macros = {name: defines["UNSIGNED_P"] for name, defines, _ in launched if "UNSIGNED_P" in defines}
    assert macros == {"forward": unsigned_p, "dk_dv": unsigned_p}  # a macro that is False is not defined


@pytest.mark.parametrize("products", [(), ("o",), ("dv",), ("o", "dv")], ids=str)
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "made again"])
def test_products_in_16_bit_get_the_tensors_as_they_are(launched, sample, products, keep):
    """Unsigned is P in the products in INT8 alone."""
    q, k, v, grad_out = sample(9, head_dim=64)
    axes = [Axis.of(9, block, None) for block in (64, 128)]
    config = without_int8(*products, unsigned_p=len(products) < 2)
    options = {"is_causal": True, "scale": 0.1, "config": config}
    saved = hopper.forward(q, k, v, *axes, keep=keep, **options)
    hopper.backward(grad_out, q, k, v, *saved, *axes, **options)
    half_o, half_dv = "o" in products, "dv" in products
    forward = ["sum", "mean", "query", "key" if half_o else "key_value", "forward"]
    backward = ["query_gradient", "dk_dv", "key_columns", "dq"]
    names = [name for name, _, _ in launched]
    assert names == [*forward, *([] if keep else ["key"]), *backward]
    first = {name: (defines, arguments) for name, defines, arguments in reversed(launched)}
    for name, half in (("forward", half_o), ("query_gradient", half_dv), ("dk_dv", half_dv)):
        assert first[name][0]["P_HALF"] is half, name
    for name, half in (("forward", half_o), ("dk_dv", half_dv)):
        assert first[name][0]["UNSIGNED_P"] is (config.unsigned_p and not half), name
    columns = first["query_gradient"][1][6]
    assert columns.shape[1] == 64 * 64 * (1 if half_dv else 2)
    assert saved[4].shape == (packets.key_packets_shape(k, axes[1].blocks) if keep else (0,))


@pytest.mark.parametrize("on", [False, True])
def test_the_rest_of_out_goes_from_the_forward_to_delta(launched, sample, on):
    q, k, v, grad_out = sample(9, head_dim=64)
    axes = [Axis.of(9, block, None) for block in (64, 128)]
    options = {"is_causal": True, "scale": 0.1, "config": without_int8("o", compensate_o=on)}
    saved = hopper.forward(q, k, v, *axes, keep=True, **options)
    hopper.backward(grad_out, q, k, v, *saved, *axes, **options)
    out, _, _, rest, _ = saved
    assert rest.shape == (out.shape if on else (0,))
    first = {name: (defines, arguments) for name, defines, arguments in reversed(launched)}
    assert first["forward"][0]["COMPENSATE_O"] is on
    assert first["forward"][1][0].rest.data == address(rest if on else out)
    assert first["query_gradient"][0]["COMPENSATE_O"] is on
    assert first["query_gradient"][1][3].tensor.data == address(rest if on else out)


def test_kernels_of_the_backward_read_the_same_packets_and_count_items_apart(launched, sample):
    q, k, v, grad_out = sample(9, head_dim=64)
    axes = [Axis.of(9, block, None) for block in (64, 128)]
    options = {"is_causal": True, "scale": 0.1, "config": DEFAULT_CONFIG}
    saved = hopper.forward(q, k, v, *axes, keep=True, **options)
    hopper.backward(grad_out, q, k, v, *saved, *axes, **options)
    assert [name for name, _, _ in launched][-4:] == ["query_gradient", "dk_dv", "key_columns", "dq"]
    first = {name: arguments for name, _, arguments in reversed(launched)}
    dk_dv, dq = first["dk_dv"][0], first["dq"][0]
    assert dk_dv.q_rows == dq.q_rows == address(first["query_gradient"][5])
    assert dk_dv.axes.taken != dq.axes.taken
