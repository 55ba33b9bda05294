"""The built switch dp_fp16_accumulation on one H100: right, bit-equal, and how fast with throttled tensor cores.

    PYTHONPATH=. python measurements/dp16.py OUT.json            (about 60 s; compiles 16 at a time)

First correctness: kernels="ampere" against the reference and float64. Then forward and backward with each
product repeated as scripts/bench/throttled.py says, off and on in turns, predicted for an RTX 4090; packing counted as 18 and 20 bytes an element.
Last the same calls unthrottled with all their packing, in ms: on Hopper fp16 sums have no higher rate, so "on" may lose a little there.
"""
import json, os, statistics, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

FOLDER = Path(os.environ.setdefault("DP_FOLDER", tempfile.mkdtemp(prefix="dp16-")))
os.environ["SAGEBWD_CACHE_DIR"] = str(FOLDER / "cache")

import torch
from sagebwd import SageConfig, reference, sage_attention
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.metrics import relative_l2
from scripts.bench import throttled
from scripts.bench.registry import Shape, build_sagebwd
from scripts.bench.timing import draw_inputs, run_both

CONFIGS = {"default": SageConfig(), "paper": SageConfig.paper()}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMBINATIONS = [("default", "bf16"), ("default", "fp16"), ("paper", "bf16")]
PLAIN = 1  # how often a product is done, unthrottled
plain, launch = ampere.sources_for, ampere._launch


def config_of(preset, on):
    return replace(CONFIGS[preset], dp_fp16_accumulation=on)


def prepare(preset, on, dtype, shape):
    device = torch.device("cuda")
    return build_sagebwd(config_of(preset, on), shape, device, kernels="ampere"), draw_inputs(shape, DTYPES[dtype], device, seed=0)


def sources(times):
    return plain("sm_90") if times == PLAIN else throttled.throttled_sources(plain("sm_90"), times, Path(tempfile.mkdtemp(dir=FOLDER)))


# --- Compiling, 16 processes at a time ---------------------------------------------------------------------

if len(sys.argv) > 2 and sys.argv[1] == "--compile":
    preset, dtype, d, on, times = sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "True", int(sys.argv[6])
    own = sources(times)
    ampere.sources_for = lambda architecture: own
    run_both(*prepare(preset, on, dtype, Shape(1, 1, 256, d, True)))
    torch.cuda.synchronize()
    sys.exit()


def compile_one(job):
    subprocess.run([sys.executable, __file__, "--compile", *map(str, job)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


jobs = [(p, t, d, on, times) for times in (*throttled.TIMES, PLAIN) for d in (128, 64) for p, t in COMBINATIONS for on in (False, True)]
jobs += [(p, t, 256, on, PLAIN) for p, t in COMBINATIONS[:2] for on in (False, True)]
with ThreadPoolExecutor(16) as pool:
    list(pool.map(compile_one, jobs))

# --- Right? ------------------------------------------------------------------------------------------------


def gradients(inputs, config, kernels, **mask):
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    out = sage_attention(*leaves, config=config, kernels=kernels, enable_gqa=True, **mask)
    return (out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))


def values(kind, n, d, dtype):
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(1, 4, n, d, device="cuda", generator=g) for _ in range(4))
    if kind == "dO * 2^-20":
        do *= 2.0**-20
    if kind == "rows of dO 2^20 apart":
        do[:, :, ::2] *= 2.0**-20
    if kind == "a token of V * 1000":
        v[:, :, 70] *= 1000
    return [x.to(DTYPES[dtype]) for x in (q, k, v, do)]


checks, wrong = [], []
MASKS = {"causal": {"is_causal": True}, "full": {}, "window": {"window_size": (70, 3)}}
CASES = [(p, t, d, "causal", kind) for p, t in COMBINATIONS for d in (64, 128, *((256,) if p == "default" else ()))
         for kind in ("Gaussian", "a token of V * 1000", *(("dO * 2^-20", "rows of dO 2^20 apart") if t == "bf16" else ()))]
