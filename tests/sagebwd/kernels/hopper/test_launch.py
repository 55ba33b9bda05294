"""CTAs are those of the sources; which tensors are copied before they are read. None of it needs a GPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from sagebwd.kernels.cuda.compile import compile_source
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.hopper import shapes, tensor_map
from sagebwd.kernels.hopper.tensor_map import mappable

# --- Python and CUDA agree ---------------------------------------------------------------------------------

MACROS_OF_SHAPES = {"": {}, "P_16BIT": {"P_16BIT": True}, "DK_16BIT": {"P_16BIT": True, "DK_16BIT": True}}


def check_syntax(source, head_dim, operands, threads, shared_bytes, **macros):
    """Compile as far as static_assert, which takes milliseconds; raise what the compiler says."""
    defines = {"HEAD_DIM": head_dim, "IS_CAUSAL": 1, "LAUNCH_THREADS": threads, "LAUNCH_BYTES": shared_bytes}
    defines |= MACROS_OF_SHAPES.get(operands, {}) | shapes.tile_macros(head_dim, operands) | macros
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
    for has_token_scales in token_scales:
        for unpacked in (False, True):
            macros = {"TOKEN_SCALES": has_token_scales, "UNPACKED_16BIT": unpacked}
            check_syntax(source, head_dim, operands, cta.threads, cta.shared_bytes, **macros)
    wrongs = () if operands else ({"consumers": cta.consumers + 1}, {"shared_bytes": cta.shared_bytes + 16})
    for change in wrongs:
        wrong = cta._replace(**change)
        with pytest.raises(RuntimeError, match="static assertion failed"):
            check_syntax(source, head_dim, operands, wrong.threads, wrong.shared_bytes, **macros)


# --- Tensors that are read where they are ------------------------------------------------------------------


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
    driver = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    results = driver.CUresult
    calls, errors = [], [results.CUDA_ERROR_INVALID_CONTEXT, results.CUDA_ERROR_INVALID_VALUE]
    room = ctypes.create_string_buffer(bytes(range(128)), 128)
    encoded = SimpleNamespace(getPtr=lambda: ctypes.addressof(room))

    def encode(*arguments):
        calls.append("encode")
        return (errors.pop(0), None) if errors else (results.CUDA_SUCCESS, encoded)

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    monkeypatch.setattr(tensor_map, "make_current", lambda device: calls.append("make_current"))
    x = (512, (1, 1, 1, 64), (64, 64, 64, 1), False, torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        tensor_map.encode(*x)
    assert calls == ["encode", "make_current", "encode"]
    assert tensor_map.encode(*x) == bytes(range(128))
    assert calls[3:] == ["encode"]
