import os
import signal
import subprocess
import time

import pytest
from hydra import compose, initialize_config_dir

from tests.cli import ROOT
from trainer import settings


def test_the_slurm_launcher_composes_and_takes_overrides():
    """Against the plugin's own typed settings, which refuse unknown keys."""
    settings.register()
    overrides = ["hydra/launcher=slurm", "hydra.launcher.partition=fast", "hydra.launcher.gpus_per_node=8"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        launcher = compose("train", overrides, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.partition, launcher.gpus_per_node, launcher.tasks_per_node) == ("fast", 8, 1)
    assert launcher.max_num_timeout > 0  # requeued at the time limit
    assert launcher.additional_parameters.requeue


FAKE_SCONTROL = """#!/bin/bash
echo "$@" >> $FAKE/scontrol_arguments
[[ $1 == show ]] && echo node1
exit 0
"""

FAKE_SRUN = """#!/bin/bash
echo "$@" > $FAKE/srun_arguments
trap 'sleep 0.3; touch $FAKE/saved; exit 138' USR1
[[ -n ${FINISH:-} ]] && exit $FINISH
while true; do sleep 0.05; done
"""


def batch_script(folder, **environment):
    """scripts/slurm.sh on a cluster of pretence, started."""
    for name, text in (("scontrol", FAKE_SCONTROL), ("srun", FAKE_SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    here = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "FAKE": str(folder)}
    cluster = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    command = ["bash", "scripts/slurm.sh", "tps=260k"]
    return subprocess.Popen(command, cwd=ROOT, env=here | cluster | environment)


def test_the_batch_script_requeues_a_run_that_saved_on_the_clusters_signal(tmp_path):
    script = batch_script(tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "srun_arguments").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # both have set their traps
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=30) == 0
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "scontrol_arguments").read_text().splitlines()[-1] == "requeue 17"
    started = (tmp_path / "srun_arguments").read_text()
    assert "--nnodes=2" in started
    assert "--rdzv-endpoint=node1:20017" in started
    assert started.rstrip().endswith("train.py tps=260k")


@pytest.mark.parametrize("code", [0, 1])
def test_the_batch_script_does_not_requeue_what_ended_by_itself(tmp_path, code):
    assert batch_script(tmp_path, FINISH=str(code)).wait(timeout=30) == code
    assert "requeue" not in (tmp_path / "scontrol_arguments").read_text()
