"""The training loop and what it needs.

loop            read this first: a run from its settings to its weights; run: what it is built of (build),
                step: one optimizer step; events: what follows each step, in order
start           weights or the checkpoint of another run to start from; callbacks: a user's own code
settings        every setting, with its type; the command line; identity: which settings make a run what it is
checks          settings against each other
optimizer       AdamW, Muon and the learning rate; evaluate: validation
distributed     ranks; parallel: a model on several devices
checkpoint      seal and safe_load: what makes one complete, and safe to read
run_directory   what a run leaves on disk, and whether it may go on there
record          metrics, progress bar, log, W&B, TensorBoard; plot: pictures
export          weights for Hugging Face with their card
divergence      NaN and Inf end a run; spikes: outliers; probe: error of INT8 attention; profiling
estimate        memory, time and disk of a run, the table of plan=true; machine: what there is here, code too
launch          ranks of a run, or commands in parallel, on this machine; interrupt: stopping them
sweep           the runs of a sweep
"""

import os

# How OpenMP's threads wait for each other, read when torch is loaded, which is later. By default they spin: a
# thread whose partner has lost its core to another process then burns its own until the partner is back.
# Small steps have many short waits. On two cores that others used, too, a step of the debug model took 180 to
# 490 ms instead of 18 to 37 ms, one of llama_tiny 6.2 s instead of 1.9 s. What sleeping costs on idle cores
# has not been measured.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"
