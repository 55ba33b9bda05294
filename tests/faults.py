"""Which faults are tried, and whether the program holds: `python -m tests.faults`.

Runs the tests that provoke each fault and prints a table: how many cases were tried, how many held, and what
happened before there was a test. `--out NAME` writes NAME.json and NAME.md, `--list` only lists the faults.
Arguments after `--` go to pytest: `python -m tests.faults -- -n 2`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import pytest
import torch

from data.files import write_text
from trainer.run_directory import find_commit

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """tests: beginnings of test names, file::function, below tests/. before: what happened once."""

    area: str
    what: str
    tests: tuple[str, ...]
    before: str


LAUNCHER = "trainer/test_launcher.py::"
SAFE_LOAD = "trainer/test_safe_load.py::"
CHECKPOINT = "trainer/test_checkpoint.py::"
DIRECTORY = "trainer/test_run_directory.py::"
FAULTS_TESTS = "test_faults.py::"
RANKS = "test_ranks.py::"
TRAIN = "test_train.py::"
LOOP = "trainer/test_loop.py::"
COMPILE = "sagebwd/kernels/cuda/test_compile.py::"
SOURCES = "data/test_sources.py::"
WEIGHTS = "model/test_huggingface.py::"

SECURITY, HONESTY, LOSS, NUMBERS = "security", "nothing hidden", "nothing lost", "numbers"

FAULTS = (
    Fault(
        SECURITY,
        "a sweep or several devices open a socket to the network; the launcher is killed",
        (f"{LAUNCHER}test_sockets_are_on_the_loopback",),
        "2 unauthenticated stores on all interfaces; ranks trained on without their launcher in 8 of 10",
    ),
    Fault(
        SECURITY,
        "code in a checkpoint's metadata, or in values that are no tensors",
        (f"{SAFE_LOAD}test_metadata_runs_no_code", f"{SAFE_LOAD}test_values_that_are_no_tensors"),
        "ran",
    ),
    Fault(
        SECURITY,
        "a checkpoint that names files elsewhere, or is damaged in its metadata",
        (
            f"{SAFE_LOAD}test_files_outside",
            f"{SAFE_LOAD}test_a_seal_that_names",
            f"{SAFE_LOAD}test_damaged_metadata",
            f"{SAFE_LOAD}test_a_flipped_bit",
        ),
        "read, or a traceback",
    ),
    Fault(
        SECURITY,
        "init_from with a damaged config or index, paths elsewhere, a FIFO, integer, complex or NaN weights",
        (
            f"{WEIGHTS}test_a_config_that_is_no",
            f"{WEIGHTS}test_fields_of_another_kind",
            f"{WEIGHTS}test_damaged_indexes",
            f"{WEIGHTS}test_a_weight_must_be_in",
            f"{WEIGHTS}test_what_is_no_file",
            f"{WEIGHTS}test_weights_that_are_not_finite",
            "trainer/test_init_from.py::test_weights_that_are_not_finite",
            "trainer/test_init_from.py::test_a_damaged_config",
        ),
        "60 of these cases: a traceback, a file elsewhere, a cast in silence, or waiting for ever",
    ),
    Fault(
        SECURITY,
        "a kernel cache that others can write to",
        (
            f"{COMPILE}test_a_file_of_another_user",
            f"{COMPILE}test_a_file_that_others",
            f"{COMPILE}test_a_folder_of_another_user",
            f"{COMPILE}test_a_folder_that_others",
            f"{COMPILE}test_a_kernel_under_another_name",
            f"{COMPILE}test_what_is_no_file",
            f"{COMPILE}test_the_folder_and_its_files",
        ),
        "kernels of anyone were loaded",
    ),
    Fault(
        SECURITY,
        "a secret in a setting, a message or the address of the git remote",
        ("trainer/test_redaction.py::",),
        "recorded in config.yaml, metrics, logs and W&B",
    ),
    Fault(
        HONESTY,
        "loss, weights or moments that are not finite",
        (
            f"{LOOP}test_a_run_whose_last_record",
            f"{LOOP}test_a_run_whose_last_step",
            f"{LOOP}test_weights_that_are_not_finite",
            f"{LOOP}test_a_step_that_is_not_finite",
            f"{TRAIN}test_steps_that_are_not_finite",
            "scripts/test_compare.py::test_a_loss_that_is_not_finite",
            "scripts/test_compare.py::test_a_run_that_diverged",
        ),
        "DONE, exit 0, NaN weights exported; compare printed the last finite loss as final",
    ),
    Fault(
        HONESTY,
        "a finished run asked for with other settings; a sweep in one directory",
        (
            f"{DIRECTORY}test_other_settings_are_not",
            f"{DIRECTORY}test_a_finished_run",
            f"{LOOP}test_a_finished_run",
            "trainer/test_sweep_directories.py::test_runs_that_would_train_in_one",
        ),
        "is finished, exit 0; 2 of 2 runs finished, the second never trained",
    ),
    Fault(
        HONESTY,
        "NaN in the newest checkpoint",
        (f"{CHECKPOINT}test_nan_in_the_newest",),
        "failed for ever and blamed the learning rate",
    ),
    Fault(
        HONESTY,
        "text read twice through links; validation text that is training text",
        (
            f"{SOURCES}test_a_loop_of_links",
            f"{SOURCES}test_a_file_under_two_names",
            f"{SOURCES}test_validation_text_that_is_also",
        ),
        "one file 41 times in training and validation",
    ),
    Fault(
        HONESTY,
        "flipped bytes in parquet, doubled columns and keys",
        (
            f"{SOURCES}test_a_flipped_byte",
            f"{SOURCES}test_two_parquet_columns",
            f"{SOURCES}test_jsonl_with_a_key_twice",
            "data/test_prepare.py::test_verify_reads_source",
        ),
        "14 of 30 flips read as other text",
    ),
    Fault(
        HONESTY,
        "a token file that is missing, spoilt, or cut short while in use",
        (
            "data/test_tokens.py::test_a_",
            f"{TRAIN}test_corrupt_shard",
            "data/test_corpus.py::test_a_truncated",
        ),
        "SIGBUS without a message while in use",
    ),
    Fault(
        LOSS,
        "checkpoints unreadable, unmounted or deleted",
        (
            f"{FAULTS_TESTS}test_checkpoints_that_cannot_be_read",
            f"{DIRECTORY}test_checkpoints_that_are_gone",
            f"{DIRECTORY}test_metrics_without_a_checkpoint",
            f"{DIRECTORY}test_places_that_cannot",
        ),
        "restarted at step 0 and truncated the metrics first",
    ),
    Fault(
        LOSS,
        "a checkpoint of another run, or a damaged seal",
        (
            f"{LOOP}test_a_checkpoint_of_another_run",
            f"{FAULTS_TESTS}test_checkpoint_of_another_run",
            f"{DIRECTORY}test_checkpoints_of_another_run",
            f"{CHECKPOINT}test_a_seal_that_is_none",
            f"{CHECKPOINT}test_the_seal_protects",
            f"{CHECKPOINT}test_the_folder_that_is_verified",
        ),
        "loaded; the step inside the seal decided which",
    ),
    Fault(
        LOSS,
        "config.yaml, a line of the metrics, or a record of prepared data lost or damaged",
        (
            "data/test_prepare.py::test_a_damaged_record",
            f"{FAULTS_TESTS}test_damaged_line",
            f"{DIRECTORY}test_a_damaged_line",
            f"{DIRECTORY}test_the_settings_are_read_from",
            f"{DIRECTORY}test_a_flipped_bit_in_config",
            f"{DIRECTORY}test_metrics_after",
            f"{DIRECTORY}test_a_line_that_a_full_disk",
        ),
        "a traceback, and no way on",
    ),
    Fault(
        LOSS,
        "a truncated or flipped checkpoint",
        (
            f"{FAULTS_TESTS}test_torn_checkpoint",
            f"{CHECKPOINT}test_falls_back",
            f"{CHECKPOINT}test_only_damaged",
            f"{CHECKPOINT}test_leftovers",
        ),
        "held",
    ),
    Fault(
        LOSS,
        "killed at random, and at every stage of a write; then continued, bit for bit",
        (
            f"{FAULTS_TESTS}test_killed",
            f"{TRAIN}test_killed",
            "data/test_prepare.py::test_a_killed_preparation",
        ),
        "held: 26 of 26",
    ),
    Fault(
        LOSS,
        "asked to stop by a signal, in training, in a write, while data are prepared, without its terminal",
        (
            f"{TRAIN}test_asked_to_stop",
            f"{FAULTS_TESTS}test_asked_to_stop",
            "trainer/test_interrupt.py::",
            f"{RANKS}test_a_clusters_signal",
            f"{RANKS}test_a_rank_that_is_asked",
        ),
        "SIGHUP and SIGQUIT lost the work; data were prepared to the end first",
    ),
    Fault(
        LOSS,
        "a rank dies, hangs, fails, or does not notice that another died",
        (
            f"{RANKS}test_a_killed_rank",
            f"{RANKS}test_a_rank_that_hangs",
            f"{RANKS}test_a_rank_that_does_not_notice",
            f"{RANKS}test_an_exception",
            f"{FAULTS_TESTS}test_rank_that_dies",
            f"{LAUNCHER}test_a_process_that_ends",
            f"{LAUNCHER}test_a_rank_of_torchrun",
            f"{TRAIN}test_a_rank_that_fails",
        ),
        "held, except under a killed launcher",
    ),
    Fault(
        LOSS,
        "a full disk (a real one, where mounting is allowed) at start, in the metrics, checkpoints, export",
        (
            f"{FAULTS_TESTS}test_disk",
            f"{CHECKPOINT}test_full_disk",
            f"{CHECKPOINT}test_file_that_cannot_grow",
            f"{TRAIN}test_full_disk",
            f"{LOOP}test_a_full_disk",
            "data/test_prepare.py::test_a_full_disk",
        ),
        "a traceback at start and at export",
    ),
    Fault(
        LOSS,
        "read-only places, a run directory that is removed, names that are too long or empty",
        (
            f"{FAULTS_TESTS}test_folder",
            f"{FAULTS_TESTS}test_places_that_became",
            f"{FAULTS_TESTS}test_run_directory_is_removed",
            f"{CHECKPOINT}test_a_folder_that_was_removed",
            f"{DIRECTORY}test_unwritable",
        ),
        "a traceback, or a directory made anew with half a run",
    ),
    Fault(
        LOSS,
        "DONE before all it claims is on the disk",
        (f"{DIRECTORY}test_done_is_written_after", f"{CHECKPOINT}test_a_published_checkpoint"),
        "no fsync of weights, metrics and folders",
    ),
    Fault(
        LOSS,
        "W&B breaks; the clock jumps",
        (f"{FAULTS_TESTS}test_wandb", f"{FAULTS_TESTS}test_clock"),
        "held",
    ),
    Fault(
        LOSS,
        "a printed command that is pasted",
        (
            "data/test_overrides.py::",
            "data/test_corpus.py::test_the_command_is_read",
            "trainer/test_sweep.py::",
            "trainer/test_spikes.py::test_the_command",
        ),
        "spaces, commas, quotes and $ broke it",
    ),
    Fault(
        NUMBERS,
        "random attentions against float64, planted NaN among them",
        ("sagebwd/test_fuzz.py::test_random",),
        "2 of 3,000 out of bound, in fp16",
    ),
    Fault(
        NUMBERS,
        "broken kernels, which the fuzz must find",
        ("sagebwd/test_fuzz.py::test_broken",),
        "no such test",
    ),
    Fault(
        NUMBERS,
        "a change of numerics in training",
        ("trainer/test_golden.py::",),
        "no such test",
    ),
    Fault(
        NUMBERS,
        "the same run again, on one process and on two, in all layouts",
        (
            f"{FAULTS_TESTS}test_deterministic",
            f"{TRAIN}test_two_ranks",
            f"{RANKS}test_all_layouts",
            "sagebwd/kernels/test_distributed.py::",
        ),
        "held",
    ),
    Fault(
        NUMBERS,
        "loss spikes: found, named by their text, skipped if told to",
        ("trainer/test_spikes.py::",),
        "held",
    ),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """This module is a plugin of pytest, also in xdist's processes: only the tests of the faults run."""
    others = [item for item in items if not faults_of(item.nodeid)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if faults_of(item.nodeid)]


