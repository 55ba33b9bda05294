import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, run_and_report
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from common import terminal
from tests import cli
from tests.cli import ROOT
from tests.processes import wait_until
from trainer import settings
from trainer import sweep as sweeps
from trainer.sweep import SweepSummary, refuse_what_cannot_be_trained

PARSER = OverridesParser.create()
OVERRIDES = ["data.path='a, b=$HOME/*.txt'", "optimizer.lr=1e-3,2e-3", 'sample_prompt="It\'s"']


@pytest.fixture
def begin(monkeypatch):
    """begin("seed=1,2", …) -> the summary of a sweep that begins, without a trace in this process."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setattr(sweeps, "exit_on_signals", lambda: None)
    monkeypatch.setenv("WANDB_RUN_GROUP", "")
    monkeypatch.delenv("WANDB_RUN_GROUP")  # and put back as it was

    def begun(*overrides, **sweeper):
        summary = SweepSummary()
        summary.on_multirun_start(hydra(overrides, **sweeper))
        return summary

    return begun


def hydra(overrides, **sweeper):
    choices = {"hydra/sweeper": "optuna"} if sweeper else {}
    own = {"overrides": {"task": list(overrides)}, "runtime": {"choices": choices}, "sweeper": sweeper}
    return OmegaConf.create({"hydra": own})


def end(summary, overrides, error=None):
    result = JobReturn(overrides=overrides, status=JobStatus.FAILED if error else JobStatus.COMPLETED)
    result.return_value = error
    summary.on_job_end(SimpleNamespace(), result)


def test_the_runs_of_a_sweep_have_a_group_of_their_own_unless_one_is_given(begin, monkeypatch):
    """W&B's own variable, which the processes of the runs inherit."""

    def group(*overrides):
        begin(*overrides)
        return os.environ["WANDB_RUN_GROUP"]

    first = group("seed=1,2", "steps=3", "logger=wandb")
    assert first.startswith("seed-1-2+steps-3-")
    monkeypatch.delenv("WANDB_RUN_GROUP")
    assert group("seed=1,2,3", "steps=3") != first
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert group("seed=1,2", "steps=3") == "mine"


def test_the_runs_of_a_sweep_do_not_share_a_run_of_wandb(begin, monkeypatch, capsys):
    for variable in ("WANDB_RUN_ID", "WANDB_NAME"):
        monkeypatch.setenv(variable, "mine")
    begin("seed=1")
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_NAME"]) == ("mine", "mine")
    begin("seed=1,2")
    assert not {"WANDB_RUN_ID", "WANDB_NAME"} & os.environ.keys()
    assert "WANDB_RUN_ID is ignored: it names one run, and 2 are planned" in capsys.readouterr().err


def test_a_sweeper_that_chooses_the_runs_is_summarized(begin, monkeypatch, capsys):
    """Optuna's: which runs there will be is not known, and the same command chooses others."""
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    summary = begin("optimizer.lr=interval(1e-4,1e-2)", n_trials=3)
    assert "3 are planned" in capsys.readouterr().err
    for rate in (1, 2):
        own = [f"optimizer.lr={rate}"]
        summary.on_job_start(hydra(own), task_function=None)
        if rate == 1:
            end(summary, own)
    summary._report()
    told = capsys.readouterr().err
    assert "1 of 2 runs finished, 1 interrupted\ninterrupted: python train.py optimizer.lr=2\n" in told


def test_the_command_of_a_failed_run_can_be_pasted(begin, capsys):
    summary = begin(*OVERRIDES)
    ((job, other),) = BasicSweeper.split_arguments(PARSER.parse_overrides(OVERRIDES), None)
    for one, error in ((job, ValueError("no such file")), (other, None)):
        summary.on_job_start(hydra(one), task_function=None)
        end(summary, one, error)
    summary._report()
    told = capsys.readouterr().err
    assert told.startswith("\n1 of 2 runs finished, 1 failed\n")
    assert "no such file" in told
    assert "The same command" not in told
    line = next(line for line in told.splitlines() if line.startswith("failed: "))
    python, script, *words = shlex.split(line.removeprefix("failed: "))
    assert (python, script) == ("python", "train.py")
    assert [one.value() for one in PARSER.parse_overrides(words)] == ["a, b=$HOME/*.txt", 1e-3, "It's"]


