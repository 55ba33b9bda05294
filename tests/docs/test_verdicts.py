"""What the pages say of losses is what the results say."""

import re

import pytest

from scripts.output import read_json
from scripts.paper.losses import read_rows
from tests.docs import pages
from tests.docs.pages import PAGES, ROOT

DIFFERENCE = re.compile(r"[+-]\d?\.\d{4} ± \d?\.\d{4}")


@pytest.fixture(scope="module")
def differences():
    """Of every setup and loss, as "+0.0013 ± 0.0084"."""
    rows = read_rows(read_json(ROOT / "results/losses/losses.json"))
    return {found for row in rows for gap in row.losses.values() for found in DIFFERENCE.findall(str(gap))}


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_differences_of_losses_are_those_of_the_results(page, differences):
    text = page.read_text(encoding="utf-8").replace("−", "-")
    assert set(DIFFERENCE.findall(text)) <= differences
