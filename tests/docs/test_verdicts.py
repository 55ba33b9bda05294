"""What README.md and docs/training.md say of the paper is what the report says."""

import re
from functools import cache

import pytest

from scripts.paper import report
from scripts.paper.report.rules import AGREES, CONTRADICTS, CONTRADICTS_HERE, NOT_SEEN, OPEN
from scripts.paper.result_files import Results
from tests.docs.pages import ROOT

#: The README's words for verdicts.
WORDS = {
    AGREES: "yes",
    CONTRADICTS: "no",
    CONTRADICTS_HERE: "no",
    NOT_SEEN: "not seen at this scale",
    OPEN: "open",
}

#: Beginning of a question of the README: experiment, claim, case.
QUESTIONS = {
    "Are the errors those": ("table1", "row", ""),
    "Is it faster than FlashAttention-2?": ("figures2-3", "always", ""),
    "Does pre-training end": ("figure1b", "qk_norm", "34.7M parameters"),
    "… with the paper's 325M": ("figure1b", "qk_norm", "324M parameters"),
    "… and without QK-norm": ("figure1b", "no_qk_norm", "324M parameters"),
    "Is there the paper's gap": ("figure1a", "gap", "learning rate 0.001"),
    "Is dS the bottleneck": (
        "gradient_bias",
        "bottleneck",
        "scales per row as in the default, 34.7M parameters, with QK-norm",
    ),
    "Does fine-tuning end": ("finetune", "match", ""),
}
DIFFERENCE = re.compile(r"[+-]\d\.\d{4} ± \d\.\d{4}")


@cache
def sections():
    results = Results(ROOT / "results")
    there = [item for item in report.ITEMS if results.has(item.json)]
    return {item.name: report.section_of(item, results) for item in there}


def rows(page):
    """{first cell: other cells} of the tables of a page, minus signs as in code."""
    lines = (ROOT / page).read_text(encoding="utf-8").replace("−", "-").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")
    ]
    return {first.strip("| "): rest for first, *rest in cells}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_readme_answers_as_the_report_does(question):
    item, claim, case = QUESTIONS[question]
    [verdict] = [own for own in sections()[item].verdicts if (own.claim, own.case) == (claim, case)]
    [(answer, measured)] = [rest for first, rest in rows("README.md").items() if first.startswith(question)]
    assert answer.split("**")[1] == WORDS[verdict.answer]
    assert DIFFERENCE.findall(measured) == DIFFERENCE.findall(verdict.numbers)


def test_its_numbers_of_table1_and_of_the_bottleneck_are_the_reports():
    table, bias = sections()["table1"].fields, sections()["gradient_bias"].fields
    measured = {first: rest[1] for first, rest in rows("README.md").items() if len(rest) == 2}
    [row] = [text for first, text in measured.items() if first.startswith("Are the errors those")]
    assert f"{table['share.row']} within 10%" in row
    assert f"pseudo-code {table['share.block']}" in row
    [row] = [text for first, text in measured.items() if first.startswith("Is dS the bottleneck")]
    assert f"from dQ and dK {bias['qk.only_dq_dk']}, from O {bias['qk.only_o']}" in row


def test_the_differences_in_training_md_are_the_reports():
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8").replace("−", "-")
    table = text.split("## What it gave so far")[1]
    found = DIFFERENCE.findall(table)
    known = {
        number
        for name in ("figure1a", "figure1b", "finetune")
        for field, gap in sections()[name].fields.items()
        if field.startswith("gap.")
        for number in DIFFERENCE.findall(gap)
    }
    assert len(found) == 5
    assert set(found) <= known
