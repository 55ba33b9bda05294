"""The report: its names, its numbers, its files."""

import shutil

import pytest

from scripts.paper import branches
from scripts.paper.report import facts, fill, layer_claims
from tests.cli import ROOT

RESULTS = ROOT / "results"


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


def test_the_committed_report_is_what_the_template_gives():
    """So a change of any number in it is seen."""
    template = (RESULTS / "report.template.md").read_text(encoding="utf-8")
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert page.split("-->\n\n", 1)[1] == fill(template, facts(RESULTS))


def test_branches_are_written_and_drawn(tmp_path):
    (tmp_path / "losses").mkdir()
    for name in ("branches", "ablation"):
        shutil.copy(RESULTS / f"losses/{name}.json.gz", tmp_path / "losses")
    branches.main([str(tmp_path)])
    assert (tmp_path / "losses/branches.md").read_text() == (RESULTS / "losses/branches.md").read_text()
    assert (tmp_path / "gap.png").stat().st_size > 10_000
