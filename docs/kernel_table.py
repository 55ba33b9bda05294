"""Write the table of kernels in docs/attention.md: rules of sagebwd.dispatch, speeds of results/. No GPU.

python docs/kernel_table.py           write it
python docs/kernel_table.py --check   exit with 1 if it is out of date
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sagebwd import dispatch  # noqa: E402
from scripts.bench import tables  # noqa: E402

PAGE = ROOT / "docs/attention.md"
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
    measured = tables.speeds(ROOT / "results")
    rows = dispatch.table()
    cells = [
        {device: cell(row, kernels, device, measured) for device, kernels in row.kernels.items()}
        for row in rows
    ]
    devices: dict[tuple[str, ...], list[str]] = {}
    for device in rows[0].kernels:
        devices.setdefault(tuple(row[device] for row in cells), []).append(device)
    columns = [group[0] for group in devices.values()]
    presets: dict[tuple[str, ...], list[str]] = {}
    for row, own in sorted(zip(rows, cells, strict=True), key=lambda pair: pair[0].head_dims):
        line = ("{} to {}".format(*row.head_dims), *(own[column] for column in columns))
        presets.setdefault(line, []).append(f"`{row.preset}`")
    body = [(sizes, ", ".join(names), *others) for (sizes, *others), names in presets.items()]
    header = ("head sizes", "preset", *map(", ".join, devices.values()))
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *body))


def cell(row: dispatch.Row, kernels: str, device: str, measured: dict[tables.Kind, list[float]]) -> str:
    """The kernel set, and how fast it was measured."""
    if kernels in ("none", "reference"):
        return kernels
    smallest, largest = row.head_dims
    over = [
        x
        for kind, found in measured.items()
        if kind[:3] == (row.preset, kernels, device) and smallest <= kind.head_dim <= largest
        for x in found
    ]
    return f"{kernels}, {tables.speed_class(over)}"


if __name__ == "__main__":
    main()
