import pytest
from omegaconf import OmegaConf

from trainer.sweep_directories import refuse_shared_directories


def sweep(*overrides):
    refuse_shared_directories(OmegaConf.create({"hydra": {"overrides": {"task": list(overrides)}}}))


@pytest.mark.parametrize(
    ("overrides", "directory"),
    [
        (["attention=fpa,sagebwd", "run_dir=X"], "X"),
        (["seed=1,2,1"], "seed-1"),
        (["seed=1,2", "run_dir=X,Y"], "X"),
        (["seed=1", "data.root=a,b", "runs_dir=there"], "there/seed-1"),
        (["seed=range(1,3)", "run_dir=X"], "X"),
    ],
)
def test_runs_that_would_train_in_one_directory_are_refused(overrides, directory):
    with pytest.raises(SystemExit, match=f"two runs of this sweep would train in {directory}:") as end:
        sweep(*overrides)
    assert "Leave run_dir out" in str(end.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention=fpa,sagebwd", "tps=260k,2.1m"],
        ["run_dir=X,Y"],
        ["seed=1,2", "runs_dir=there"],
        ["seed=1,2", "run_dir=runs/${seed}"],
        ["seed=1", "run_dir=X"],
        ["seed=1", "runs_dir=here,there"],
    ],
)
def test_runs_with_directories_of_their_own_are_not(overrides):
    sweep(*overrides)
