"""The Hopper kernels on a CPU, see ``EMULATED`` in sets.py: orders of threads and keys; what is saved."""

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.kernels.cuda import plan
from sagebwd.kernels.hopper import attention as hopper
from tests.inputs import gradients
from tests.sagebwd.kernels.inputs import NAMES, token_major
from tests.sagebwd.kernels.operators import attention
from tests.sagebwd.kernels.sets import FP16, boundaries_of, emulated_too, only, without_int8

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    emulated_too,
    only(lambda kernel_set: kernel_set.is_emulated and kernel_set.name == "hopper"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

STRICT, PAPER = SageConfig.strictly_causal(), SageConfig.paper()
#: Settings of the one backward kernel.
ONE_BACKWARD, S_ALONE = without_int8("dq", unsigned_p=True), SageConfig.int8_scores()
CAUSAL = {"is_causal": True}
#: The first of threads that run only when no other can, and how many: each warpgroup, and a helper.
LATE = (*((128 * warpgroup, 128) for warpgroup in range(4)), (416, 32))


@pytest.fixture
def in_all_orders(in_order):
    """in_all_orders(function): its results must be the same in whatever order threads run."""

    def in_all_orders(function):
        wanted = function()
        for order in ({"reverse": True}, *({"first": first, "count": count} for first, count in LATE)):
            assert all(map(torch.equal, in_order(function, **order), wanted)), order

    return in_all_orders


ORDERED = {
    "default": (DEFAULT_CONFIG, 64, 260, 260, CAUSAL),
    "strictly causal": (STRICT, 64, 260, 260, CAUSAL),
    "paper": (PAPER, 64, 200, 200, CAUSAL),
    "256 channels": (DEFAULT_CONFIG, 256, 130, 190, CAUSAL),
    "one backward": (ONE_BACKWARD, 128, 130, 190, {"is_causal": False}),
}


@pytest.mark.parametrize(("config", "head_dim", "n_q", "n_kv", "mask"), ORDERED.values(), ids=ORDERED.keys())
def test_the_order_in_which_threads_run_changes_nothing(
    kernel_set, in_all_orders, draw, config, head_dim, n_q, n_kv, mask
):
    """Each warpgroup late: whoever waits too little for it, or gives it back too early, shows."""
    heads = 2 if config == DEFAULT_CONFIG else 1
    inputs = draw(n_q, n_kv, batch=1, heads=heads, kv_heads=1, head_dim=head_dim, dtype=FP16)
    function = attention(kernel_set.name, config=config, **mask)
    in_all_orders(lambda: gradients(function, *inputs))


# --- The order of keys in the one backward -----------------------------------------------------------------


@pytest.fixture(params=[0, 2**30], ids=["first keys first", "last keys first"])
def order_of_keys(request, monkeypatch):
    """Each order at each head size and length."""
    monkeypatch.setattr(hopper, "LAST_KEYS_FIRST_UP_TO", {64: request.param, 128: request.param})
    plan.plan_of.cache_clear()


DOCUMENTS = (1, 64, 65, 0, 327, 2, 1)
#: (settings, head size, mask, queries, keys), or the lengths of documents
KEYS_IN_ORDER = {
    "causal, many channels": (S_ALONE, 128, CAUSAL, 270, 270),
    "full": (ONE_BACKWARD, 128, {}, 130, 333),
    "few keys": (S_ALONE, 64, CAUSAL, 400, 70),
    "window, hidden queries": (S_ALONE, 64, {"window_size": (70, 0)}, 330, 150),
    "packed": (S_ALONE, 64, CAUSAL, DOCUMENTS, DOCUMENTS),
    "packed, window": (ONE_BACKWARD, 128, {"window_size": (130, 5)}, DOCUMENTS, DOCUMENTS),
}


@pytest.mark.usefixtures("order_of_keys")
@pytest.mark.parametrize("case", KEYS_IN_ORDER.values(), ids=KEYS_IN_ORDER.keys())
def test_either_order_of_keys(check, sample, case):
    config, head_dim, mask, n_q, n_kv = case
    packed = {}
    if isinstance(n_q, tuple):
        packed, n_q, n_kv = {"cu_seqlens": torch.tensor(boundaries_of(n_q))}, sum(n_q), sum(n_kv)
    check(sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim), config=config, **mask, **packed)


@pytest.mark.parametrize("window_size", [(-1, 0), (70, 5)])
def test_each_document_has_its_own_order_of_keys(kernels, sample, monkeypatch, window_size):
    """Bit for bit the same in a pack and alone, on either side of the limit."""
    monkeypatch.setattr(hopper, "LAST_KEYS_FIRST_UP_TO", {64: 130})
    plan.plan_of.cache_clear()
    inputs = sample(392, heads=2, kv_heads=1)
    settings = {"window_size": window_size, "config": S_ALONE}
    packed = kernels(*inputs, cu_seqlens=torch.tensor([0, 129, 262, 262, 392]), **settings)
    for begin, end in ((0, 129), (129, 262), (262, 392)):
        alone = kernels(*(x[:, :, begin:end] for x in inputs), **settings)
        for name in NAMES:
            assert torch.equal(packed[name][:, :, begin:end], alone[name]), (name, begin)


@pytest.mark.usefixtures("order_of_keys")
def test_in_either_order_of_keys_that_of_threads_changes_nothing(kernel_set, in_all_orders, draw):
    inputs = draw(270, batch=1, heads=1, head_dim=64, dtype=FP16)
    function = attention(kernel_set.name, config=S_ALONE)
    in_all_orders(lambda: gradients(function, *inputs))


# --- What is saved -----------------------------------------------------------------------------------------


PACKED = [
    (None, SageConfig(smooth_v=True), None), ("inductor", SageConfig.consistent(), (200, 110)),
    (None, SageConfig.int8_scores(), (200, 110)), ("aot_eager", PAPER, None),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "config", "documents"), PACKED)
def test_what_is_packed_replaces_q_k_and_v_in_the_backward(
    kernel_set, draw, monkeypatch, tmp_path, backend, config, documents
):
    """Also as compiled, where the gradients are the same as without."""
    packed = {} if documents is None else {"cu_seqlens": torch.tensor(boundaries_of(documents))}
    q, k, v, grad_out = map(token_major, draw(310, batch=1, heads=2, kv_heads=2, head_dim=64, dtype=FP16))
    attend, saved = attention(kernel_set.name, config=config, **packed), []
    wanted = gradients(attend, q, k, v, grad_out)
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the user's may know older operators
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = (torch.compile(attend, backend=backend, fullgraph=True) if backend else attend)(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    for name, x, expected in zip(NAMES, found, wanted, strict=True):
        assert x.stride() == expected.stride(), name
        assert torch.equal(x, expected), name
    pointers = {x.data_ptr() for x in saved if x is not None}
    assert (q.data_ptr() in pointers) == (not config.is_int8("dk"))
    assert (k.data_ptr() in pointers) == (not config.is_int8("dq"))
    assert (v.data_ptr() in pointers) == (documents is None)  # packed only with documents
