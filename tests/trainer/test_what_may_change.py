"""Which settings may differ when a run is continued: how it executes or reports, never what it computes."""

import pytest

from trainer.errors import TrainingError
from trainer.run_directory import RunDirectory

COMPUTES = (
    "hardware.dtype=bfloat16",
    "seed=9",
    "optimizer.eps=1e-5",
    "optimizer.min_lr_ratio=0.3",
    "tps.warmup_steps=3",
    "context=32",
    "model.qk_norm=false",
    "train_sequences=40",
)
EXECUTES = (
    "hardware.micro_batch=2",
    "hardware.compile=false",
    "hardware.recompute=blocks",
    "log_every=3",
    "eval_every=2",
    "eval_sequences=4",
    "sample_tokens=3",
    "checkpoint_every=3",
    "keep_checkpoints=7",
    "checkpoint_background=false",
    "milestone_every=4",
    "skip_nonfinite=true",
    "spike.threshold=9",
    "probe.every=5",
)


@pytest.fixture
def started(compose_settings, tmp_path):
    """started("seed=1") -> opens the directory of a run that has begun with the defaults."""
    directory = RunDirectory(tmp_path / "run")

    def settings(*overrides):
        return compose_settings("experiment=debug", f"run_dir={directory.path}", *overrides)

    with directory.locked():
        directory.open(settings())
        directory.metrics.write_text('{"step": 1}\n')
    return lambda *overrides: directory.open(settings(*overrides))


@pytest.mark.parametrize("override", COMPUTES)
def test_what_a_run_computes_may_not_change(started, override):
    name = override.partition("=")[0]
    with pytest.raises(TrainingError, match=f"{name} was "):
        started(override)


def test_how_it_executes_may(started):
    started(*EXECUTES)
