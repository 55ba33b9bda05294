"""What each change to a training step is worth: one GPU, 325M model, 16 sequences of 4,096 tokens.

    PYTHONPATH=<checkout with branch speed>:... python3 .gpu/speed/measure.py OUT.json [--seconds 235]

Needs the branch's model/ on PYTHONPATH and base_norm_and_rotate.py beside this file. One process per compiled
variant fills a shared compile cache (nothing runs on the GPU there), then this process alternates the variants.
All share weights and optimizer. Correctness first: kernels against float64, then gradients against the base's.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

BEGAN = time.monotonic()
HERE = Path(__file__).resolve().parent
CACHE = os.environ.get("SPEED_CACHE", "/tmp/speed_cache")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{CACHE}/inductor")
os.environ.setdefault("TRITON_CACHE_DIR", f"{CACHE}/triton")
sys.path.insert(0, str(HERE))

import base_norm_and_rotate as base_kernels  # noqa: E402
import torch  # noqa: E402
import torch._functorch.config  # noqa: E402
import torch._inductor.config  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from model import backends  # noqa: E402
from model import llama as L
from model.config import LlamaConfig, flops_per_token  # noqa: E402
from trainer.optimizer import adamw  # noqa: E402
from trainer.parallel import clip_gradients  # noqa: E402

SAGE, CUDNN = {"backend": "sagebwd"}, {"backend": "fpa", "sdpa": "cudnn"}
# name: attention, MLP, Q and K, "early" update, CUDA graphs; most important first (later ones fall to the clock)
VARIANTS = {
    "sage base": (SAGE, "base", "base", False, False),
    "sage all": (SAGE, "kernel", "joint", False, False),
    "sage gate+up": (SAGE, "inductor", "base", False, False),
    "sage gate+up, kernel": (SAGE, "kernel", "base", False, False),
    "sage all, early update": (SAGE, "kernel", "joint", True, False),
    "cudnn base": (CUDNN, "base", "base", False, False),
    "cudnn all": (CUDNN, "kernel", "joint", False, False),
    "sage all, graphs": (SAGE, "kernel", "joint", False, True),
}
PEAK = 989.4e12


def left(arguments):
    return arguments.seconds - (time.monotonic() - BEGAN)


# ------------------------------------------------------------------ the model as it was


def base_mlp(self, x):
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def inductor_mlp(self, x):
    gate, up = L.side_by_side(x, self.gate_proj, self.up_proj).chunk(2, -1)
    return self.down_proj(F.silu(gate) * up)


def base_norm_and_rotate(x, norm, cos, sin):
    if base_kernels.supports(x):
        return base_kernels.norm_and_rotate(x, norm.weight, norm.eps, cos, sin)
    return L.rotate(norm(x.float()), cos, sin).to(x.dtype)


def base_attention(self, x, cos, sin, cu_seqlens=None):
    q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
    q, k = base_norm_and_rotate(q, self.q_norm, cos, sin), base_norm_and_rotate(k, self.k_norm, cos, sin)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = self.attend(q, k, v, is_causal=True, enable_gqa=self.enable_gqa)
    return self.o_proj(out.transpose(1, 2).flatten(2))


def shape(arguments):
    if arguments.tiny:
        return LlamaConfig(vocab_size=256, d_model=128, n_layers=2, n_heads=2, d_head=64, d_ffn=256,
                           max_context=128), 2, 128
    return LlamaConfig(vocab_size=50304, d_model=1024, n_layers=20, n_heads=16, d_head=64, d_ffn=3072,
                       max_context=4096), 16, 4096


def built(name, config, device):
    attention, mlp, qk, _, graphs = VARIANTS[name]
    if device.type == "cpu" and attention is CUDNN:
        attention = {"backend": "fpa"}
    backend = backends.build(attention, device=device, dtype=torch.bfloat16, d_head=config.d_head, is_gqa=False)
    torch.manual_seed(1)
    made = L.Llama(config, backend.attend)
    for layer in made.layers:
        if mlp != "kernel":
            layer.mlp.forward = types.MethodType({"base": base_mlp, "inductor": inductor_mlp}[mlp], layer.mlp)
        if qk == "base":
            layer.self_attn.forward = types.MethodType(base_attention, layer.self_attn)
    return made, ("reduce-overhead" if graphs and device.type == "cuda" else None)


def share(model, owner):
    """The parameters and buffers of `owner` in place of the model's own."""
    for (_, mine), (_, other) in zip(model.named_modules(), owner.named_modules(), strict=True):
        for key in list(mine._parameters):
            if mine._parameters[key] is not None:
                mine._parameters[key] = other._parameters[key]
        for key in list(mine._buffers):
            mine._buffers[key] = other._buffers[key]


