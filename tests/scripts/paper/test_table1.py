"""Table 1 of the paper: the script's numbers are those on record, and its command line."""

import json

import pytest
import torch

from scripts.output import read_json
from scripts.paper import table1
from scripts.paper.table1 import TENSORS, measure
from tests.cli import ROOT

#: What the script measured at its default settings.
RECORD = read_json(ROOT / "results/accuracy/table1.json")


def test_numbers_are_those_on_record():
    record = {row["variant"]: row for row in RECORD["rows"] if row["sigma"] == 10}
    for variant, found in measure(10, table1.parse_arguments([])).items():
        for tensor, (_, relative_l2) in found.items():
            assert relative_l2 == pytest.approx(record[variant][tensor][1], rel=0.01), (variant, tensor)


def test_command_line(tmp_path, capsys):
    out = tmp_path / "new" / "table1.json"
    sizes = ["--tokens", "40", "--head-dim", "16", "--heads", "2", "--batch", "2"]
    table1.main([*sizes, "--no-causal", "--seed", "3", "--dtype", "bfloat16", "--out", str(out)])

    report = json.loads(out.read_text())
    asked = {"tokens": 40, "causal": False, "dtype": "bfloat16", "seed": 3, "device": "cpu"}
    assert asked.items() <= report["settings"].items()
    tiles = {name: (config["block_q"], config["block_kv"]) for name, config in report["variants"].items()}
    assert tiles == {"block": (128, 64), "row": (128, 64), "default": (64, 128)}
    assert report["versions"]["torch"] == torch.__version__
    assert [(row["sigma"], row["variant"]) for row in report["rows"]] == [
        (sigma, variant) for sigma in (1, 3, 5, 8, 10) for variant in ("paper", "block", "row", "default")
    ]
    assert all(0 < row[name][1] < 2 for row in report["rows"] for name in TENSORS)
    assert report["command"].startswith("python -m scripts.paper.table1 --tokens 40")

    printed = capsys.readouterr().out
    assert "0.9999/0.0160" in printed
    assert printed.count("default") == 5


def test_all_shapes(tmp_path):
    """Both masks of a size that was given; the rows of the table's own shapes hold the same numbers."""
    sizes = ["--tokens", "40", "--head-dim", "16", "--heads", "2"]
    table1.main([*sizes, "--all-shapes", "--out", str(tmp_path / "all.json")])
    table1.main([*sizes, "--out", str(tmp_path / "one.json")])
    rows = json.loads((tmp_path / "all.json").read_text())["shapes"]
    assert {(row["tokens"], row["head_dim"], row["causal"]) for row in rows} == {
        (40, 16, True),
        (40, 16, False),
    }
    causal = [row for row in rows if row["causal"]]
    one = [r for r in json.loads((tmp_path / "one.json").read_text())["rows"] if r["variant"] != "paper"]
    assert [row["dq"] for row in causal] == [row["dq"] for row in one]
    assert len(table1.shapes(table1.parse_arguments(["--all-shapes"]))) == 8
