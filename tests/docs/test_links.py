"""Links lead somewhere, and files that the pages name are there."""

import re

import pytest

from tests.docs import pages
from tests.docs.pages import PAGES, ROOT

RESULT = re.compile(r"`([\w-]+\.json)`")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "results/README.md"], ids=pages.name)
def test_links_lead_to_files_and_headings(page):
    for link in pages.links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in pages.anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_results_that_are_named_exist(page):
    missing = [file for file in RESULT.findall(pages.prose(page)) if not (ROOT / "results" / file).exists()]
    assert not [
        file for file in missing if file not in ("config.json", "tokenizer.json", "tokenizer_config.json")
    ]


def test_the_readme_is_a_door():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_page_is_listed():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [pages.name(page) for page in PAGES if pages.name(page) not in listed]