def configure():
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.cache_size_limit = 64
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True


def compile_only(name, arguments, device):
    """Fill the cache: stop before anything runs."""
    from torch._inductor.compile_fx import compile_fx

    torch._inductor.config.compile_threads = 4
    config, sequences, context = shape(arguments)
    model, mode = built(name, config, device)
    model = model.to(device)

    def backend(graph, inputs):
        if mode:
            from torch._inductor import config as inductor
            from torch._inductor import list_mode_options

            with inductor.patch(list_mode_options(mode)):
                compile_fx(graph, inputs)
        else:
            compile_fx(graph, inputs)
        sys.stdout.flush()
        os._exit(0)

    tokens = torch.zeros(sequences, context, dtype=torch.int64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        torch.compile(model, dynamic=False, backend=backend)(tokens, tokens)


# ------------------------------------------------------------------ a step, as trainer/loop.py does it


class Run:
    def __init__(self, config, sequences, context, device):
        self.device, self.config, self.sequences, self.context = device, config, sequences, context
        self.owner, _ = built("sage base", config, device)
        self.owner = self.owner.to(device)
        self.optimizer = adamw(self.owner, types.SimpleNamespace(
            lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1))
        self.start = {name: p.detach().clone() for name, p in self.owner.named_parameters()}
        generator = torch.Generator().manual_seed(7)
        # Zipf-like tokens, as text has them: the embedding's gradient adds many rows into few.
        weights = 1.0 / torch.arange(1, config.vocab_size + 1)
        drawn = torch.multinomial(weights, sequences * (context + 1) * 4, replacement=True, generator=generator)
        drawn = drawn.view(4, sequences, context + 1)
        pin = device.type == "cuda"
        self.batches = [tuple(t.contiguous().pin_memory() if pin else t.contiguous() for t in (b[:, :-1], b[:, 1:]))
                        for b in drawn]
        self.step_number = 0
        self.host_ms = 0.0

    def reset(self):
        with torch.no_grad():
            for name, p in self.owner.named_parameters():
                p.copy_(self.start[name])
                p.grad = None
        self.optimizer.state.clear()
        self.step_number = 0

    def step(self, compiled, *, early=False, graphs=False, keep=None):
        if graphs:
            for p in self.owner.parameters():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
        loss = torch.zeros((), device=self.device)
        batch = [t.to(self.device, non_blocking=True) for t in self.batches[self.step_number % 4]]
        began = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16):
            micro = compiled(*batch)
        micro.backward()
        self.host_ms = 1e3 * (time.perf_counter() - began)
        loss += micro.detach()
        if keep is not None:
            keep.update((name, p.grad.detach().clone()) for name, p in self.owner.named_parameters())
        norm = clip_gradients(self.owner, 1.0)
        values = torch.stack([loss, norm])
        if early:
            host = torch.empty(2, pin_memory=True)
            host.copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            self.optimizer.step()
            ready.synchronize()
            found = host.tolist()
        else:
            found = values.tolist()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not graphs)
        self.step_number += 1
        return found


