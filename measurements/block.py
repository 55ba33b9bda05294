"""Compile the blocks or the whole model: what each costs at the start and per step. One GPU.

    PYTHONPATH=<checkout of branch block-compile>:<packages> python3 block.py OUT.json [--only 325m-sage] [--seconds 150]

Cases: 325m-sage (at most 150 s alone), 325m-cudnn, 35m-sage, 35m-cudnn (35M: about 90 s each); all: 8 minutes.
Also, only if named: 325m-8k-sage, 325m-8k-cudnn (2 sequences a pass, where the host is the limit).
A case: one process each way fills the caches, at the same time. That of the whole model then times its steps (A) and
waits; with warm caches and nothing beside it a process of blocks times its start and its steps (B); the waiting one
times its steps again (A); last, a process of the whole model with warm caches gives its start (and A once more).
Ways: whole (as main does on one GPU), block (the branch); body, only if named in --ways: embedding and all blocks as
one graph, head and loss as another (keeps fusions across blocks, lets AOTAutograd's cache work).
Whatever the deadline cuts off is missing from table and JSON; all else is written as it comes.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

BEGAN = time.time()
CACHE = os.environ.get("BLOCK_CACHE", f"/tmp/block_cache_{os.getuid()}")
SAGE, CUDNN = {"backend": "sagebwd"}, {"backend": "fpa", "sdpa": "cudnn"}
CASES = {  # model, attention, sequences, tokens of each
    "325m-sage": ("325m", SAGE, 16, 4096),
    "325m-cudnn": ("325m", CUDNN, 16, 4096),
    "35m-sage": ("35m", SAGE, 16, 1024),
    "35m-cudnn": ("35m", CUDNN, 16, 1024),
    "325m-8k-sage": ("325m", SAGE, 2, 4096),
    "325m-8k-cudnn": ("325m", CUDNN, 2, 4096),
}
MODELS = {
    "325m": dict(vocab_size=50304, d_model=1024, n_layers=20, n_heads=16, d_head=64, d_ffn=3072, max_context=4096),
    "35m": dict(vocab_size=50304, d_model=384, n_layers=8, n_heads=6, d_head=64, d_ffn=1152, max_context=1024),
    "tiny": dict(vocab_size=320, d_model=32, n_layers=3, n_heads=2, d_head=16, d_ffn=96, max_context=128),
}
FILLS, STEPS = 3, 12  # untimed steps (their losses are compared), timed steps


# ------------------------------------------------------------------ a process


def child(case, way, tiny):
    """Train a few steps; the last line printed is what was seen."""
    started = float(os.environ["BLOCK_STARTED"])
    import types

    import torch
    import torch._dynamo
    from torch._dynamo.utils import compile_times, counters

    from model import backends
    from model.config import LlamaConfig
    from model.llama import Llama
    from trainer import parallel
    from trainer.distributed import Ranks
    from trainer.optimizer import adamw
    from trainer.settings import HardwareSettings

    model, attention, sequences, context = CASES[case]
    if tiny:
        model, attention, sequences, context = "tiny", {"backend": attention["backend"]}, 2, 128
    device = torch.device("cpu" if tiny else "cuda")
    imported = time.time() - started
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(**MODELS[model])
    backend = backends.build(attention, device=device, dtype=torch.bfloat16, d_head=config.d_head, is_gqa=False)
    torch.manual_seed(1)
    llama = Llama(config, backend.attend)
    settings = {"device": device.type, "micro_batch": sequences, "dtype": "bfloat16"}
    hardware = HardwareSettings(**settings, compile=way == "block")
    called = parallel.place(llama, hardware, Ranks(0, 1, device), saved_operators=backend.saved_operators)
    if isinstance(called, tuple):
        raise SystemExit("PYTHONPATH is not a checkout of branch block-compile")
    if way == "whole":
        called = torch.compile(llama, dynamic=False)
    elif way == "body":
        body, output = torch.compile(body_of(llama), dynamic=False), torch.compile(llama.output, dynamic=False)
        called = lambda tokens, targets: output(body(tokens), targets)  # noqa: E731
    optimizer = adamw(llama, types.SimpleNamespace(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1))
    # Zipf-like tokens, as text has them.
    drawn = torch.multinomial(
        1.0 / torch.arange(1, config.vocab_size + 1), 4 * sequences * (context + 1), replacement=True,
        generator=torch.Generator().manual_seed(7),
    ).view(4, sequences, context + 1)
    batches = [(one[:, :-1].contiguous().to(device), one[:, 1:].contiguous().to(device)) for one in drawn]
    host, done = [], 0

    def step():
        """As trainer/loop.py: loss and gradient norm are read once."""
        nonlocal done
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = called(*batches[done % 4])
        loss.backward()
        host.append(1e3 * (time.perf_counter() - began))
        norm = parallel.clip_gradients(llama, 1.0)
        found = torch.stack([loss.detach(), norm]).tolist()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        return found

    built = time.time() - started
    while True:
        try:
            seen = [step()]
            break
        except torch.OutOfMemoryError:  # the other way fills its cache: what was compiled stays
            if "BLOCK_FILLS" not in os.environ:
                raise
            optimizer.zero_grad()
            torch.cuda.empty_cache()
            time.sleep(2)
    if not tiny:
        torch.cuda.synchronize()
    first = time.time() - started
    graphs = counters["stats"]["unique_graphs"]
    seen += [step() for _ in range(FILLS - 1)]
    if not tiny:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def timed():
        host.clear()
        times = []
        for _ in range(STEPS):
            began = time.perf_counter()
            step()
            if not tiny:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        return times

    fills = os.environ.get("BLOCK_FILLS")
    times = timed() if fills in (None, "whole") else []
    names, values = compile_times(repr="csv")
    traced = {k: sum(map(float, v.split(","))) if isinstance(v, str) else sum(v) for k, v in zip(names, values)}
    keep = ("_compile.compile_inner", "bytecode_tracing", "build_guards", "OutputGraph.call_user_compiler",
            "create_aot_dispatcher_function", "AOTAutogradCache.inductor_load", "fx_codegen_and_compile",
            "compile_fx.<locals>.bw_compiler")
    row = {
        "import s": imported, "built s": built, "first step s": first - built, "start s": first,
        "ms": times, "host ms": host, "seen": seen, "graphs": graphs,
        "graphs later": counters["stats"]["unique_graphs"] - graphs,
        "compile times s": {k: round(traced[k], 2) for k in keep if k in traced},
        "aot_autograd": dict(counters["aot_autograd"]),
        "inductor": {k: v for k, v in counters["inductor"].items() if "fxgraph" in k},
        "recompiles": {str(k): v for k, v in counters["recompiles"].items()},
        "peak GiB": 0 if tiny else torch.cuda.max_memory_allocated() / 2**30,
        "torch": torch.__version__, "gpu": "" if tiny else torch.cuda.get_device_name(),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    if fills == "whole":
        optimizer.zero_grad()
        if not tiny:
            torch.cuda.empty_cache()
        sys.stdin.readline()
        step()
        print(json.dumps({"ms": timed(), "host ms": host}), flush=True)


def body_of(llama):
    def body(tokens):
        x = llama.embed(tokens)
        cos, sin = llama.rotary(tokens.shape[1])
        for layer in llama.layers:
            x = layer(x, cos, sin, None)
        return x

    return body


# ------------------------------------------------------------------ all of them


def start(case, way, arguments, fills=False):
    folder = Path(CACHE)
    env = {**os.environ, "BLOCK_STARTED": str(time.time()), "PYTHONUNBUFFERED": "1"}
    env.update(TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor", TRITON_CACHE_DIR=f"{folder}/triton")
    env.setdefault("SAGEBWD_CACHE_DIR", f"{folder}/sagebwd")
    if fills:
        env["BLOCK_FILLS"] = way
    for name in ("inductor", "triton", "sagebwd"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    log = open(f"{arguments.out}.{case}.{way}{'.fill' * fills}.log", "w")
    command = [sys.executable, os.path.abspath(__file__), arguments.out, "--child", case, way]
    command += ["--tiny"] * arguments.tiny
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
    job.lines = queue.Queue()
    threading.Thread(target=read, args=(job,), daemon=True).start()
    return job


def read(job):
    for line in job.stdout:
        if line.startswith("{"):
            job.lines.put(json.loads(line))
    job.lines.put({"failed": f"rc {job.wait()}, see the logs"})


def next_row(job, arguments):
    """What the process saw; why not."""
    try:
        return job.lines.get(timeout=max(1.0, arguments.seconds - (time.time() - BEGAN)))
    except queue.Empty:
        job.kill()
        return {"failed": "cut off by the deadline"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES)[:4])
    parser.add_argument("--ways", nargs="+", choices=("whole", "block", "body"), default=["whole", "block"])
    parser.add_argument("--seconds", type=float, default=None, help="default 150 for one case, 560 for several")
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to try the script")
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child, arguments.tiny)
        return
    arguments.seconds = arguments.seconds or (150 if len(arguments.only) == 1 else 560)
    rows = {}

    def note(case, name, row):
        rows.setdefault(case, {})[name] = row
        Path(arguments.out).write_text(json.dumps(rows, indent=1))
        short = row.get("failed") or f"first step {row['first step s']:.1f} s, start {row['start s']:.1f} s"
        print(f"[{time.time() - BEGAN:5.0f} s] {case} {name}: {short}", flush=True)

    order = [way for way in ("block", "body", "whole") if way in arguments.ways]
    for case in arguments.only:
        jobs = {way: start(case, way, arguments, fills=True) for way in order}
        for way in order:
            row = next_row(jobs[way], arguments)
            note(case, f"{way}, cold", row)
        for way in order:
            if way == "whole" and "failed" not in row:
                job = jobs[way]
                job.stdin.write("\n")
                job.stdin.flush()
                row["ms again"] = next_row(job, arguments).get("ms", [])
                job.wait() if row["ms again"] else job.kill()
            job = start(case, way, arguments)
            note(case, way, next_row(job, arguments))
            job.kill() if job.lines.empty() and "failed" in rows[case][way] else job.wait()
    table(rows)


def table(rows):
    print(f"\n{'case, process':30} {'start s':>8} {'first s':>8} {'ms/step':>8} {'p10':>7} {'host ms':>8} "
          f"{'GiB':>6} {'graphs':>7}  losses of the first steps")
    for case, found in rows.items():
        for name, row in found.items():
            if "failed" in row:
                print(f"{case + ' ' + name:30} {row['failed']}")
                continue
            ms, host = sorted(row["ms"]) or [float("nan")], row["host ms"] or [float("nan")]
            losses = " ".join(f"{loss:.5f}" for loss, _ in row["seen"])
            print(f"{case + ' ' + name:30} {row['start s']:8.1f} {row['first step s']:8.1f} "
                  f"{statistics.median(ms):8.2f} {ms[len(ms) // 10]:7.2f} {statistics.median(host):8.2f} "
                  f"{row['peak GiB']:6.2f} {row['graphs']:3}+{row['graphs later']:<3}  {losses}")
        good = {name: row for name, row in found.items() if "failed" not in row}
        base = good.get("whole") or good.get("whole, cold")
        for name, row in good.items():
            if base and name in ("block", "body"):
                apart = max(abs(a[0] - b[0]) / a[0] for a, b in zip(base["seen"], row["seen"]))
                wholes = [statistics.median(one[key]) for n, one in good.items() if n.startswith("whole")
                          for key in ("ms", "ms again") if one.get(key)]
                ratio = statistics.median(row["ms"]) / statistics.mean(wholes)
                print(f"  {case}: {name} / whole: step {ratio:.4f} (whole {' and '.join(f'{w:.2f}' for w in wholes)}), "
                      f"start {row['start s'] - base['start s']:+.1f} s, memory {row['peak GiB'] - base['peak GiB']:+.2f} GiB, "
                      f"losses apart {apart:.1e} ({'rounding' if apart < 1e-3 else 'TOO MUCH: wrong'})")


if __name__ == "__main__":
    main()