def test_the_summary_may_have_no_reader(begin, monkeypatch):
    """As after Ctrl-C with `2>&1 | tee log`, which ends tee, too."""
    summary, discarded = begin("seed=1,2"), []
    summary.on_job_start(hydra(["seed=1"]), task_function=None)
    monkeypatch.setattr(terminal, "discard", discarded.append)
    monkeypatch.setattr("sys.stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    summary._report()
    assert set(discarded) == {2}


def test_a_launcher_that_runs_them_elsewhere_reports_by_itself(begin, capsys):
    begin("seed=1,2")._report()
    assert capsys.readouterr().err == ""


SWEEP = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells have it ignored
from trainer.processes import ForwardedStop, exit_on_signals
atexit.register(print, "summary")
exit_on_signals()
with ForwardedStop() as stop:  # of a run; its own message and exit code are those that count
    stop.signal = signal.{name}
    stop.call_previous_handler()
print("went on")
os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_between_runs_leaves_time_for_the_summary(tmp_path, name):
    (tmp_path / "sweep.py").write_text(SWEEP.format(name=name))
    printed = cli.run([sys.executable, str(tmp_path / "sweep.py")], code=128 + getattr(signal, name))
    assert printed == "went on\nsummary\n"


INTERRUPTED_SWEEP = """
import train
from pathlib import Path
from trainer import settings, sweep
from common.errors import Interrupted

def run(run_settings):
    with Path(__file__).with_name("started").open("a") as file:
        print(run_settings.seed, file=file)
    raise Interrupted("stopped", 2)

train.run = run
settings.register()
sweep.register()
train.main()
"""


def test_an_interrupted_sweep_starts_no_other_run(tmp_path):
    (tmp_path / "sweep.py").write_text(INTERRUPTED_SWEEP)
    arguments = ["-m", "experiment=debug", "seed=1,2", f"runs_dir={tmp_path / 'runs'}"]
    cli.run([sys.executable, str(tmp_path / "sweep.py"), *arguments], code=128 + signal.SIGINT)
    assert (tmp_path / "started").read_text() == "1\n"


def refuse(*runs, launcher="basic", hydra=()):
    settings.register()
    known = {"job": {"config_name": "train"}, "overrides": {"hydra": ["hydra.mode=MULTIRUN", *hydra]}}
    config = OmegaConf.create({"hydra": known | {"runtime": {"choices": {"hydra/launcher": launcher}}}})
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        refuse_what_cannot_be_trained(config, [["experiment=debug", *run] for run in runs])


def test_runs_that_cannot_be_trained_are_listed_before_the_first_begins():
    refuse(["seed=1"], ["seed=2"])
    with pytest.raises(SystemExit) as stopped:
        refuse(["seed=1"], ["optimizer.lr=-1"], ["optimizer.lr=abc"], ["attention.sdpa=fast"])
    message = str(stopped.value)
    assert message.startswith("no run of this sweep was started:\npython train.py experiment=debug optimizer")
    words = ("optimizer.lr=-1.0 must be", "optimizer.lr=abc", "to Float", "attention.sdpa=fast is unknown")
    assert [text for text in words if text not in message] == []
    assert "seed=1" not in message


def test_runs_that_would_train_in_one_directory_are_refused():
    with pytest.raises(SystemExit, match="two runs of this sweep would train in run_dir=X"):
        refuse(["seed=1", "run_dir=X"], ["seed=2", "run_dir=X"])
    with pytest.raises(SystemExit, match="two runs of this sweep would train in experiment-debug"):
        refuse(["seed=1"], ["seed=1", "logger=files"])
    refuse(["seed=1", "run_dir=X"], ["seed=2", "run_dir=Y"])
    refuse(["seed=1", "run_dir=null"], ["seed=2", "run_dir=null"])
    refuse(["seed=1", "runs_dir=X"], ["seed=1", "runs_dir=Y"])
    refuse(["seed=1", "run_dir=runs/${seed}"], ["seed=2", "run_dir=runs/${seed}"])


def test_options_of_ones_own_are_found(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\nsteps: 0\n")
    with pytest.raises(SystemExit, match="steps=0 must be greater than zero"):
        refuse(["experiment=own"], hydra=[f"hydra.searchpath=[file://{tmp_path}]"])


def test_what_is_only_known_later_is_not_judged_here():
    refuse(["optimizer.lr=-1"], launcher="slurm")
    refuse(["sample_prompt=${hydra:job.num}"])


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
    began = {name: lines[0] for name, lines in outputs(tmp_path).items()}
    assert began == {f"experiment-debug+seed-{seed}": f"GPU , threads {cores}" for seed in (1, 2, 3)}


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


@pytest.mark.parametrize("jobs", ["0", "true"])
def test_a_number_of_jobs_that_is_none_is_refused(sweep, jobs):
    code, told = sweep("seed=1", f"hydra.launcher.jobs={jobs}")
    assert code == 1
    assert "must be the number of runs at a time, 1 or more" in told
    assert "Traceback" not in told


def test_under_torchrun_a_sweep_is_refused(sweep, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "17")
    code, _ = sweep("seed=1")
    assert "use hardware.devices=N, not torchrun" in code


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
