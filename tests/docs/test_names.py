"""Names in the text are names in the code."""

import importlib
import importlib.util
import re
from dataclasses import fields

import pytest

from sagebwd import SageConfig, __version__, config
from tests.docs import pages
from tests.docs.pages import PAGES, ROOT

TEXT = "\n".join(pages.prose(page) for page in PAGES)
ATTENTION = pages.prose(ROOT / "docs/attention.md")
MODULES = sorted(set(re.findall(r"`(?:python -m )?(scripts(?:\.\w+)+)", TEXT)))
DOTTED = sorted(set(re.findall(r"`(sagebwd(?:\.\w+)+)", TEXT)))
FILES = sorted(set(re.findall(r"`((?:configs|docs|model|sagebwd|scripts|tests)/[\w./]*)`", TEXT)))


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    assert importlib.util.find_spec(name)


@pytest.mark.parametrize("name", DOTTED)
def test_name_in_the_library(name):
    *path, last = name.split(".")
    if last == "transformers":
        pytest.importorskip("transformers")
    try:
        module = importlib.import_module(".".join(path))
    except ModuleNotFoundError:  # the last but one is a class
        module = getattr(importlib.import_module(".".join(path[:-1])), path[-1])
    assert hasattr(module, last) or importlib.import_module(name)


@pytest.mark.parametrize("name", FILES)
def test_file(name):
    assert "NAME" in name or (ROOT / name).exists()


def test_presets_are_those_of_library_and_trainer():
    listed = re.findall(r"^\| `SageConfig(?:\.(\w+))?\(\)` \| `(\w+)` \|", ATTENTION, re.MULTILINE)
    assert {method or "default" for method, _ in listed} == config.PRESETS.keys()
    files = {file.stem for file in (ROOT / "configs/attention").glob("sagebwd*.yaml")}
    assert {name for _, name in listed} == files


def test_every_switch_is_documented():
    documented = set(re.findall(r"`(\w+)(?:=\w+)?`", ATTENTION))
    assert {field.name for field in fields(SageConfig)} <= documented


def test_versions_are_the_same_everywhere():
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "CHANGELOG.md")}
    assert f"\nversion: {__version__}\n" in texts["CITATION.cff"]
    assert __version__ in texts["CHANGELOG.md"]
    [ruff] = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rev: v{ruff}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
