"""hydra/launcher=local_gpus, with a fake train.py; tests/test_train.py has the real one."""

import os
import signal
import threading

import pytest
import torch
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, run_and_report
from hydra.core.global_hydra import GlobalHydra

from tests.cli import ROOT
from tests.processes import wait_until
from trainer import settings
from trainer import sweep as sweeps

#: Prints what it is given; fails with seed=2; leaves no DONE with seed=3; with seed=4 waits to be stopped.
FAKE = """
echo "GPU $CUDA_VISIBLE_DEVICES, threads $OMP_NUM_THREADS"; echo "$@"
case "$*" in
*seed=2*) echo "no luck with this seed"; exit 1;;
*seed=3*) exit 0;;
*seed=4*) trap 'exit 143' TERM; echo ready; while true; do sleep 0.05; done;;
esac
touch "$(dirname "$(readlink /proc/$$/fd/1)")/DONE"
"""


@pytest.fixture(autouse=True)
def signals_and_environment(monkeypatch):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for name in ("WANDB_RUN_GROUP", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # and put back as it was
        monkeypatch.delenv(name)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """sweep("seed=1,2", …) -> exit code and output of `train.py -m hydra/launcher=local_gpus …`, here."""
    script, at_exit = tmp_path / "fake.sh", []
    script.write_text(FAKE)
    monkeypatch.setattr(sweeps, "PROGRAM", ["sh", str(script)])
    monkeypatch.setattr("atexit.register", at_exit.append)
    settings.register()
    sweeps.register()

    def swept(*overrides):
        words = ["hydra.mode=MULTIRUN", "hydra/launcher=local_gpus", "experiment=debug", *overrides]
        GlobalHydra.instance().clear()
        hydra = Hydra.create_main_hydra2("train", create_config_search_path(str(ROOT / "configs")))
        code = 0
        try:
            run_and_report(lambda: hydra.multirun("train", no_task, [*words, f"runs_dir={tmp_path}"]))
        except SystemExit as end:
            code = end.code
        finally:
            GlobalHydra.instance().clear()
        for report in at_exit:
            report()
        told = capfd.readouterr()
        return code, told.out + told.err

    return swept


def no_task(config):
    raise AssertionError("the run belongs in a process of its own")


def outputs(folder):
    return {path.parent.name: path.read_text().splitlines() for path in sorted(folder.glob("*/output.txt"))}


def test_the_runs_get_gpus_and_the_overrides_of_a_run_alone(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-7,-1")  # CUDA ends the list at the -1
    gpus = ("hardware=gpu", "hardware.micro_batch=2", "hardware.devices=1,2")
    code, told = sweep(*gpus, "sample_prompt='a, ${hydra:job.num}'", "hydra.verbose=false")
    assert code == 0, told
    assert "2 runs on GPU 3,GPU-7, 2 at a time; each prints to output.txt in its directory\n" in told
    assert all(f" on GPU {gpus}\n" in told for gpus in ("3", "3,GPU-7"))
    assert "2 of 2 runs finished" in told
    assert "Traceback" not in told
    (one, own), (two, _) = outputs(tmp_path).values()
    assert (one, two) == ("GPU 3, threads ", "GPU 3,GPU-7, threads ")
    alone = "experiment=debug hardware=gpu hardware.micro_batch=2 hardware.devices=1 "
    alone += "sample_prompt='a, ${hydra:job.num}' "
    assert f"{alone}runs_dir={tmp_path} " in own
    assert own.endswith("hydra.verbose=false hydra.job.num=0 hydra.job.id=0")
    assert "launcher" not in own
    assert "MULTIRUN" not in own


def test_finished_and_failed_runs_are_told_apart(sweep, tmp_path):
    code, told = sweep("seed=1,2,3", "hydra.launcher.jobs=2")
    assert code == 1
    assert "1 of 3 runs finished, 2 failed\n" in told
    assert "ended with exit code 0" in told
    assert told.count("  no luck with this seed") == 1
    cores = max(1, (os.cpu_count() or 1) // 2)
    assert {name: lines[0] for name, lines in outputs(tmp_path).items()} == {
        f"experiment-debug+seed-{seed}": f"GPU , threads {cores}" for seed in (1, 2, 3)
    }


def test_an_estimate_is_printed_and_trains_nothing(sweep, tmp_path):
    code, told = sweep("seed=1,2", "plan=true")
    assert (code, told.count("memory per device")) == (0, 2)
    assert outputs(tmp_path) == {}


def test_asked_to_stop_it_counts_truly(sweep, tmp_path):
    waits = tmp_path / "experiment-debug+seed-4" / "output.txt"

    def stop():
        wait_until(lambda: waits.exists() and "ready" in waits.read_text(), 120)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    code, told = sweep("seed=1,4,5")
    assert code == 128 + signal.SIGINT
    assert "1 of 3 runs finished, 1 interrupted, 1 not started; the same command continues\n" in told
    assert told.count("interrupted") == 1


@pytest.mark.parametrize("jobs", ["0", "two", "true"])
def test_a_number_of_jobs_that_is_none_is_refused(sweep, jobs):
    code, told = sweep("seed=1", f"hydra.launcher.jobs={jobs}")
    assert code == 1
    assert "must be the number of runs at a time, 1 or more" in told
    assert "Traceback" not in told


def test_under_torchrun_a_sweep_is_refused(sweep, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "17")
    code, _ = sweep("seed=1")
    assert "use hardware.devices=N, not torchrun" in code
