#!/bin/bash
# One run on several nodes of a SLURM cluster. When its time is up it saves and is requeued, until finished:
#   sbatch --partition=NAME --nodes=2 --gpus-per-node=8 scripts/slurm.sh attention=sagebwd run_dir=runs/NAME
# Start it in the repository, on a file system that all nodes share. Do not set hardware.devices: torchrun
# starts one process for each GPU of the job.
#SBATCH --job-name=sagebwd
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -u

python=${PYTHON:-.venv/bin/python}
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 40000))  # two jobs may share their first node
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds that the ranks have to save

srun --kill-on-bad-exit=0 "$python" -m torch.distributed.run \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-endpoint="$first_node:$port" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
    train.py "$@" &
run=$!

# SLURM signals only this script; srun passes the signal on to the nodes, where the ranks save and stop.
asked=
trap 'asked=yes; kill -USR1 $run' USR1
trap 'kill -TERM $run' TERM
wait $run
code=$?
while kill -0 $run 2>/dev/null; do  # a trap ends the wait before srun has ended
    wait $run
    code=$?
done
[[ -n $asked && $code != 0 ]] && exec scontrol requeue "$SLURM_JOB_ID"
exit $code
