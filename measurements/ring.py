"""Causal attention of one sequence over four GPUs, forward and backward: ms of the slowest rank, by engine.

torchrun --nproc-per-node 4 ring.py OUT.json TOKENS: 16 heads of 128, bfloat16. ring: PyTorch's context
parallelism, load-balanced, through its FlashAttention operators; ulysses: all-to-all to heads and back.
"""
import json, statistics, sys, time, traceback
import torch, torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options
from torch.nn.functional import scaled_dot_product_attention as sdpa
from sagebwd import SageConfig, sage_attention
from sagebwd.config import PRESETS
from sagebwd.integrations import torch_flash
from sagebwd.metrics import relative_l2
import os
rank = int(os.environ["RANK"]); torch.cuda.set_device(rank); dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("context",))
N, H, D = int(sys.argv[2]), 16, 128
_cp_options.enable_load_balance = True
def draw(n=N):
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4, 1, H, n, D, device="cuda", dtype=torch.bfloat16, generator=g)
    x[1] += torch.randn(H, 1, D, device="cuda", dtype=torch.bfloat16, generator=g)
    return x.unbind(0)
def ring_inputs(n):
    tensors = [x.clone() for x in draw(n)]
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4):
        return [x.clone() for x in tensors]
def ring(own):
    *inputs, grad = own
    leaves = [x.detach().requires_grad_() for x in inputs]
    with context_parallel(mesh, buffers=[torch.zeros(8, device="cuda")], buffer_seq_dims=[0]):
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*(DTensor.from_local(x, mesh, [Shard(2)]) for x in leaves), 0.0, True)
        out = out.to_local()
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
def ulysses_inputs(n):
    return [x.chunk(4, 2)[rank].contiguous() for x in draw(n)]
def exchange(x): return all_to_all_single_autograd(x.contiguous(), None, None, mesh.get_group())
def by_heads(attend):
    def call(own):
        *inputs, grad = own
        leaves = [x.detach().requires_grad_() for x in inputs]
        whole = lambda x: exchange(x.unflatten(1, (4, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)
        out = attend(*map(whole, leaves))
        out = exchange(out.unflatten(2, (4, -1)).movedim(2, 0)).movedim(0, 1).flatten(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return call
def flash(*x):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION): return sdpa(*x, is_causal=True)
def cudnn(*x):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return sdpa(*x, is_causal=True)
def ours(config): return lambda *x: sage_attention(*x, is_causal=True, config=config)
variants = {"ulysses flash": (ulysses_inputs, by_heads(flash), None), "ulysses cudnn": (ulysses_inputs, by_heads(cudnn), None),
  "ulysses default": (ulysses_inputs, by_heads(ours(SageConfig())), None), "ulysses int8_scores": (ulysses_inputs, by_heads(ours(SageConfig.int8_scores())), None),
  "ring flash": (ring_inputs, ring, None), "ring default": (ring_inputs, ring, SageConfig())}
rows, small = [], {}
for name, (make, call, override) in variants.items():
    try:
        replaced = torch_flash.Override(override, "CUDA") if override else None
        small[name] = call(make(8192)); torch.cuda.synchronize()
        own = make(N); seconds = []
        for i in range(6):
            dist.barrier(); torch.cuda.synchronize(); t = time.perf_counter(); call(own); torch.cuda.synchronize()
            worst = torch.tensor(time.perf_counter() - t, device="cuda"); dist.all_reduce(worst, op=dist.ReduceOp.MAX); seconds.append(worst.item())
        if replaced: replaced.remove()
        base = small[name.split()[0] + " flash"]
        errors = torch.tensor([relative_l2(x, y) for x, y in zip(small[name], base)], device="cuda"); dist.all_reduce(errors, op=dist.ReduceOp.MAX)
        ms = 1e3 * statistics.median(seconds[1:])
        rows.append({"engine": name.split()[0], "attention": name.split()[1], "tokens": N, "ms": ms, "tflops_per_gpu": 3.5 * 2 * N * N * H * D / ms / 1e9 / 4, "relative_l2_to_flash_at_8192 (o dq dk dv)": errors.tolist(), "gib": torch.cuda.max_memory_allocated() / 2**30})
    except Exception as e:
        rows.append({"engine": name, "failed": str(e)[:300]}); traceback.print_exc()
    if rank == 0: print(rows[-1], flush=True)
if rank == 0: json.dump({"values": __doc__, "hardware": "4 × " + torch.cuda.get_device_name(), "torch": torch.__version__, "script": open(__file__).read(), "rows": rows}, open(sys.argv[1], "w"), indent=1)
dist.barrier(); os._exit(0)