CASES += [("default", "bf16", 64, mask, "Gaussian") for mask in ("full", "window")]
for preset, dtype, d, mask, kind in CASES:
    inputs, options = values(kind, 777, d, dtype), MASKS[mask]
    exact = reference.exact_attention(*inputs, **options)
    on, again, off = (gradients(inputs, config_of(preset, x), "ampere", **options) for x in (True, True, False))
    spec = gradients(inputs, config_of(preset, True), "reference", **options)
    row = {"preset": preset, "dtype": dtype, "d": d, "mask": mask, "values": kind, "same_bits_twice": all(map(torch.equal, on, again)),
           "out_dv_as_without": torch.equal(on[0], off[0]) and torch.equal(on[3], off[3]),
           "from_reference": [relative_l2(x, y) for x, y in zip(on, spec)],
           "error": [relative_l2(on[i], x) for i, x in ((1, exact.dq), (2, exact.dk))],
           "error_without": [relative_l2(off[i], x) for i, x in ((1, exact.dq), (2, exact.dk))]}
    row["small_rows_dq"] = [relative_l2(x[1][:, :, ::2], exact.dq[:, :, ::2]) for x in (on, off)]
    row["ratio"] = max(x / y for x, y in (*zip(row["error"], row["error_without"]), row["small_rows_dq"]))
    bound = .008 if dtype == "bf16" else .005
    row["right"] = (row["same_bits_twice"] and row["out_dv_as_without"] and row["ratio"] < 1.1 and max(row["from_reference"]) < bound
                    and on[1].isfinite().all().item())
    checks.append(row)
    if not row["right"]:
        wrong.append(row)
poisoned = values("Gaussian", 300, 64, "bf16")
for i, poison in ((2, torch.nan), (2, torch.inf), (3, torch.nan), (3, -torch.inf)):
    inputs = [x.clone() for x in poisoned]
    inputs[i][:, :, 7, 3] = poison
    found, spec = (gradients(inputs, config_of("default", True), x) for x in ("ampere", "reference"))
    same = all(torch.equal(x.isnan(), y.isnan()) and not x.isinf().any() for x, y in zip(found, spec))
    checks.append({"values": f"{poison} in {'q k v dO'.split()[i]}", "right": same})
    if not same:
        wrong.append(checks[-1])

# --- Fast? -------------------------------------------------------------------------------------------------

SOURCES = {times: sources(times) for times in (*throttled.TIMES, PLAIN)}
events = []


def timed(name, *args, **kwargs):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch(name, *args, **kwargs)
    end.record()
    events.append((name == "forward", start, end))


ampere._launch = timed


def measure(times, attend, inputs):
    """ms of the forward kernel, of the backward kernel, and of the whole call."""
    ampere.sources_for = lambda architecture: SOURCES[times]
    events.clear()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    start.record()
    run_both(attend, inputs)
    end.record()
    torch.cuda.synchronize()
    ms = {is_forward: a.elapsed_time(b) for is_forward, a, b in events}
    return ms[True], ms[False], start.elapsed_time(end)


rows = []
sms = torch.cuda.get_device_properties(0).multi_processor_count
for preset, dtype in COMBINATIONS:
    for d in (64, 128):
        for n in (4096, 16384):
            shape = Shape(16384 // n, 2048 // d, n, d, True)
            calls = {on: prepare(preset, on, dtype, shape) for on in (False, True)}
            ways = [(times, on) for times in (*throttled.TIMES, PLAIN) for on in calls]
            found = {way: [] for way in ways}
            for turn in range(8):
                for way in ways:
                    one = measure(way[0], *calls[way[1]])
                    if turn > 0:  # the first loads the kernels
                        found[way].append(one)
            ms = {way: [statistics.median(x) for x in zip(*own)] for way, own in found.items()}
            tflops = {}
            for on in calls:
                throttled.PACKING_BYTES = 20 if on else 18
                tflops[on] = throttled.predicted_tflops(shape, {t: sum(ms[t, on][:2]) for t in throttled.TIMES}, 1.98, sms)
            rows.append({"preset": preset, "dtype": dtype, "d": d, "n": n, "ms_forward_backward_call": {str(k): v for k, v in ms.items()},
                         "predicted_tflops": {"off": tflops[False], "on": tflops[True]}, "gain": tflops[True] / tflops[False] - 1,
                         "unthrottled_gain": ms[PLAIN, False][2] / ms[PLAIN, True][2] - 1})

with open(sys.argv[1], "w") as file:
    json.dump({"values": __doc__, "hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "assumed_clock_ghz": 1.98,
               "checks": checks, "rows": rows}, file, indent=1)
for r in checks:
    if "ratio" in r:
        print(f"{r['preset']:8}{r['dtype']} D {r['d']:3} {r['mask']:7}{r['values']:22} from reference {max(r['from_reference']):.4f}  "
              f"errors of dQ, dK {r['error'][0]:.4f} {r['error'][1]:.4f}, largest ratio to off {r['ratio']:.3f}  {'right' if r['right'] else 'WRONG'}")
for r in rows:
    print(f"{r['preset']:8}{r['dtype']} D {r['d']:3} N {r['n']:5} predicted off {r['predicted_tflops']['off']:.0f} on {r['predicted_tflops']['on']:.0f} "
          f"TFLOP/s {r['gain']:+.1%}   unthrottled call {r['unthrottled_gain']:+.1%}")
print(f"{len(checks) - len(wrong)} of {len(checks)} checks right; wanted: predicted +7% or more in every line")
for r in wrong:
    print("WRONG", r)
