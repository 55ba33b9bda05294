"""train.py as a user runs it: in processes of its own, killed, continued, in parallel, in sweeps."""

import re
import signal
import sys
import time

import pytest

from tests import warm
from tests.cli import assert_same_run, kill_at_step, losses, metrics, run, run_fresh


def test_a_whole_run(command, tmp_path):
    run_dir = tmp_path / "run"
    output = run(command("attention=sagebwd", f"run_dir={run_dir}"))
    records = metrics(run_dir)
    assert len(losses(run_dir)) == 8
    assert losses(run_dir)[-1] < losses(run_dir)[0]
    assert [record["step"] for record in records if "val_loss" in record] == [4, 8]
    assert records[-1]["tokens"] == 8 * 256
    assert records[-1]["sample"].startswith("The ")
    left = ("config.yaml", "loss.png", "log.txt", "DONE", "checkpoints/step_00000008", "weights/config.json")
    assert all((run_dir / name).exists() for name in left)
    assert "8/8" in output
    assert "is finished; delete it" in run(command("attention=sagebwd", f"run_dir={run_dir}"))
    assert metrics(run_dir) == records


@pytest.mark.parametrize(("number", "devices"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_asked_to_stop_it_saves_and_continues_exactly(command, datasets, tmp_path, number, devices):
    overrides = ("steps=40", "checkpoint_every=1000", "hardware.micro_batch=2")
    stopped, whole = (f"run_dir={tmp_path / name}" for name in ("stopped", "whole"))
    train = warm.run if devices == 1 else lambda settings: warm.two_ranks(settings, [], [])
    train(warm.debug_settings(datasets, *overrides, whole))
    asked = command(*overrides, f"hardware.devices={devices}", stopped)
    code, output = kill_at_step(asked, tmp_path / "stopped", 5, kill=number)
    assert code == 128 + number, output
    assert "the same command continues" in output
    assert "Traceback" not in output
    assert len(list((tmp_path / "stopped" / "checkpoints").iterdir())) == 1
    assert "continuing" in train(warm.debug_settings(datasets, *overrides, stopped))
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_run_whose_processes_ended_without_done_has_failed(command, tmp_path):
    ends = "callbacks.mine={_target_: os._exit, _args_: [0]}"
    output = run(command("hardware.devices=2", "hardware.micro_batch=2", ends, f"run_dir={tmp_path}"), code=1)
    assert "has no DONE" in output


SWEEP = ("-m", "attention=fpa,sagebwd", "model.qk_norm=false", "steps=3")


def test_a_sweep_trains_its_grid_and_then_only_what_is_missing(command, tmp_path):
    first = run(command(*SWEEP, f"runs_dir={tmp_path}"))
    assert "2 of 2 runs finished" in first
    runs = sorted(path.parent for path in tmp_path.glob("*/DONE"))
    assert len(runs) == 2
    grown = {path: (path / "metrics.jsonl").stat().st_mtime_ns for path in runs}

    (runs[1] / "DONE").unlink()  # as if it had been killed
    again = run(command(*SWEEP, f"runs_dir={tmp_path}"))
    assert "is finished; delete it" in again
    assert "continuing" in again
    assert "2 of 2 runs finished" in again
    assert sorted(path.parent for path in tmp_path.glob("*/DONE")) == runs
    assert {path: (path / "metrics.jsonl").stat().st_mtime_ns for path in runs if path != runs[1]} == {
        path: when for path, when in grown.items() if path != runs[1]
    }

    (runs[1] / "DONE").unlink()
    alone = [f"attention={'sagebwd' if 'sagebwd' in runs[1].name else 'fpa'}", *SWEEP[2:]]
    output = run(command("-m", *alone, "hydra/launcher=local_gpus", f"runs_dir={tmp_path}"))
    assert "1 of 1 runs finished" in output
    assert "continuing" in (runs[1] / "output.txt").read_text()
    assert (runs[1] / "loss.png").read_bytes().startswith(b"\x89PNG")  # by a process that imported everything
    assert sorted(path.parent for path in tmp_path.glob("*/DONE")) == runs


def test_a_failing_run_does_not_stop_the_others_and_the_exit_code_tells(command, tmp_path):
    overrides = ("-m", "optimizer.lr=1e30,1e-3", "tps.warmup_steps=0", "steps=3", f"runs_dir={tmp_path}")
    output = run(command(*overrides), code=1)
    assert "1 of 2 runs finished" in output
    assert re.search(r"failed: .*optimizer.lr=1e\+30", output)
    assert "is not finite" in output
    assert len(list(tmp_path.glob("*/DONE"))) == 1


#: One of each kind: found before Hydra, by the sweep, by the checks, in the data. More in tests/trainer.
REFUSED = [
    (["optimiser.lr=1"], "optimizer.lr"),
    (["-m", "attention=fpa,sagebwd"], "two runs of this sweep would train in"),
    (["hardware.micro_batch=3"], "hardware.micro_batch=2 or 4"),
    (["data=text", "data.path=no_such_book.txt"], "no_such_book.txt"),
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED, ids=lambda value: " ".join(value))
def test_bad_command_lines_stop_within_seconds(command, tmp_path, overrides, named):
    began = time.monotonic()
    output = run(command(*overrides, f"run_dir={tmp_path / 'run'}"), code=1)
    assert time.monotonic() - began < 30  # a loaded machine; about 3 s alone
    assert named in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_help_teaches_without_importing_what_only_training_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    needed = ["trainer.loop", "torch.distributed.checkpoint", "torch._dynamo", "sympy"]
    program = (
        "import atexit, runpy, sys; sys.argv[0] = 'train.py'; "
        f"atexit.register(lambda: print('imported', [name for name in {needed} if name in sys.modules])); "
        "runpy.run_path('train.py', run_name='__main__')"
    )
    output = run_fresh([sys.executable, "-c", program, "--help"])
    for text in (
        "attention: fpa, sagebwd",
        "tps: 2.1m, 260k",
        "python train.py attention=sagebwd tps=260k",
        "  lr: 3.0e-05                      # peak learning rate",
        "  sdpa: null                       # null: the fastest kernel",
        "imported []",
    ):
        assert text in output
    # Whatever it does, compiled kernels are nobody else's.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inductor", "triton"]


@pytest.mark.parametrize("program", ["train.py", "-mscripts.compare", "-mdata.prepare"])
def test_a_missing_package_is_said_in_one_line(program):
    output = run_fresh([sys.executable, "-S", program], code=1)
    assert re.fullmatch(r"No module named '\w+': not installed for .*\n", output)


def test_a_program_that_imports_the_packages_has_its_own_tracebacks(tmp_path):
    program = "import sys, data.prepare, trainer.processes; print(sys.excepthook is sys.__excepthook__)"
    (tmp_path / "program.py").write_text(program)
    assert run([sys.executable, str(tmp_path / "program.py")]) == "True\n"
