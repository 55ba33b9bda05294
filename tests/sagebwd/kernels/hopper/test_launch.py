"""What is launched, with which arguments; none of it needs a GPU."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.interface import AttentionParams
from sagebwd.kernels.cuda import launch
from sagebwd.kernels.cuda.compile import SHARED, compile_source
from sagebwd.kernels.cuda.packing import PackedLayout
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.hopper import shapes, tensor_map
from sagebwd.kernels.hopper.tensor_map import mappable
from sagebwd.kernels.layout import Axis
from sagebwd.window import Window
from tests.sagebwd.kernels.hopper.conftest import tensor_map_on_cpu
from tests.sagebwd.kernels.sets import without_int8

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
            assert ctype.__name__.lstrip("_").removeprefix("C") == kind, in_c
            assert_same_fields(ctype, kind, text)


@pytest.mark.parametrize(
    ("source", "structure"),
    [
        ("forward", hopper.CForward),
        ("dk_dv", hopper._CDkDv),
        ("dq.cuh", hopper._CDq),
        ("backward", hopper._CBackward),
        ("finish_dq", hopper._CFinishDq),
    ],
    ids=["forward", "dk_dv", "dq", "backward", "finish_dq"],
)
def test_arguments_are_those_of_the_source(source, structure):
    """Names, order and types: the driver sees nothing but their size."""
    folder = hopper.SOURCES.path("dq").parent
    file = folder / source if source.endswith(".cuh") else hopper.SOURCES.path(source)
    files = (SHARED / "layout.cuh", SHARED / "scheduler.cuh", file)
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert_same_fields(structure, "Arguments", text)


MACROS_OF_SHAPES = {
    "": {},
    "P_16BIT": {"P_16BIT": True},
    "DK_16BIT": {"P_16BIT": True, "DK_16BIT": True},
}


def check_syntax(source, head_dim, operands, threads, shared_bytes, **macros):
    """Compile as far as static_assert, which takes milliseconds; raise what the compiler says."""
    defines = {
        "HEAD_DIM": head_dim,
        "IS_CAUSAL": 1,
        "LAUNCH_THREADS": threads,
        "LAUNCH_BYTES": shared_bytes,
        **MACROS_OF_SHAPES.get(operands, {}),
        **shapes.tile_macros(head_dim, operands),
        **macros,
    }
    compile_source(hopper.SOURCES, source, defines, ["--fdevice-syntax-only"])


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("source", "head_dim", "operands"), shapes.CTA_SHAPES, ids=str)
def test_cta_shapes_are_those_of_the_sources(source, head_dim, operands):
    cta = shapes.CTA_SHAPES[source, head_dim, operands]
    like = shapes.CTA_SHAPES[source.removesuffix("_tile_scales"), head_dim, ""]
    assert cta.tokens == like.tokens  # work_tokens relies on it
    # A CTA may have 227 KiB. Barriers take a little, and what follows them begins at a multiple of 1,024.
    assert cta.shared_bytes <= 226 * 1024
    token_scales = {False, source != "backward" and not operands}  # they lie in the padding of stages
    own = {}
    if operands == "S_16BIT":
        token_scales = {source != "forward"}
        own = {"P_16BIT": source == "forward"}
    for has_token_scales in token_scales:
        for unpacked in (False, True):
            macros = {"TOKEN_SCALES": has_token_scales, "UNPACKED_16BIT": unpacked, **own}
            check_syntax(source, head_dim, operands, cta.threads, cta.shared_bytes, **macros)
    for change in ({"consumers": cta.consumers + 1}, {"shared_bytes": cta.shared_bytes + 16}):
        wrong = cta._replace(**change)
        with pytest.raises(RuntimeError, match="static assertion failed"):
            check_syntax(source, head_dim, operands, wrong.threads, wrong.shared_bytes, **macros)


# --- What is launched --------------------------------------------------------------------------------------


@pytest.fixture
def sample(draw):
    """draw with one sequence and head in fp16."""
    return lambda tokens, **sizes: draw(tokens, **{"batch": 1, "heads": 1, "dtype": torch.float16, **sizes})


@pytest.fixture
def launched(monkeypatch):
    """[(kernel, macros, arguments)] in the order of the launches, none of which computes anything."""
    launches = []

    def load_kernel(sources, source, name, shared_bytes, **defines):
        def launch(grid, threads, *arguments):
            launches.append((name.removesuffix("_kernel"), defines, arguments))

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(launch, "load_kernel", load_kernel)
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 1)
    monkeypatch.setattr(hopper, "tensor_map", tensor_map_on_cpu)
    return launches


def address(x):
    return None if x is None else x.data_ptr()


@pytest.mark.parametrize("smooth_k", [True, False], ids=["smooth_k", "plain K"])
@pytest.mark.parametrize("smooth_v", [True, False], ids=["smooth_v", "plain V"])
@pytest.mark.parametrize("boundaries", [None, [0, 3, 3, 9]], ids=["whole", "packed"])
@pytest.mark.parametrize("pack_once", [True, False], ids=["packed once", "packed again"])
def test_only_the_means_that_are_asked_for_are_taken(
    launched, sample, smooth_k, smooth_v, boundaries, pack_once
):
    """And each reaches the tensor that it is of; the forward gets V's, which the backward never sees."""
    q, k, v, grad_out = sample(9, heads=4, kv_heads=2, head_dim=64)
    config = SageConfig(smooth_k=smooth_k, smooth_v=smooth_v)
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries)
    params = AttentionParams(Window.of(True), 0.1, config, "hopper", cu_seqlens)
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=pack_once))
    hopper.backward(grad_out, q, k, v, saved, params)
    names = [name for name, _, _ in launched]
    forward = [*["token_sum", "token_mean"] * (smooth_k + smooth_v), "pack_q", "pack_kv_int8", "forward"]
    backward = ["pack_grad", "dk_dv", "pack_k_columns", "dq"]
    assert names == [*forward, *([] if pack_once else ["pack_kv", "pack_q"]), *backward]

    sources = [arguments[0].tensor.data for name, _, arguments in launched if name == "token_sum"]
    results = [arguments[1] for name, _, arguments in launched if name == "token_mean"]
    means = dict(zip(sources, results, strict=True))
    assert set(means) == {x.data_ptr() for x, on in ((k, smooth_k), (v, smooth_v)) if on}
    documents = 1 if boundaries is None else 3
    assert all(mean.shape == (2 * documents, 64) for mean in means.values())
    first = {name: (defines, arguments) for name, defines, arguments in reversed(launched)}
    of_k, of_v = (means.get(x.data_ptr()) for x in (k, v))
    assert [address(x) for x in first["pack_kv_int8"][1][2:4]] == [address(of_k), address(of_v)]
    packed_k, _, packed_kv = first["pack_kv_int8"][1][4:7]
    if pack_once:
        assert packed_k is None
        assert packed_kv is saved.packed_kv
    else:
        assert packed_kv is None
        assert address(first["pack_kv"][1][2]) == address(of_k)
    assert first["dk_dv"][1][0].packed_kv == address(packed_kv if pack_once else first["pack_kv"][1][3])
    defines, (arguments, *_) = first["forward"]
    assert defines["SMOOTH_V"] is smooth_v
    assert arguments.v_mean == address(of_v)
    assert arguments.documents == documents
    assert not any("SMOOTH_V" in first[name][0] for name in ("dk_dv", "dq"))