class Counting:
    """A plugin of pytest that counts the cases of each fault."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return  # setting up and tearing down count only where they fail or skip
        for fault in faults_of(report.nodeid):
            counts = self.skipped if report.skipped else self.tried
            counts[fault.what] += 1
            self.held[fault.what] += report.passed

    def rows(self) -> list[dict[str, object]]:
        return [
            {
                **asdict(fault),
                "tried": self.tried[fault.what],
                "held": self.held[fault.what],
                "skipped": self.skipped[fault.what],
            }
            for fault in FAULTS
        ]


def faults_of(test: str) -> list[Fault]:
    """The faults that a test provokes."""
    name = test.removeprefix("tests/")
    return [fault for fault in FAULTS if name.startswith(fault.tests)]


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    if parsed.list:
        print("\n".join(f"{fault.area}: {fault.what}" for fault in FAULTS))
        return 0
    files = sorted({f"tests/{test.split('::')[0]}" for fault in FAULTS for test in fault.tests})
    counting = Counting()
    # Plugins that the imports above have imported, such as Hydra's, cannot be rewritten: it does not matter.
    quiet = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    options = ["-q", *quiet, "-p", "tests.faults", "--rootdir", str(ROOT), *parsed.pytest]
    pytest.main([*options, *files], plugins=[counting])
    rows = counting.rows()
    print("\n" + table(rows))
    if parsed.out:
        write(parsed.out, rows)
    return int(any(row["held"] < row["tried"] or not row["tried"] for row in rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="list the faults, and run nothing")
    parser.add_argument("--out", type=Path, help="beginning of the files to write")
    parser.add_argument("pytest", nargs="*", help="options of pytest, after --")
    return parser.parse_args(arguments)


def table(rows: Sequence[dict[str, object]]) -> str:
    lines = ["| area | fault | tried | held | before |", "| --- | --- | ---: | ---: | --- |"]
    for row in rows:
        tried = f"{row['tried']}" + (f" ({row['skipped']} not possible here)" if row["skipped"] else "")
        lines.append(f"| {row['area']} | {row['what']} | {tried} | {row['held']} | {row['before']} |")
    tried, held = (sum(int(row[name]) for row in rows) for name in ("tried", "held"))
    lines.append(f"| all | {len(rows)} faults | {tried} | {held} | |")
    return "\n".join(lines)


def write(out: Path, rows: Sequence[dict[str, object]]) -> None:
    made = {
        "command": "python -m tests.faults",
        "date": date.today().isoformat(),
        "commit": find_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "faults": rows,
    }
    write_text(out.with_suffix(".json"), json.dumps(made, indent=1) + "\n")
    heading = f"# Faults that are tried\n\n`{made['command']}`, {made['date']}, commit {made['commit']}.\n\n"
    write_text(out.with_suffix(".md"), heading + table(rows) + "\n")


if __name__ == "__main__":
    sys.exit(main())
