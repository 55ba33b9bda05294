"""The pages that people read, and what is in them: links, anchors, code, commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(r"`((?:python|make|pip|torchrun|sbatch|wandb) [^`]+)`")


def name(page: Path) -> str:
    """As tests are called: the path within the repository."""
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a language, in order."""
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def links(page: Path) -> list[str]:
    """Targets of links and images, except those that leave the repository."""
    return [target for target in LINK.findall(prose(page)) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and MkDocs make them."""
    return {anchor(heading) for heading in HEADING.findall(prose(page))}


def anchor(heading: str) -> str:
    text = re.sub(r"[^\w\- ]", "", heading.lower())
    return re.sub(r"\s", "-", text.strip())


def commands() -> Iterator[list[str]]:
    """The words of every command line of the pages, in blocks of shell and in the text."""
    for page in PAGES:
        lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
        for line in lines + COMMAND.findall(prose(page)):
            for command in line.split(" && "):
                words = shlex.split(command.replace(" … ", " "), comments=True)
                if words:
                    yield words
