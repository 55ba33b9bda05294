"""The report: its names, its verdicts, its files."""

import re
from fnmatch import fnmatch

import pytest

from scripts.output import read_json
from scripts.paper import report
from scripts.paper.report import (
    AGREES,
    CONTRADICTS,
    DIFFERS,
    OPEN,
    Share,
    by_name,
    by_share,
    facts,
    fill,
    judge,
    layer_claims,
)
from scripts.paper.statistics import Estimate, read_rows
from tests.cli import ROOT

RESULTS = ROOT / "results"
CLAIMS = report.read_claims(RESULTS)
#: The verdicts of commit 5dc8926 in today's words.
OLD_WORDS = {"contradicts at this scale": DIFFERS, "not seen at this scale": DIFFERS}


@pytest.fixture(scope="module")
def known():
    return facts(RESULTS)


# --- The rules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "half_width", "degrees", "printed", "has_null", "verdict"),
    [
        (0.001, 0.008, 5, -0.002, False, AGREES),  # within the band
        (0.001, 0.030, 5, -0.002, True, OPEN),  # too wide
        (-0.033, 0.057, 9, -0.002, True, AGREES),  # no worse, beside its null
        (-0.033, 0.057, 9, -0.002, False, OPEN),
        (-0.033, 0.057, 3, -0.002, True, OPEN),
        (0.053, 0.014, 3, -0.002, True, OPEN),  # too few degrees of freedom
        (0.053, 0.014, 9, -0.002, False, OPEN),  # no null
        (0.053, 0.014, 9, -0.002, True, DIFFERS),
        (0.035, 0.010, 4, -0.002, True, DIFFERS),  # a smaller gap than the paper's is one, too
        (0.035, 0.020, 4, -0.002, True, DIFFERS),  # however wide, if it excludes 0
        (0.020, 0.010, 4, -0.002, True, OPEN),  # its middle lies within the band
        (-0.053, 0.014, 9, -0.002, True, DIFFERS),
        (0.054, 0.010, 9, 0.054, True, AGREES),
        (0.054, 0.010, 9, 0.054, False, OPEN),
        (0.001, 0.028, 9, 0.054, False, DIFFERS),  # the paper's gap is not there
        (0.010, 0.009, 1, 0.054, False, DIFFERS),  # one is, but counts as none
        (0.020, 0.010, 1, 0.054, False, DIFFERS),  # also if its upper end does not
        (0.035, 0.009, 1, 0.054, False, OPEN),
        (0.024, 0.013, 4, 0.054, True, DIFFERS),  # one is, less than half as large
        (0.035, 0.009, 4, 0.054, True, AGREES),
        (0.030, 0.060, 9, 0.054, True, OPEN),
        (0.001, None, 0, 0.054, True, OPEN),
    ],
)
def test_differences_of_losses(mean, half_width, degrees, printed, has_null, verdict):
    assert judge(Estimate(mean, half_width, degrees), printed, has_null) == verdict


def test_claims_that_were_tried_several_times():
    assert [by_share(Share(k, 4)) for k in (4, 3, 2, 1)] == [AGREES, AGREES, OPEN, CONTRADICTS]
    assert by_share(Share(1, 8), any_case=True) == AGREES
    assert by_share(Share(0, 8), any_case=True) == CONTRADICTS


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


# --- The typed verdicts -------------------------------------------------------------------------------------


def ids(claim):
    return f"{claim['claim']}; {claim['case']}"


@pytest.mark.parametrize("claim", CLAIMS, ids=ids)
def test_the_typed_verdict_is_that_of_the_rule(claim, known):
    if "loss" in claim:
        row = by_name(read_rows(read_json(RESULTS / "losses.json")))[claim["loss"]]
        expected = judge(row.losses["training"].estimate, claim["printed"], row.has_null)
        assert row.proxy == claim.get("proxy", False)
    elif "share" in claim:
        expected = by_share(known[claim["share"]], claim.get("any", False))
    else:
        expected = frozen_verdict(claim["frozen"], claim["row"])
    assert claim["verdict"] == expected


def frozen_verdict(table, row):
    """What a table of commit 5dc8926 says, in today's words."""
    lines = (RESULTS / "tables" / f"{table}.md").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(f"| {row} | **")]
    word = line.split("**")[1]
    return OLD_WORDS.get(word, word)


def test_few_are_open():
    assert sum(claim["verdict"] == OPEN for claim in CLAIMS) <= 8


# --- The page -----------------------------------------------------------------------------------------------


def test_the_committed_report_is_what_the_template_gives(known):
    template = (RESULTS / "report.template.md").read_text(encoding="utf-8")
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert page.split("-->\n\n", 1)[1] == fill(template, known)


def test_numbers_are_those_of_the_json(known):
    """Read off by another way."""
    rows = read_json(RESULTS / "gradient_bias_325m.json")["rows"]
    wanted = ("paper", "adam", "all", None)
    [row] = [own for own in rows if (own["setting"], own["view"], own["group"], own["layer"]) == wanted]
    assert known["325M | paper | all | adam | along"] == f"{-row['along'][0]:.4f}"
    speeds = re.findall(r"\| FlashAttention-2, D (\d+) \|.*\| ([\d.]+) \|", known["speed"])
    assert speeds == [("64", "1.59"), ("128", "1.75")]
    assert str(known["table1.row"]) == "19 of 20"


def test_a_name_that_is_not_known_is_an_error(known):
    with pytest.raises(KeyError, match="table9"):
        fill("{{ table9 }}", known)


def test_every_file_of_the_results_is_named():
    text = (RESULTS / "FILES.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    patterns = [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]
    files = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()]
    assert not [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)]
