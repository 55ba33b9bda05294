"""Write the table of kernels in docs/attention.md, from the rules in sagebwd.dispatch. Needs no GPU.

python docs/kernel_table.py           write it
python docs/kernel_table.py --check   exit with 1 if it is out of date
"""

import argparse
import sys
from pathlib import Path

from sagebwd import dispatch

PAGE = Path(__file__).parent / "attention.md"
BEGIN, END = "<!-- kernels table: begin -->\n\n", "\n<!-- kernels table: end -->\n"
HEAD = (
    "| preset | head sizes (multiples of 8) | Hopper GPU | other NVIDIA GPU since Ampere | CPU |\n"
    "| --- | --- | --- | --- | --- |\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    renewed = before + BEGIN + table() + END + after
    if arguments.check and renewed != page:
        sys.exit(f"the table of kernels in {PAGE} is out of date; run python docs/kernel_table.py")
    if not arguments.check:
        PAGE.write_text(renewed, encoding="utf-8")


def table() -> str:
    """The table in Markdown, a row for each preset and range of head sizes."""
    rows = (
        f"| `{row.preset}` | {row.head_dims[0]} to {row.head_dims[1]} "
        f"| {row.hopper} | {row.nvidia} | {row.cpu} |\n"
        for row in dispatch.table()
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    main()
