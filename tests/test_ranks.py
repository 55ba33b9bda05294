"""Runs of several ranks: they compute what one does, and end together, with the reason, when one fails."""

import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run

import trainer.loop
from common.errors import Interrupted, LostRanks, TrainingError
from tests import warm
from tests.cli import assert_same_run, losses, metrics, start, wait_for_step
from tests.processes import descendants
from trainer import distributed, identity, software
from trainer.processes import StopRequest


def rolled_back(run_dir: Path, copy: Path) -> Path:
    """A copy of a finished run as it was after its checkpoint of step 2."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000004")
    (copy / "DONE").unlink()
    return copy


def test_all_layouts_train_the_same_and_continue_each_other(datasets, tmp_path):
    """One rank and two; copies of the model, shares of it, of sequences, with and without recomputation."""

    def named(name, *overrides):
        common = ("hardware.micro_batch=1", "eval_sequences=7", "attention=sagebwd", "probe.every=4")
        short = ("steps=4", "checkpoint_every=2", "eval_every=2", "sample_tokens=1")
        return warm.debug_settings(datasets, *common, *short, f"run_dir={tmp_path / name}", *overrides)

    def muon(name, *overrides):
        cheap = ("attention=fpa", "probe.every=0", "sample_tokens=0", "eval_every=4")
        return named(f"muon/{name}", "optimizer=muon", *cheap, *overrides)

    short = tmp_path.parent / f"{tmp_path.name}.jsonl"
    short.write_text("".join(json.dumps({"text": "words " * (i % 9)}) + "\n" for i in range(900)))

    def masked(name, *overrides):
        text = ("data=jsonl", f"data.path={short}", "data.tokenizer=bytes", "data.mask_documents=true")
        return named(f"masked/{name}", *text, *overrides, "hardware.micro_batch=2")

    recomputed = ("hardware.parallel=fsdp", "hardware.recompute=blocks")
    # Each of the three starts imports once; what continues another run starts from a copy of it.
    assert warm.train_all(named("one"), muon("one"), masked("one"), ranks=1) == [[""] * 3]
    rolled_back(tmp_path / "one", tmp_path / "one_to_fsdp")
    told = warm.train_all(
        named("two_ddp", "hardware.parallel=ddp"),
        named("two_fsdp", "hardware.parallel=fsdp"),
        named("two_recomputed", *recomputed),
        named("two_context", "hardware.context_parallel=2"),
        named("one_to_fsdp", "hardware.parallel=fsdp"),
        muon("two_fsdp", "hardware.parallel=fsdp"),
        masked("two_ddp", "hardware.parallel=ddp"),
        masked("two_context_fsdp", "hardware.context_parallel=2", *recomputed),
    )
    assert told == [[""] * 8] * 2
    rolled_back(tmp_path / "two_ddp", tmp_path / "ddp_to_one")
    rolled_back(tmp_path / "two_fsdp", tmp_path / "fsdp_to_one")
    rolled_back(tmp_path / "muon" / "two_fsdp", tmp_path / "muon" / "fsdp_to_one")
    told = warm.train_all(named("ddp_to_one"), named("fsdp_to_one"), muon("fsdp_to_one"), ranks=1)
    assert told == [[""] * 3]
    runs = sorted(
        path.name for path in tmp_path.iterdir() if path.is_dir() and path.name not in ("muon", "masked")
    )
    assert len(runs) == 8
    for name in runs:
        assert_close(tmp_path / "one", tmp_path / name)
    assert_same_run(tmp_path / "two_fsdp", tmp_path / "two_recomputed")
    for name in ("two_ddp", "two_context_fsdp"):
        assert_close(tmp_path / "masked" / "one", tmp_path / "masked" / name)
    for name in ("two_fsdp", "fsdp_to_one"):
        # Muon multiplies in bfloat16: these runs differ by up to 1.4e-5 in the loss, 1.1e-4 in the norm.
        # Orthogonalizing the halves of each matrix by themselves would differ by 3e-3.
        assert_close(tmp_path / "muon" / "one", tmp_path / "muon" / name, records=5, tolerance=3e-4)


def assert_close(expected: Path, found: Path, records: int = 7, tolerance: float = 2e-5) -> None:
    """The same records but for the rounding of sums in another order."""
    left_records, right_records = metrics(expected), metrics(found)
    assert len(left_records) == len(right_records) == records
    for left, right in zip(left_records, right_records, strict=True):
        assert left.keys() == right.keys()
        for key in left.keys() & {"loss", "val_loss", "grad_norm", "lr"}:
            assert left[key] == pytest.approx(right[key], rel=tolerance), (found.name, key, left, right)


def as_two_nodes(command: list[str]) -> list[list[str]]:
    """The commands by torchrun of two machines with a rank each, which may be one machine."""
    nodes = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1")
    port = f"--master-port={warm.free_port()}"
    torchrun = [sys.executable, torch.distributed.run.__file__, *nodes, port]
    return [[*torchrun, f"--node-rank={node}", *command[1:]] for node in (0, 1)]


def test_a_killed_rank_ends_the_run_which_two_nodes_and_one_continue_exactly(command, datasets, tmp_path):
    overrides = ("steps=9", "checkpoint_every=3", "hardware.micro_batch=2", "hardware.parallel=fsdp")
    run_dirs = [f"run_dir={tmp_path / name}" for name in ("whole", "killed")]
    whole, again = (warm.debug_settings(datasets, *overrides, run_dir) for run_dir in run_dirs)
    killed = command(*overrides, "hardware.devices=2", run_dirs[1])
    warm.two_ranks(whole, [], [])
    told = kill_a_rank_at_step(tmp_path / "killed", 4, killed)
    assert "was ended by SIGKILL: the kernel does that when memory runs out" in told
    assert "The same command continues" in told
    assert "Traceback" not in told
    told = kill_a_rank_at_step(tmp_path / "killed", 7, *as_two_nodes(killed))
    assert "Signal 9 (SIGKILL)" in told
    assert "lost the other ranks" in told
    assert "The same command continues" in told
    warm.two_ranks(again, [], [])
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def kill_a_rank_at_step(run_dir: Path, step: int, *commands: list[str]) -> str:
    """What the run printed, having ended by itself within 30 s of one of its ranks being killed."""
    with tempfile.NamedTemporaryFile("r") as output:
        launchers = [start(command, Path(output.name)) for command in commands]
        wait_for_step(launchers[-1].is_alive, run_dir, step)
        os.kill(max(descendants(launchers[-1].pid)), signal.SIGKILL)  # the newest
        for launcher in launchers:
            launcher.join(30)
        told = output.read()
    assert [launcher.exitcode for launcher in launchers] == [1] * len(commands), told
    return told


def fail_on_rank_1() -> None:
    with distributed.joined("cpu") as ranks, ranks.reporting_lost_ranks():
        if ranks.rank == 1:
            raise RuntimeError("shapes do not match")  # a mistake, which is told from a lost rank
        ranks.barrier()


def test_an_exception_on_one_rank_is_shown():
    with pytest.raises(TrainingError, match="continues from the newest checkpoint") as caught:
        warm.launch_two(fail_on_rank_1)
    assert "RuntimeError: shapes do not match\n\nrank 1 failed" in str(caught.value)
    assert "in fail_on_rank_1" in str(caught.value)


def hang_on_rank_1() -> None:
    distributed.REPORT_DELAY_S = 0
    with distributed.joined("cpu") as ranks:
        group = dist.new_group(backend="gloo")  # as when a checkpoint is written
        for one in (None, group):
            dist.barrier(one)
        ranks.answer_within(1)
        if ranks.rank == 1:
            time.sleep(600)
        with pytest.raises(LostRanks, match="Timed out waiting 1000ms"), ranks.reporting_lost_ranks():
            dist.barrier(group)
        with ranks.reporting_lost_ranks():
            dist.barrier()


def test_a_rank_that_hangs_ends_the_run():
    with pytest.raises(TrainingError, match=r"rank 0 lost the other ranks: .*Timed out waiting 1000ms"):
        warm.launch_two(hang_on_rank_1)


def save_when_asked(started: Path) -> None:
    with distributed.joined("cpu") as ranks, StopRequest() as stop:
        (started / str(ranks.rank)).touch()
        while not ranks.largest(stop.signal or 0):
            time.sleep(0.01)
        (started / f"{ranks.rank}_saved").touch()
        raise Interrupted("saved", ranks.largest(stop.signal or 0))


def requeue_when_asked(folder: Path) -> None:
    """As submitit, whose handler of SIGUSR2 requeues the job: what was saved when it was called."""
    saved_before = []

    def requeue(number, frame):
        saved_before.append(sorted(path.name for path in folder.glob("*_saved")))

    def ask():
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    signal.signal(signal.SIGUSR2, requeue)
    threading.Thread(target=ask).start()
    try:
        distributed.start(save_when_asked, folder, processes=2)
    finally:
        assert saved_before == [["0_saved", "1_saved"]]


def test_a_clusters_signal_is_handed_on_when_all_ranks_have_saved(tmp_path):
    with pytest.raises(Interrupted, match="saved") as stopped:
        warm.call(functools.partial(requeue_when_asked, tmp_path))
    assert stopped.value.signal == signal.SIGUSR2


def count_collectives(file: Path) -> None:
    """Write a line for every collective that Python asks for, and for every step."""

    def counted(function, name):
        @functools.wraps(function)
        def call(*arguments, **settings):
            with open(file, "a") as log:
                log.write(f"{name}\n")
            return function(*arguments, **settings)

        return call

    for name in ("all_reduce", "broadcast", "broadcast_object_list", "all_gather", "barrier"):
        setattr(dist, name, counted(getattr(dist, name), name))
    trainer.loop.train_step = counted(trainer.loop.train_step, "step")


def stop_at_step(step: int) -> None:
    """Ask this rank alone to stop when the exchange of a step is over."""
    warm.at_step(step - 1, lambda trainer: os.kill(os.getpid(), signal.SIGUSR1), after=True)


def test_a_step_exchanges_one_tensor_and_so_a_rank_that_is_asked_to_stop_stops_all_a_step_later(
    datasets, tmp_path
):
    settings = warm.debug_settings(
        datasets,
        f"run_dir={tmp_path / 'run'}",
        *("checkpoint_every=100", "eval_every=100", "sample_tokens=0", "probe.every=0"),
        *("hardware.micro_batch=2", "steps=12"),
    )
    # Rank 0 hears of it from rank 1.
    faults = [functools.partial(count_collectives, tmp_path / "calls")], [functools.partial(stop_at_step, 5)]
    output = warm.two_ranks(settings, *faults, codes=(128 + signal.SIGUSR1,) * 2)
    assert "stopped at step 6 of 12 and saved" in output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000006"]
    _, *between, _ = (tmp_path / "calls").read_text().split("step\n")[1:]
    assert [calls.split() for calls in between] == [["all_reduce"]] * 4  # besides the gradients


def test_ranks_that_would_not_train_the_same_say_which_and_what(datasets, tmp_path):
    """Whatever one of them was started with, before anything is trained; where the text is may differ."""
    for name, word in (("one", "dark"), ("same", "dark"), ("other", "damp")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "book.txt").write_text(f"It was a {word} and stormy night.\n" * 400)

    def run(name, *overrides, root="one"):
        place = (f"run_dir={tmp_path / name}", f"data.path={tmp_path / root / 'book.txt'}")
        text = ("data=text", "data.tokenizer=bytes")
        few = ("hardware.micro_batch=2", "sample_tokens=0", "steps=2", "tps.warmup_steps=0")
        return warm.debug_settings(datasets / root, *few, *text, *place, *overrides)

    told = {
        "optimizer.lr=1e-5": "optimizer.lr is 1e-05 on rank 1, 0.003 on rank 0",
        "seed=7": "seed is 7 on rank 1, 1 on rank 0",
        "attention=sagebwd": "attention.backend is sagebwd on rank 1, fpa on rank 0",
        "steps=12": "steps is 12 on rank 1, 2 on rank 0",
        "eval_every=1": "eval_every is 1 on rank 1, 4 on rank 0",
        "run_dir=elsewhere": "run_dir is elsewhere on rank 1",
    }
    runs = [(run("run"), run("run", one)) for one in told]
    runs += [(run("run"), run("run", root="other")), *[(run("run"), run("run", root="same"))] * 2]
    main, other = warm.train_all((run("run", root="gone"), run("run", root="gone")), *runs)
    assert main == other  # also where only the main one has met the error
    assert "book.txt" in main.pop(0)
    for said, expected in zip(main, told.values(), strict=False):
        assert said.startswith("SettingsError: the ranks of this run would not train the same thing")
        assert expected in said
        assert said.count("rank 1") == 1 or "attention" in said
    assert "the text of data is" in main[-3]
    assert main[-2:] == ["", ""]
    assert len(losses(tmp_path / "run")) == 2
    assert "is finished" in (tmp_path / "run.out").read_text()


def test_ranks_with_other_code_or_packages_are_told_apart(datasets, tmp_path, monkeypatch):
    settings = warm.debug_settings(datasets)
    ours = identity.of_rank(settings)

    def differ() -> set[str]:
        return {name for name, value in identity.of_rank(settings).items() if value != ours[name]}

    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert differ() == {"torch"}
    monkeypatch.undo()
    shutil.copytree(software.ROOT / "model", tmp_path / "model")
    monkeypatch.setattr(software, "ROOT", tmp_path)
    assert differ() == {"commit", "code_checksum"}


def flip_a_bit(step: int, key: str) -> None:
    """In one weight of this rank, after a step."""

    def flip(trainer):
        weight = dict(trainer.llama.named_parameters())[key].detach().flatten()
        weight.view(torch.int32)[5] ^= 1

    warm.at_step(step - 1, flip, after=True)


def compare_every(steps: int) -> None:
    trainer.loop.COMPARE_EVERY = steps


@pytest.mark.parametrize("every", [100, 1])
def test_weights_that_drift_apart_stop_the_run_before_they_are_saved(datasets, tmp_path, every):
    """In the lowest bit of one weight: at the next checkpoint, or before that."""
    common = ("hardware.micro_batch=2", "steps=8", "checkpoint_every=2", "sample_tokens=0")
    settings = warm.debug_settings(datasets, *common, f"run_dir={tmp_path / 'run'}")
    often = functools.partial(compare_every, every)
    faults = [[often], [often, functools.partial(flip_a_bit, 5, "layers.1.input_layernorm.weight")]]
    output = warm.two_ranks(settings, *faults, codes=(1, 1))
    assert f"after step {6 if every == 100 else 5}, 1 weights of rank 1 are not those of rank 0" in output
    assert "layers.1." in output
    assert "Traceback" not in output
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[-1] == "step_00000004"
    assert not (tmp_path / "run" / "DIVERGED").exists()
