"""The counted bytes against what autograd saves and what is alive, on the real model."""

import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import sagebwd
from model import backends
from model.config import LlamaConfig
from model.kernels import cross_entropy
from model.kernels import norm_and_rotate as norm_kernels
from model.llama import Llama
from model.memory import Pass, activations
from trainer.parallel import _checkpointed

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 96, "d_model": 80, "n_heads": 4, "d_head": 24, "d_ffn": 200, "max_context": 256}
FULL = {"backend": "fpa"}
SAGE = {"backend": "sagebwd", "preset": "consistent"}


def build(config, attention, dtype, *, recompute=False):
    backend = backends.build(attention, device=CPU, dtype=dtype, d_head=config.d_head, is_gqa=config.is_gqa)
    llama = Llama(config, backend.attend)
    if recompute:
        for layer in llama.layers:
            layer.forward = _checkpointed(layer.forward, backend.saved_operators)
    return llama


def estimated(config, attention, dtype, sequences, context, *, device="cpu", **settings):
    shapes = ((sequences, heads, context, config.d_head) for heads in (config.n_heads, config.kv_heads))
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    how = {"compiled": False, "on_gpu": False, "recompute": False, **settings}
    work = Pass(sequences, context, dtype.itemsize, **how)
    return activations(config, work, backends.read(attention).saved_bytes(q, k, device=device))


def loss_of(llama, dtype, sequences, context):
    tokens = torch.randint(96, (sequences, context + 1))
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        return llama(tokens[:, :-1], tokens[:, 1:])


def saved_bytes(llama, dtype, sequences, context):
    """Bytes of all storages that autograd saves in a forward, besides parameters and buffers."""
    own = {x.untyped_storage().data_ptr() for x in (*llama.parameters(), *llama.buffers())}
    saved = {}

    def note(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with saved_tensors_hooks(note, lambda x: x):
        loss_of(llama, dtype, sequences, context)
    return sum(storage.nbytes() for address, storage in saved.items() if address not in own)


EAGER = [
    (FULL, torch.float32, {}, (2, 48)),
    (FULL, torch.bfloat16, {}, (3, 65)),
    (FULL, torch.float32, {"n_kv_heads": 2, "qk_norm": False, "tie_embeddings": False}, (2, 48)),
    (SAGE, torch.bfloat16, {"n_kv_heads": 1}, (2, 48)),
    ({"backend": "fpa", "sdpa": "math"}, torch.float32, {}, (2, 48)),
]


@pytest.mark.parametrize(("attention", "dtype", "changes", "shape"), EAGER)
def test_what_a_block_saves_to_the_byte(attention, dtype, changes, shape):
    one, two = (LlamaConfig(**{**SHAPE, **changes}, n_layers=layers) for layers in (1, 2))
    counted = [saved_bytes(build(config, attention, dtype), dtype, *shape) for config in (one, two)]
    block = estimated(one, attention, dtype, *shape)
    assert counted[1] - counted[0] == block.blocks + block.attention + block.weight_copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_recomputed_block_saves_to_the_byte(dtype):
    """Its input by autograd; the results of attention in the checkpoint's own cache, which no hook sees."""
    one, two = (LlamaConfig(**SHAPE, n_layers=layers) for layers in (1, 2))
    counted = [saved_bytes(build(c, FULL, dtype, recompute=True), dtype, 2, 48) for c in (one, two)]
    block = estimated(one, FULL, dtype, 2, 48, recompute=True)
    assert counted[1] - counted[0] == block.blocks == 2 * 48 * 80 * dtype.itemsize
    assert block.attention == 2 * 48 * 4 * (24 * dtype.itemsize + 4)


class Alive(TorchDispatchMode):
    """The most bytes of tensors alive at a time, of those that operators made within this context."""

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet(x.untyped_storage() for x in known)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        for x in tree_iter(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.seen:
                self._note(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return made

    def _note(self, storage):
        self.seen.add(storage)
        self.now += storage.nbytes()
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size):
        self.now -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "recompute"), [(4096, False), (96, False), (96, True)])
def test_the_peak_of_a_step_within_a_tenth(dtype, vocabulary, recompute):
    """The head decides, or the blocks, or the backward of one block."""
    config = LlamaConfig(**{**SHAPE, "vocab_size": vocabulary}, n_layers=4)
    llama = build(config, FULL, dtype, recompute=recompute)
    with Alive((*llama.parameters(), *llama.buffers())) as alive:
        loss_of(llama, dtype, 4, 128).backward()
    gradients = sum(p.nbytes for p in llama.parameters())
    memory = estimated(config, FULL, dtype, 4, 128, recompute=recompute)
    # The backward frees what the forward saved while it makes gradients.
    wanted = memory.total + max(0, gradients - memory.blocks - memory.attention)
    assert alive.peak == pytest.approx(wanted, rel=0.1)


class Traced(Exception):
    """Raised when the forward's graph is known, before anything is compiled."""


def bytes_made(graph):
    """Bytes that the forward of a partition hands to its backward or returns, without its own inputs."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    made = {node for node in output.args[0] if getattr(node, "op", None) == "call_function"}
    return sum(node.meta["val"].nbytes for node in made if isinstance(node.meta["val"], torch.Tensor))


@pytest.mark.parametrize(
    ("preset", "recompute"), [("default", False), ("consistent", True)], ids=["saved", "recomputed"]
)
def test_what_a_compiled_model_saves_to_the_byte(preset, recompute, monkeypatch):
    """By Inductor's partition of the graph that a Hopper GPU gets, traced here."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.compile_fx import compile_fx

    for kernels in (norm_kernels, cross_entropy):
        monkeypatch.setattr(kernels, "supports", lambda x: True)
    attention = {"backend": "sagebwd", "preset": preset}
    config = LlamaConfig(**{**SHAPE, "d_head": 40}, n_kv_heads=2, n_layers=1)
    dtype = torch.bfloat16
    llama = build(config, attention, dtype, recompute=recompute)
    monkeypatch.setattr(sagebwd.dispatch, "choose", lambda *_, **__: "hopper")
    found = []

    def inspect(graph, *_, **__):
        found.append(bytes_made(graph))
        raise Traced

    compiled = torch.compile(
        llama, dynamic=False, backend=lambda graph, x: compile_fx(graph, x, inner_compile=inspect)
    )
    with pytest.raises(BackendCompilerFailed, match="Traced"):
        loss_of(compiled, dtype, 2, 128)
    settings = {"compiled": True, "on_gpu": True, "recompute": recompute}
    block = estimated(config, attention, dtype, 2, 128, device="cuda", **settings)
    # Of the head: its input, which a recomputed block gives once more, an inverse RMS, the gradients of the
    # input and of the weight, and the loss.
    width, tokens = 2 * config.d_model, 2 * 128
    head = tokens * (width * (1 if recompute else 2) + 4) + width * config.vocab_size + 4
    assert found == [block.blocks + block.attention + block.weight_copies + head]
