"""Write results/README.md, results/SUMMARY.md and results/tables/ from the JSON files and runs in results/.

    python -m scripts.paper.report --write
    python -m scripts.paper.report --check     # writes nothing; fails if they are out of date

The paragraphs are written by hand, in results/report.template.md and results/summary.template.md;
{{NAME.FIELD}} stands there for a table, a number or a verdict. `python -m scripts.reproduce` calls this after
every experiment.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.command_line import command_parser
from scripts.paper import report
from scripts.paper.experiments import RESULTS
from scripts.paper.report.template import UnknownField
from scripts.paper.result_files import DamagedResult


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        if arguments.check:
            check(arguments.results)
        else:
            print(f"written to {report.write(arguments.results)} and tables/")
    except (DamagedResult, UnknownField, FileNotFoundError) as error:
        sys.exit(str(error))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("python -m scripts.paper.report", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder (default %(default)s)")
    wish = parser.add_mutually_exclusive_group(required=True)
    wish.add_argument("--write", action="store_true", help="renew README.md and tables/ in that folder")
    wish.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    arguments = parser.parse_args(argv)
    if not arguments.results.is_dir():
        parser.error(f"--results {arguments.results}: there is no such folder; name one with JSON files")
    return arguments


def check(folder: Path) -> None:
    """Exit with the names of the files that are not what the results give."""
    texts = report.generate(folder)
    different = [
        name
        for name, text in texts.items()
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != text
    ]
    left_over = [
        f"tables/{path.name}"
        for path in (folder / "tables").glob("*.md")
        if f"tables/{path.name}" not in texts
    ]
    if different or left_over:
        names = ", ".join(sorted(different + left_over))
        sys.exit(
            f"in {folder}, {names}: not what the results give; run python -m scripts.paper.report --write"
        )


if __name__ == "__main__":
    main()
