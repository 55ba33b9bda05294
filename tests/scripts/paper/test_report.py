"""The report: its names, its numbers, its files."""

import shutil

from scripts.paper import branches
from scripts.paper.report import facts, fill
from tests.cli import ROOT

RESULTS = ROOT / "results"


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
