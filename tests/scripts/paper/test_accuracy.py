"""scripts.paper.accuracy: the numbers in its files are those that were measured."""

import json

import pytest

from scripts.paper import accuracy


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("accuracy") / "accuracy.json"
    accuracy.main(["--tokens", "96", "--head-dims", "32", "--heads", "2", "--sigmas", "1", "--out", str(out)])
    return json.loads(out.read_text()), out.with_suffix(".md").read_text()


def test_every_shape_and_variant_is_there(result):
    rows = result[0]["shapes"]
    assert {(row["causal"], row["variant"]) for row in rows} == {
        (causal, variant) for causal in (True, False) for variant in ("block", "row", "default")
    }


def test_a_product_in_int8_costs_accuracy_only_where_it_is_used(result):
    errors = {
        row["int8"]: {name: row[name][1] for name in ("out", "dq", "dk", "dv")} for row in result[0]["int8"]
    }
    assert max(errors["none"].values()) < 0.002
    assert errors["dV"]["dv"] > 0.005
    assert errors["dV"]["dq"] == errors["none"]["dq"]
    assert errors["dQ"]["dq"] > 0.005
    assert errors["dQ"]["dk"] < 0.002  # K is smoothed for dQ alone, and K - mean rounded
    assert errors["S"]["out"] > 0.005
    assert errors["all seven"]["dq"] > errors["the paper's six"]["dq"]


def test_markdown_holds_the_paper_beside_the_measured_numbers(result):
    data, text = result
    assert "| 1 | paper | | | | 0.0160 | 0.0184 | 0.0220 | 0.0159 |" in text
    row = next(row for row in data["shapes"] if row["variant"] == "default" and row["causal"])
    cells = "".join(f" {row[name][1]:.4f} |" for name in ("out", "dq", "dk", "dv"))
    assert f"| 1 | default | 32 | causal | 96 |{cells}" in text


def test_refuses_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        accuracy.parse_arguments(["--device", "cuda"])
    assert "torch sees no GPU" in capsys.readouterr().err
