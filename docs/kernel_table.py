"""Write the tables of kernels in docs/attention.md, from the rules in sagebwd.dispatch. Needs no GPU.

python docs/kernel_table.py           write them
python docs/kernel_table.py --check   exit with 1 if they are out of date
"""

import argparse
import sys
from pathlib import Path

from sagebwd import dispatch

PAGE = Path(__file__).parent / "attention.md"
BEGIN, END = "<!-- kernels table: begin -->\n\n", "\n<!-- kernels table: end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    renewed = f"{before}{BEGIN}{presets_table()}\n{reasons_table()}{END}{after}"
    if arguments.check and renewed != page:
        sys.exit(f"the tables of kernels in {PAGE} are out of date; run python docs/kernel_table.py")
    if not arguments.check:
        PAGE.write_text(renewed, encoding="utf-8")


def presets_table() -> str:
    """A row for each preset and range of head sizes, a column for compute capabilities that run the same."""
    rows = dispatch.table()
    columns: dict[tuple[str, ...], list[str]] = {}
    for device in rows[0].kernels:
        columns.setdefault(tuple(row.kernels[device] for row in rows), []).append(device)
    cells = [
        [f"`{row.preset}`", "{} to {}".format(*row.head_dims), *(kernels[i] for kernels in columns)]
        for i, row in enumerate(rows)
    ]
    return markdown(["preset", "head sizes (multiples of 8)", *map(", ".join, columns.values())], cells)


def reasons_table() -> str:
    """The default at head size 64: which kernels run on each architecture, and why no faster ones do."""
    cells = [
        [device, _products(device), found.kernels, _listed(found.reasons)]
        for device, found in dispatch.architectures().items()
    ]
    return markdown(["compute capability", "for example", "kernels", "why none that is faster"], cells)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))


def _products(device: str) -> str:
    gpu = dispatch.ARCHITECTURES.get(device)
    return "–" if gpu is None else gpu.name


def _listed(reasons: dict[str, str]) -> str:
    return "<br>".join(f"`{name}`: {reason}" for name, reason in reasons.items()) or "–"


if __name__ == "__main__":
    main()
