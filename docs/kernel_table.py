"""Write the table of kernels in docs/attention.md, from the rules in sagebwd.dispatch. Needs no GPU.

python docs/kernel_table.py           write it
python docs/kernel_table.py --check   exit with 1 if it is out of date
"""

import argparse
import sys
from itertools import groupby
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
    renewed = f"{before}{BEGIN}{table()}{END}{after}"
    if arguments.check and renewed != page:
        sys.exit(f"the table of kernels in {PAGE} is out of date; run python docs/kernel_table.py")
    if not arguments.check:
        PAGE.write_text(renewed, encoding="utf-8")


def table() -> str:
    """A row for presets and head sizes that run the same, a column for compute capabilities that do."""
    rows = dispatch.table()
    devices: dict[tuple[str, ...], list[str]] = {}
    for device in rows[0].kernels:
        devices.setdefault(tuple(row.kernels[device] for row in rows), []).append(device)
    columns = [group[0] for group in devices.values()]
    presets: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for preset, group in groupby(rows, lambda row: row.preset):
        cells = tuple(("{} to {}".format(*row.head_dims), *map(row.kernels.get, columns)) for row in group)
        presets.setdefault(cells, []).append(f"`{preset}`")
    body = [(", ".join(names), *row) for cells, names in presets.items() for row in cells]
    header = ("preset", "head sizes", *map(", ".join, devices.values()))
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *body))


if __name__ == "__main__":
    main()
