"""Registers and spills of every kernel by architecture, as the tests compile them.

    python measurements/registers.py PART PARTS OUT.json
"""
import json, re, sys
sys.path.insert(0, ".")
from tests.sagebwd.kernels.ampere import test_sources as A
from tests.sagebwd.kernels.hopper import test_sources as H
out = []
def used(log):
    return (max(map(int, re.findall(r"Used (\d+) registers", log))), max(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))))
jobs = []
for p in A.variants():
    source, tile, d, arch, macros = p.values
    cta = A.cta_shape(source, d, tile, **A.shape_settings(macros))
    defines = A.defines_of(cta, d, tile, macros) | {"IS_CAUSAL": int("IS_WINDOWED" not in macros), "IS_BF16": True}
    jobs.append((A.ampere.sources_for(arch), arch, source, tile, d, macros, defines))
for p in H.variants():
    source, defines = p.values
    if defines["IS_BF16"] and "UNPACKED_16BIT" in defines and (defines["IS_CAUSAL"] or "IS_WINDOWED" in defines or source == "packing"):
        m = tuple(k for k in defines if k.isupper() and defines[k] is True and k not in ("UNPACKED_16BIT", "IS_BF16"))
        jobs.append((H.SOURCES, "sm_90a", source, None, defines["HEAD_DIM"], m, defines))
for p in H.backward_variants():
    d, causal, bf16, macros = p.values
    if bf16 and "UNPACKED_16BIT" in macros and (causal or "IS_WINDOWED" in macros):
        cta = H.CTA_SHAPES["backward", d, next((n for n in ("DK_16BIT", "P_16BIT") if n in macros), "")]
        defines = {"HEAD_DIM": d, "IS_CAUSAL": causal, "IS_BF16": bf16} | dict.fromkeys(macros, True)
        defines |= {"LAUNCH_THREADS": cta.threads, "LAUNCH_BYTES": cta.shared_bytes}
        jobs.append((H.SOURCES, "sm_90a", "backward", None, d, tuple(m for m in macros if m != "UNPACKED_16BIT"), defines))
print(len(jobs), flush=True)
part, parts = int(sys.argv[1]), int(sys.argv[2])
import time; t=time.time()
for i, (sources, arch, source, tile, d, macros, defines) in enumerate(jobs[part::parts]):
    _, log = A.compile_source(sources, source, defines, ["--ptxas-options=-v"])
    r, s = used(log)
    out.append({"architecture": arch, "source": source, "tile": tile, "head_dim": d, "macros": macros, "registers": r, "spilled_bytes": s})
    json.dump(out, open(sys.argv[3], "w"))
    if i % 20 == 0: print(i, round(time.time()-t), flush=True)
print("done")
