"""The training loop and what it needs. Read `loop.py` first; `settings.py` lists every knob."""

import os

# How OpenMP's threads wait for each other, read when torch is loaded, which is later. By default they spin: a
# thread whose partner has lost its core to another process then burns its own until the partner is back.
# Small steps have many short waits. On two cores that others used, too, a step of the debug model took 180 to
# 490 ms instead of 18 to 37 ms, one of llama_tiny 6.2 s instead of 1.9 s. What sleeping costs on idle cores
# has not been measured.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"
