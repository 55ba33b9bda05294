"""What a sweep says at its end."""

import shlex
from types import SimpleNamespace

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus

from trainer.sweep import SweepSummary

PARSER = OverridesParser.create()
OVERRIDES = ["data.path='a, b=$HOME/*.txt'", "optimizer.lr=1e-3,2e-3", 'sample_prompt="It\'s"']


def test_the_command_of_a_failed_run_can_be_pasted(capsys):
    summary = SweepSummary()
    ((job, _),) = BasicSweeper.split_arguments(PARSER.parse_overrides(OVERRIDES), None)
    failed = JobReturn(overrides=job, status=JobStatus.FAILED)
    failed.return_value = ValueError("no such file")
    summary.on_job_end(SimpleNamespace(), failed)
    summary._report()
    told = capsys.readouterr().err
    assert "0 of 1 runs finished" in told
    assert "no such file" in told
    line = next(line for line in told.splitlines() if line.startswith("failed: "))
    python, script, *words = shlex.split(line.removeprefix("failed: "))
    assert (python, script) == ("python", "train.py")
    assert [one.value() for one in PARSER.parse_overrides(words)] == ["a, b=$HOME/*.txt", 1e-3, "It's"]