@pytest.mark.parametrize("unsigned_p", [False, True])
def test_unsigned_p_reaches_the_kernels_that_round_p(launched, sample, unsigned_p):
    q, k, v, grad_out = sample(9, head_dim=64)
    params = AttentionParams(Window.of(True), 0.1, SageConfig(unsigned_p=unsigned_p), "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=True))
    hopper.backward(grad_out, q, k, v, saved, params)
    macros = {name: defines["UNSIGNED_P"] for name, defines, _ in launched if "UNSIGNED_P" in defines}
    assert macros == {"forward": unsigned_p, "dk_dv": unsigned_p}  # a macro that is False is not defined


@pytest.mark.parametrize("operand_scales", ["block", "token"])
@pytest.mark.parametrize("pack_once", [True, False], ids=["packed once", "packed again"])
def test_scales_of_tokens_reach_all_kernels(launched, sample, operand_scales, pack_once):
    """What is saved has the size that the operator promises."""
    q, k, v, grad_out = sample(140, head_dim=64)
    axes = [Axis.of(140, block, None) for block in (64, 128)]
    config, is_token = SageConfig(operand_scales=operand_scales), operand_scales == "token"
    params = AttentionParams(Window.of(True), 0.1, config, "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=pack_once))
    hopper.backward(grad_out, q, k, v, saved, params)
    assert all(defines["TOKEN_SCALES"] is is_token for _, defines, _ in launched)
    shape = PackedLayout(is_token, packs_16bit=False).kv_shape(k, axes[1].blocks)
    assert saved.packed_kv.shape == (shape if pack_once else (0,))


@pytest.mark.parametrize("pack_once", [True, False], ids=["packed once", "packed again"])
def test_dq_finds_the_scales_of_tiles_before_dk_and_dv_use_them(launched, sample, pack_once):
    """One of P and one of dS for each tile of 128 x 64."""
    q, k, v, grad_out = sample(140, heads=4, kv_heads=2, head_dim=64)
    params = AttentionParams(Window.of(True), 0.1, replace(SageConfig.paper(), unsigned_p=True), "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=pack_once))
    hopper.backward(grad_out, q, k, v, saved, params)
    names = [name for name, _, _ in launched]
    assert names[-4:] == ["pack_grad", "pack_k_columns", "dq_tile_scales", "dk_dv"]
    for name, defines, _ in launched:
        assert (defines["TILE_Q"], defines["TILE_KV"], defines["Q_STEP"]) == (128, 64, 64), name
    first = {name: (defines, arguments) for name, defines, arguments in reversed(launched)}
    assert all(first[name][0]["UNSIGNED_P"] for name in ("forward", "dq_tile_scales", "dk_dv"))
    (dq, *_), (dk_dv, *_) = first["dq_tile_scales"][1], first["dk_dv"][1]
    assert dq.tile_scales == dk_dv.tile_scales is not None
    assert dq.packed_k_columns == address(first["pack_k_columns"][1][1])
    assert dq.axes.tile_counter != dk_dv.axes.tile_counter
    shape = PackedLayout(tile=(128, 64), packs_16bit=False).kv_shape(k, 3)
    assert saved.packed_kv.shape == (shape if pack_once else (0,))


@pytest.mark.parametrize("pack_once", [True, False], ids=["packed once", "packed again"])
def test_16_bit_s_reaches_all_kernels(launched, sample, pack_once):
    """Tokens have scales in the backward alone: the forward multiplies nothing in INT8."""
    q, k, v, grad_out = sample(140, head_dim=64)
    params = AttentionParams(Window.of(True), 0.1, SageConfig.accurate(), "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=pack_once))
    hopper.backward(grad_out, q, k, v, saved, params)
    names = [name for name, _, _ in launched]
    again = [] if pack_once else ["pack_kv", "pack_q"]
    assert names == ["pack_q", "pack_kv", "forward", *again, "pack_grad", "dk_dv", "pack_k_columns", "dq"]
    for name, defines, _ in launched:
        assert (defines["TILE_Q"], defines["TILE_KV"], defines["S_16BIT"]) == (64, 64, True), name
        assert defines["TOKEN_SCALES"] is (name != "forward"), name
    shape = PackedLayout(True, (64, 64), s_16bit=True, packs_16bit=False).kv_shape(k, 3)
    assert saved.packed_kv.shape == (shape if pack_once else (0,))


@pytest.mark.parametrize("products", [(), ("o",), ("dv",), ("o", "dv")], ids=str)
@pytest.mark.parametrize("pack_once", [True, False], ids=["packed once", "packed again"])
def test_16_bit_products_get_the_tensors_as_they_are(launched, sample, products, pack_once):
    """P is unsigned only in INT8 products."""
    q, k, v, grad_out = sample(9, head_dim=64)
    axes = [Axis.of(9, block, None) for block in (64, 128)]
    config = without_int8(*products, unsigned_p=len(products) < 2)
    params = AttentionParams(Window.of(True), 0.1, config, "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=pack_once))
    hopper.backward(grad_out, q, k, v, saved, params)
    o_16bit, dv_16bit = "o" in products, "dv" in products
    forward = ["token_sum", "token_mean", "pack_q", "pack_kv" if o_16bit else "pack_kv_int8", "forward"]
    backward = ["pack_grad", "dk_dv", "pack_k_columns", "dq"]
    names = [name for name, _, _ in launched]
    assert names == [*forward, *([] if pack_once else ["pack_kv", "pack_q"]), *backward]
    first = {name: (defines, arguments) for name, defines, arguments in reversed(launched)}
    for name, is_16bit in (("forward", o_16bit), ("pack_grad", dv_16bit), ("dk_dv", dv_16bit)):
        assert first[name][0]["P_16BIT"] is is_16bit, name
    for name, is_16bit in (("forward", o_16bit), ("dk_dv", dv_16bit)):
        assert first[name][0]["UNSIGNED_P"] is (config.unsigned_p and not is_16bit), name
    columns = first["pack_grad"][1][7]
    assert columns.shape[1] == 64 * 64 * (1 if dv_16bit else 2)
    shape = PackedLayout(packs_16bit=False).kv_shape(k, axes[1].blocks)
    assert saved.packed_kv.shape == (shape if pack_once else (0,))


@pytest.mark.parametrize("on", [False, True])
def test_the_residual_of_out_goes_from_the_forward_to_delta(launched, sample, on):
    q, k, v, grad_out = sample(9, head_dim=64)
    params = AttentionParams(Window.of(True), 0.1, without_int8("o", compensate_o=on), "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=True))
    hopper.backward(grad_out, q, k, v, saved, params)
    out, out_residual = saved.out, saved.out_residual
    assert out_residual.shape == (out.shape if on else (0,))
    first = {name: (defines, arguments) for name, defines, arguments in reversed(launched)}
    assert first["forward"][0]["COMPENSATE_O"] is on
    assert first["forward"][1][0].out_residual.data == address(out_residual if on else out)
    assert first["pack_grad"][0]["COMPENSATE_O"] is on
    assert first["pack_grad"][1][4].tensor.data == address(out_residual if on else out)


def test_kernels_of_the_backward_share_packed_q_and_have_tile_counters_of_their_own(launched, sample):
    q, k, v, grad_out = sample(9, head_dim=64)
    params = AttentionParams(Window.of(True), 0.1, DEFAULT_CONFIG, "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=True))
    hopper.backward(grad_out, q, k, v, saved, params)
    assert [name for name, _, _ in launched][-4:] == ["pack_grad", "dk_dv", "pack_k_columns", "dq"]
    first = {name: arguments for name, _, arguments in reversed(launched)}
    dk_dv, dq = first["dk_dv"][0], first["dq"][0]
    assert dk_dv.packed_q == dq.packed_q == address(saved.packed_q) == address(first["pack_grad"][1])
    assert dk_dv.packed_grad == dq.packed_grad == address(first["pack_grad"][6])
    assert dk_dv.packed_kv == dq.packed_kv == address(saved.packed_kv)
    assert dk_dv.axes.tile_counter != dq.axes.tile_counter


@pytest.mark.parametrize(
    ("head_dim", "last_keys_first_up_to"), [(40, 8192), (64, 8192), (72, 2048), (128, 2048)]
)
def test_up_to_which_length_the_one_backward_begins_with_the_last_keys(
    launched, sample, head_dim, last_keys_first_up_to
):
    q, k, v, grad_out = sample(9, head_dim=head_dim)
    params = AttentionParams(Window.of(True), 0.1, without_int8("dq"), "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=True))
    hopper.backward(grad_out, q, k, v, saved, params)
    assert {name: x for name, _, x in launched}["backward"][0].last_keys_first_up_to == last_keys_first_up_to


@pytest.mark.parametrize("products", [("dq",), ("dv", "dq")], ids=str)
def test_what_the_one_backward_launches(launched, sample, products):
    """One kernel, with neither K by columns nor a second read of anything, and one that rounds dQ."""
    q, k, v, grad_out = sample(9, heads=4, kv_heads=2, head_dim=64)
    axes = [Axis.of(9, block, None) for block in (64, 128)]
    params = AttentionParams(Window.of(True), 0.1, without_int8(*products), "hopper")
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=True))
    before = len(launched)
    hopper.backward(grad_out, q, k, v, saved, params)
    names = [name for name, _, _ in launched[before:]]
    assert names == ["pack_grad", "backward", "finish_dq"]
    (_, _, packed), (_, defines, (arguments, *_)), (_, _, (finish,)) = launched[before:]
    assert defines["P_16BIT"] == ("dv" in products)
    assert [arguments.packed_grad, arguments.packed_q_columns] == [address(x) for x in packed[6:8]]
    assert arguments.packed_q == address(saved.packed_q)
    assert arguments.packed_kv == address(saved.packed_kv)
    # A counter follows the turns of all packed blocks of queries.
    assert arguments.axes.tile_counter == arguments.turns + 4 * 4 * axes[0].blocks
    assert [finish.dq_sums, finish.turns] == [arguments.dq_sums, arguments.turns]
    assert [finish.axes.heads, arguments.axes.heads] == [4, 2]


# --- Tensors that are read where they are ------------------------------------------------------------------


@pytest.mark.parametrize("documents", [None, [0, 4, 9]], ids=["whole", "packed"])
@pytest.mark.parametrize("products", [(), ("o",), ("dq",), ("dv", "dq"), ("o", "dv", "dq", "dk")], ids=str)
def test_what_is_in_16_bits_is_packed_for_documents_alone(launched, sample, products, documents):
    """Else each kernel gets tensor maps of what it reads: V, dO, and Q for dK in 16 bits."""
    q, k, v, grad_out = sample(9, head_dim=64)
    boundaries = None if documents is None else torch.tensor(documents)
    params = AttentionParams(Window.of(True), 0.1, without_int8(*products), "hopper", boundaries)
    saved = hopper.forward(q, k, v, params._replace(pack_for_backward=True))
    hopper.backward(grad_out, q, k, v, saved, params)
    expected = {"forward": (v if "o" in products else None, None, None)}
    of_backward = (v, grad_out, q if "dk" in products else None)
    expected |= dict.fromkeys(["backward"] if "dq" in products else ["dk_dv", "dq"], of_backward)
    for name, defines, arguments in launched:
        assert defines.get("UNPACKED_16BIT", False) is (documents is None and name != "finish_dq"), name
        if name not in expected:
            continue
        maps = [getattr(arguments[2], tensor).opaque[0] for tensor in ("v", "grad", "q")]
        wanted = (None,) * 3 if documents else expected.pop(name)
        assert maps == [0 if x is None else x.data_ptr() for x in wanted], name
    assert documents or not expected


def test_which_tensors_are_copied_before_they_are_read():
    """Those whose channels are not contiguous, whose tokens are not aligned, or that are expanded."""
    x = torch.zeros(2, 3, 40, 64, dtype=torch.float16)
    token_major = torch.zeros(2, 40, 3, 64, dtype=torch.float16).transpose(1, 2)
    of_more_channels, one_head = torch.zeros(2, 3, 40, 72, dtype=torch.float16)[..., 8:], x[:, :1, ::2]
    for readable in (x, token_major, of_more_channels, one_head, x[:1].expand(1, 3, 40, 64)):
        assert mappable(readable) is readable
    every_other = torch.zeros(2, 3, 40, 128, dtype=torch.float16)[..., ::2]
    shifted = torch.zeros(2, 3, 40, 72, dtype=torch.float16)[..., 1:65]
    for unreadable in (every_other, shifted, x[:, :1].expand(2, 3, 40, 64), x[:, :, :1].expand(x.shape)):
        found = mappable(unreadable)
        assert found.is_contiguous()
        assert torch.equal(found, unreadable)


def test_a_thread_without_a_context_gets_one_for_its_first_tensor_map(monkeypatch):
    """As autograd's have none; any other error is raised at once."""
    calls, errors = [], ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_VALUE"]

    def encode(*arguments):
        calls.append("encode")
        if errors:
            raise RuntimeError(errors.pop(0))

    monkeypatch.setattr(tensor_map, "_encode", encode)
    monkeypatch.setattr(tensor_map, "make_current", lambda device: calls.append("make_current"))
    x = torch.zeros(1, 1, 1, 64, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        tensor_map.tensor_map(x)
    assert calls == ["encode", "make_current", "encode"]
    tensor_map.tensor_map(x)
    assert calls[3:] == ["encode"]
