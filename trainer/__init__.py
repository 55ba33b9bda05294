"""The training loop and what it needs.

loop            read this first: a run from its settings to its weights, a step, and what follows each step
run             what it is built of, and how far it is
settings        every setting, with its type; the command line; checks: settings against each other
start           where a run starts: from which settings, weights or checkpoint, in which directory
run_directory   what a run leaves on disk; identity: which settings make a run what it is
checkpoint      complete or absent, and safe to read
optimizer       AdamW, Muon and the learning rate
distributed     ranks; parallel: a model on several devices
divergence      NaN and Inf end a run, outliers are logged; probe: error of INT8 attention
record          metrics, progress bar, log, W&B, TensorBoard; plot: pictures
export          weights for Hugging Face with their card; callbacks: a user's own code
estimate        memory and time of a run on GPUs, its disk; the table of plan=true
software        what a run is trained with
processes       stopping them, and commands in parallel; sweep: the runs of a sweep
"""

import os

# How OpenMP's threads wait for each other, read when torch is loaded, which is later. By default they spin: a
# thread whose partner has lost its core to another process then burns its own until the partner is back.
# Small steps have many short waits. On two cores that others used, too, a step of the debug model took 180 to
# 490 ms instead of 18 to 37 ms, one of llama_tiny 6.2 s instead of 1.9 s. What sleeping costs on idle cores
# has not been measured.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"