def kernels_right(device):
    """The kernels against float64 on the model's shapes (odd token counts), relative L2 of results and gradients."""
    from model.kernels import norm_and_rotate, swiglu

    def error(found, wanted):
        return ((found.double() - wanted).norm() / wanted.norm()).item()

    torch.manual_seed(0)
    found = {}
    gate_up = (2 * torch.randn(1, 1037, 6144, device=device)).bfloat16().requires_grad_()
    g = torch.randn(1, 1037, 3072, device=device).bfloat16()
    out = swiglu.swiglu(gate_up)
    (grad,) = torch.autograd.grad(out, gate_up, g)
    exact = gate_up.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up
    (wanted_grad,) = torch.autograd.grad(wanted, exact, g.double())
    found["swiglu"] = [error(out, wanted.detach()), error(grad, wanted_grad)]
    for kv in (16, 4):
        qk = torch.randn(2, 1037, 16 + kv, 64, device=device).bfloat16().requires_grad_()
        gains = [torch.rand(64, device=device).add(0.5).requires_grad_() for _ in range(2)]
        cos, sin = (t.float().to(device) for t in L.rotary_tables(1037, 64, 10000.0))
        out = torch.cat(norm_and_rotate.norm_and_rotate(qk, kv, *gains, 1e-6, cos, sin), 2)
        g = torch.randn_like(out)
        grads = torch.autograd.grad(out, (qk, *gains), g)
        x, a, b = (t.detach().double().requires_grad_() for t in (qk, *gains))
        gain = torch.stack([a] * 16 + [b] * kv)
        wanted = L.rotate(x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain, cos.double(), sin.double())
        wanted_grads = torch.autograd.grad(wanted, (x, a, b), g.double())
        found[f"norm_and_rotate, {kv} key heads"] = [error(out, wanted.detach()),
                                                      *map(error, grads, wanted_grads)]
    return found


def products(device, tokens):
    """ms and TFLOP/s of the matrix products by cuBLAS, layouts as Inductor calls them."""
    rows, c = [], 1024
    x = torch.randn(tokens, c, device=device).bfloat16()
    for width in (1024, 2048, 3072, 6144):
        w = (0.02 * torch.randn(width, c, device=device)).bfloat16()
        y = torch.randn(tokens, width, device=device).bfloat16()
        calls = {
            "forward": lambda x=x, w=w: x @ w.T,
            "grad x": lambda y=y, w=w: y @ w,
            "grad w": lambda x=x, y=y: y.T @ x,
        }
        for kind, call in calls.items():
            times = []
            for _ in range(12):
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                call()
                b.record()
                b.synchronize()
                times.append(a.elapsed_time(b))
            ms = statistics.median(times[3:])
            rows.append({"product": kind, "width": width, "ms": ms, "tflops": 2e-9 * tokens * c * width / ms})
        del w, y
    return rows


