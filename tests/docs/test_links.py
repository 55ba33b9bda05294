"""Links lead somewhere, every page is found, and the README stays a door."""

import re

import pytest

from tests.docs import pages
from tests.docs.pages import PAGES, ROOT

README = ROOT / "README.md"
REPORT = sorted((ROOT / "results").rglob("*.md"))
RESULT = re.compile(r"`([\w-]+\.json)`")
#: Files that a model or a run has, no results.
OF_MODELS = ("config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("page", [*PAGES, *REPORT], ids=pages.name)
def test_links_lead_to_files_and_headings(page):
    for link in pages.links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in pages.anchors(target), link


def test_every_page_is_reached_from_the_readme():
    found, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        if page not in found and page.suffix == ".md" and page.exists():
            found.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in pages.links(page)]
    assert {*PAGES, ROOT / "results/README.md"} <= found


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_results_that_are_named_exist(page):
    named = {file for file in RESULT.findall(pages.prose(page)) if file not in OF_MODELS}
    assert not [file for file in named if not [*(ROOT / "results").rglob(f"{file}*")]]


def test_the_readme_is_a_door():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 120
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells)) <= 60


@pytest.mark.parametrize("name", ["attention", "training"])
def test_a_long_page_has_a_table_of_contents(name):
    page = ROOT / f"docs/{name}.md"
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    contents, *sections = text.split("\n## ")
    for section in sections:
        assert f"(#{pages.anchor(section.splitlines()[0])})" in contents


def test_every_page_is_in_the_site():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [pages.name(page) for page in PAGES if pages.name(page) not in listed]
