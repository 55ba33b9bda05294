"""The report: its names, its numbers, its files."""

import gzip
import json
import re
import shutil
from statistics import fmean

import numpy as np
import pytest

from scripts.output import read_json
from scripts.paper import branches
from scripts.paper.report import facts, fill, layer_claims
from tests.cli import ROOT

RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def known():
    return facts(RESULTS)


@pytest.mark.parametrize(
    ("dk", "ds", "ds_rms", "expected"),
    [
        (0.05, 0.03, 2e-7, {"dq_dk": True, "ds": True, "rms": True}),
        (0.03, 0.02, 9e-6, {"dq_dk": False, "ds": False, "rms": False}),
    ],
)
def test_claims_about_layers(dk, ds, ds_rms, expected):
    errors = {"o_l2": 0.01, "dq_l2": 0.07, "dk_l2": dk, "dv_l2": 0.04}
    row = {"errors": {"paper": errors}, "statistics": {"dp_rms": 1e-4, "ds_rms": ds_rms}}
    table2 = {"p": [1, 0.01], "dp": [1, 0.0], "delta": [1, 0.025], "ds": [1, ds]}
    assert layer_claims([row, row], table2) == expected


def test_the_committed_report_is_what_the_template_gives(known):
    template = (RESULTS / "report.template.md").read_text(encoding="utf-8")
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert page.split("-->\n\n", 1)[1] == fill(template, known)


def test_numbers_are_those_of_the_json(known):
    """Read off by another way."""
    rows = read_json(RESULTS / "accuracy/gradient_bias_325m.json")["rows"]
    wanted = ("paper", "raw", "all", None)
    [row] = [own for own in rows if (own["setting"], own["view"], own["group"], own["layer"]) == wanted]
    [line] = [line for line in known["bias.all"].splitlines() if line.startswith("| `paper()` |")]
    assert line.split(" | ")[3] == f"{row['bias'][0]:.3f}"
    speeds = re.findall(r"\| FlashAttention-2, D (\d+) \|.*\| ([\d.]+) \|", known["speed"])
    assert speeds == [("64", "1.59"), ("128", "1.75")]
    assert known["table1.row"] == "19 of 20"


def test_gaps_are_those_of_the_stored_losses(known):
    """Computed anew from the files, without any code of the report."""
    runs = json.loads(gzip.decompress((RESULTS / "losses/branches.json.gz").read_bytes()))["runs"]
    for setup, qk_norm, gain, steps in (
        ("35M, with QK-norm", True, None, 1017),
        ("35M, without QK-norm", False, None, 1017),
        ("35M, QK-norm with gain 4", True, 4.0, 1017),
        ("35M, with QK-norm, 2,097,152 tokens per step, long", True, None, 256),
    ):
        own = [
            run
            for run in runs
            if (run["qk_norm"], run["group"].get("qk_norm_gain")) == (qk_norm, gain)
            and len(run["curve"]["loss"]) == steps
        ]
        assert f"| {setup} |" in known["gaps"]
        [line] = [line for line in known["gaps"].splitlines() if line.startswith(f"| {setup} |")]
        for cell, name in zip(line.split(" | ")[3:], ("sagebwd", "sagebwd-paper", "fpa-flash"), strict=True):
            found = [float(cell.split()[0])] if cell.strip(" |") else []
            by_hand = gaps_by_hand(own, name)
            assert found == pytest.approx([fmean(by_hand)] if by_hand else [], abs=6e-5), (setup, name)


def test_the_ablation_is_that_of_the_stored_losses(known):
    runs = json.loads(gzip.decompress((RESULTS / "losses/ablation.json.gz").read_bytes()))["runs"]
    words = {
        "sagebwd-paper": "`paper()`",
        "ds_per_row": "dS with a scale",
        "dq_16_bit": "dQ in 16 bit",
        "stochastic": "dS rounded at random",
        "random_sign": "dS with the same",
        "zero_elements": "dQ and dK in 16 bit, but el",
    }
    for name, begin in words.items():
        [line] = [line for line in known["ablation"].splitlines()[2:] if line.startswith(f"| {begin}")]
        found = [float(cell) for cell in line.split(" | ")[1:6] if cell.strip()]
        assert found == pytest.approx(gaps_by_hand(runs, name), abs=6e-5)


def test_branches_are_written_and_drawn(tmp_path):
    (tmp_path / "losses").mkdir()
    for name in ("branches", "ablation"):
        shutil.copy(RESULTS / f"losses/{name}.json.gz", tmp_path / "losses")
    branches.main([str(tmp_path)])
    assert (tmp_path / "losses/branches.md").read_text() == (RESULTS / "losses/branches.md").read_text()
    assert (tmp_path / "gap.png").stat().st_size > 10_000


def gaps_by_hand(runs, arm):
    """The last tenth of the losses minus cuDNN's of the same seed, by seed."""
    losses = {(run.get("arm") or arm_by_hand(run), run["seed"]): run["curve"]["loss"] for run in runs}
    return [
        fmean(np.subtract(own, losses["fpa-cudnn", seed])[-(len(own) // 10) :])
        for (name, seed), own in sorted(losses.items())
        if name == arm
    ]


def arm_by_hand(run):
    """What the run's recorded settings amount to."""
    settings = run["config"]["attention"]
    if settings["backend"] == "fpa":
        return f"fpa-{settings['sdpa']}"
    changed = {name for name in ("smooth_q", "smooth_v", "unsigned_p") if settings[name]}
    if not settings["smooth_k"]:
        changed.add("no smooth_k")
    if len(settings["int8_matmuls"]) != 6:
        changed.add("int8_matmuls")
    return "-".join(["sagebwd", *["paper"] * (settings["granularity"] == "block"), *sorted(changed)])