GROUPS = {
    "attention": ("sage", "flash", "fmha", "cudnn", "forward_kernel", "pack", "quant", "dkv", "dq", "attn", "mean"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "optimizer, clip": ("multi_tensor", "foreach", "adam", "lpnorm"),
}


def profiled(run, compiled, **how):
    from torch.profiler import ProfilerActivity, profile

    run.step(compiled, **how)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run.step(compiled, **how)
        run.step(compiled, **how)
        torch.cuda.synchronize()
    events = sorted((e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA
                     and not getattr(e, "is_user_annotation", False)
                     and not e.name.startswith(("Optimizer.", "## Call"))), key=lambda e: e.time_range.start)
    by_name, gaps, end, previous = {}, [], None, None
    for e in events:
        total = by_name.setdefault(e.name, [0.0, 0])
        total[0] += e.time_range.elapsed_us() / 2e3
        total[1] += 1
        if end is not None and e.time_range.start - end > 30:
            gaps.append(((e.time_range.start - end) / 1e3, previous[:60], e.name[:60]))
        if end is None or e.time_range.end > end:
            end, previous = e.time_range.end, e.name
    groups = dict.fromkeys((*GROUPS, "other"), 0.0)
    for name, (ms, _) in by_name.items():
        low = name.lower()
        products_first = any(k in low for k in GROUPS["matrix products"])
        group = "matrix products" if products_first else next(
            (g for g, keys in GROUPS.items() if any(k in low for k in keys) and not low.startswith("triton_")), "other")
        groups[group] += ms
    top = sorted(((ms, n // 2, name) for name, (ms, n) in by_name.items()), reverse=True)[:25]
    return {"kernels_ms": sum(ms for ms, _ in by_name.values()), "groups_ms": groups, "top": top,
            "gaps_ms_of_two_steps": sorted(gaps, reverse=True)[:8]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--compile", metavar="VARIANT")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--seconds", type=float, default=235)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to try the script")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    configure()
    if arguments.compile:
        compile_only(arguments.compile, arguments, device)
        return
    names = [n for n in VARIANTS if not arguments.only or n in arguments.only]
    result = {"torch": torch.__version__, "rows": {}, "seconds": {}}
    if device.type == "cuda":
        result["gpu"] = torch.cuda.get_device_name()

    def write():
        Path(arguments.out).write_text(json.dumps(result, indent=1))

    def note(what):
        result["seconds"][what] = round(time.monotonic() - BEGAN, 1)
        print(f"[{result['seconds'][what]:6.1f} s] {what}", flush=True)

    # One process per graph: "early" has the graph of "all".
    jobs = {}
    for name in names:
        if not VARIANTS[name][3] and not arguments.tiny:
            log = open(f"/tmp/speed_compile_{len(jobs)}.log", "w")
            jobs[name] = subprocess.Popen(
                [sys.executable, __file__, arguments.out, "--compile", name, *(["--tiny"] * arguments.tiny)],
                stdout=log, stderr=subprocess.STDOUT)
    if device.type == "cuda":
        result["kernel_errors"] = kernels_right(device)
        print(result["kernel_errors"])
        assert all(e < 4e-3 for errors in result["kernel_errors"].values() for e in errors), "kernels are wrong"
    for name, job in jobs.items():
        try:
            rc = job.wait(max(5, min(130 - (time.monotonic() - BEGAN), left(arguments) - 60)))
        except subprocess.TimeoutExpired:
            job.kill()
            rc = "killed"
        note(f"compiled: {name} (rc {rc})")
    if device.type == "cuda":
        result["products"] = products(device, 65536)
        note("matrix products")
    config, sequences, context = shape(arguments)
    run = Run(config, sequences, context, device)
    compiled, base_gradients = {}, {}
    plain = [n for n in names if not VARIANTS[n][4]]

    def prepare(name):
        """Compile, three steps from the start; losses, and the first gradients against the base's."""
        if VARIANTS[name][3]:
            compiled[name] = compiled["sage all"]
        else:
            model, mode = built(name, config, device)
            share(model, run.owner)
            backend = {"backend": "aot_eager"} if arguments.tiny else {}
            compiled[name] = torch.compile(model, dynamic=False, mode=mode, **backend)
        early, graphs = VARIANTS[name][3:]
        family = name.split()[0]
        losses, row = [], result["rows"].setdefault(name, {})
        for again in ("", " again") if name == "sage base" else ("",):
            run.reset()
            own = {}
            losses = [run.step(compiled[name], early=early and device.type == "cuda", graphs=graphs,
                               keep=own if i == 0 else None) for i in range(3)]
            if family not in base_gradients:
                base_gradients[family] = (losses, own)
            first_losses, first = base_gradients[family]
            row["same bits" + again] = losses == first_losses and all(torch.equal(own[n], first[n]) for n in own)
            row["loss difference" + again] = max(abs(a[0] - b[0]) for a, b in zip(losses, first_losses))
            row["gradient difference" + again] = max(
                ((own[n] - first[n]).norm() / first[n].norm()).item() for n in own)
        row["losses"] = [pair[0] for pair in losses]
        note(f"ready: {name}, bits {row['same bits']}, loss {row['loss difference']:.2e}, "
             f"gradient {row['gradient difference']:.2e}")
        write()

    def timed(name, times, count):
        early, graphs = VARIANTS[name][3:]
        how = {"early": early and device.type == "cuda", "graphs": graphs}
        run.optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            run.step(compiled[name], **how)
        for _ in range(count):
            began = time.perf_counter()
            run.step(compiled[name], **how)
            times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
            result["rows"][name]["host ms of forward and backward"] = run.host_ms

    def summarize(times):
        for name, found in times.items():
            ms = statistics.median(found)
            row = result["rows"][name]
            tokens = sequences * context
            row |= {"ms": ms, "p10": sorted(found)[len(found) // 10], "tokens/s": 1e3 * tokens / ms, "n": len(found),
                    "mfu": 1e3 * tokens / ms * flops_per_token(config, context) / PEAK}
            if device.type == "cuda" and "peak_gib" not in row:
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        write()

    times, ready = {}, []
    for name in plain:
        if left(arguments) < 45 and ready:
            note(f"no time left for {name}")
            continue
        if name.split()[0] not in base_gradients:
            base_gradients.clear()  # 1.3 GB of the other family
        prepare(name)
        ready.append(name)
    base_gradients.pop("cudnn", None)
    for _ in range(3):
        if left(arguments) < 25:
            break
        for name in ready:
            timed(name, times, 4)
        summarize(times)
    note("timed")
    if device.type == "cuda":
        for name in ("sage base", "sage all"):
            if name in ready and left(arguments) > 12:
                result["rows"][name]["profile"] = profiled(run, compiled[name])
        note("profiled")
        write()
    for name in names:
        if VARIANTS[name][4] and left(arguments) > 30 and "sage all" in ready:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                reference = result["rows"]["sage all"]["losses"]
                prepare(name)
                result["rows"][name]["same bits"] = reference == result["rows"][name]["losses"]  # as "sage all"
                timed(name, times, 8)
                summarize(times)
            except Exception as error:
                result["rows"][name]["failed"] = str(error)[:300]
            note("graphs")
    write()

    for name in ("sage base", "sage all"):
        found = result["rows"].get(name, {}).get("profile")
        if found:
            print(f"\n{name}: kernels {found['kernels_ms']:.1f} ms a step, idle "
                  f"{result['rows'][name]['ms'] - found['kernels_ms']:.1f};",
                  {k: round(v, 1) for k, v in found["groups_ms"].items()})
            print("  longest gaps (two steps):", [(round(g, 2), a[:24], b[:24]) for g, a, b in found["gaps_ms_of_two_steps"][:4]])
            for ms, count, kernel in found["top"]:
                print(f"  {ms:8.2f} ms {count:4d}  {kernel[:100]}")
    print("\nproduct    width     ms  TFLOP/s")
    for row in result.get("products", []):
        print(f"{row['product']:8} {row['width']:7} {row['ms']:6.3f} {row['tflops']:8.0f}")
    print("\nvariant                     ms    p10   MFU  tokens/s  host ms  same bits  loss diff.  grad diff.  GiB")
    for name, row in result["rows"].items():
        if "ms" in row:
            print(f"{name:24} {row['ms']:7.1f} {row['p10']:6.1f} {row['mfu']:6.2%} {row['tokens/s']:8,.0f} "
                  f"{row['host ms of forward and backward']:8.1f} {row['same bits']!s:>9} {row['loss difference']:.2e} "
                  f"{row['gradient difference']:.2e} {row.get('peak_gib', 0):.1f}")
        else:
            print(name, row)
    base = result["rows"].get("sage base", {})
    print("base again (null): same bits", base.get("same bits again"), "gradient", base.get("gradient difference again"))


if __name__ == "__main__":
    main()
