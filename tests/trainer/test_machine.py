import gzip
import json
import shutil

import torch

from tests.cli import losses
from trainer.machine import start_profiler

CPU = torch.device("cpu")
SHORT = ("steps=4", "checkpoint_every=2", "eval_every=4", "sample_tokens=0", "probe.every=0")


def names_in(trace):
    with gzip.open(trace) as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_a_profile_of_the_steps_asked_for_changes_no_bit(train_here, tmp_path, caplog):
    """In a run from the start, and in one that is continued, where steps are counted from there."""
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    train_here(plain, *SHORT)
    assert not (plain / "profile").exists()
    shutil.copytree(plain, tmp_path / "continued")
    shutil.rmtree(tmp_path / "continued" / "checkpoints" / "step_00000004")

    with caplog.at_level("INFO"):
        train_here(profiled, *SHORT, "profile.start=1", "profile.steps=2")
    assert losses(profiled) == losses(plain)
    trace, table = sorted((profiled / "profile").iterdir())
    assert (trace.name, table.name) == ("steps_2-3_rank_0.json.gz", "steps_2-3_rank_0.txt")
    names = names_in(trace)
    assert {"ProfilerStep#1", "ProfilerStep#2", "aten::mm"} <= names
    assert not {"ProfilerStep#0", "ProfilerStep#3"} & names
    assert "Self CPU" in table.read_text()
    assert str(trace) in caplog.text

    train_here(tmp_path / "continued", *SHORT, "profile.start=1", "profile.steps=1")
    assert losses(tmp_path / "continued") == losses(plain)
    assert (tmp_path / "continued" / "profile" / "steps_4-4_rank_0.json.gz").exists()


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file")
    profiler = start_profiler(tmp_path / "profile", start=1, steps=1, first_step=0, rank=0, device=CPU)
    profiler.step()
    profiler.step()
    assert "profile: could not be written" in caplog.text
    profiler.stop()


def test_what_was_recorded_before_the_run_ended_is_written(tmp_path):
    profiler = start_profiler(tmp_path / "profile", start=1, steps=5, first_step=6, rank=0, device=CPU)
    profiler.step()
    torch.ones(3).cos()
    profiler.step()
    profiler.stop()
    assert "aten::cos" in names_in(tmp_path / "profile" / "steps_8-8_rank_0.json.gz")
