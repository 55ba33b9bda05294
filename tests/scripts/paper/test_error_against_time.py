"""scripts.paper.error_against_time: what it makes of other scripts' results."""

import json

import pytest
import torch

from scripts.bench.attention_peers import CONFIGS, PEERS
from scripts.paper import error_against_time
from scripts.paper.gradient_variants import variants
from scripts.paper.report import gradients


def bench(date, rows, device="NVIDIA H200"):
    """A result of scripts.bench.attention of (implementation, mode, tokens, ms), head size 64, causal."""
    shape = {"causal": True, "head_dim": 64}
    return {
        "date": date,
        "commit": f"commit of {date}",
        "hardware": {"name": device},
        "rows": [
            {"implementation": name, "mode": mode, "shape": shape | {"tokens": tokens}, "median_ms": ms}
            for name, mode, tokens, ms in rows
        ],
    }


def study(errors):
    """A result of scripts.paper.gradient_error, one head of two models; errors: dq of each, by variant."""
    names = ("a", "b")
    source = {"qk_norm": True, "tokens_per_step": 8, "tokens": 8, "is_last": True}
    row = {"layer": 0, "head": 0, "kind": "variant", "cost": 11, "cosine": {}, "gain": {}}
    return {
        "hardware": {"name": "cpu"},
        "sources": {name: source | {"name": name, "run": name} for name in names},
        "rows": [
            row | {"source": source, "name": name, "relative_l2": {"dq": error, "dk": 2 * error}}
            for name, own in errors.items()
            for source, error in zip(names, own, strict=True)
        ],
    }


@pytest.fixture
def write(tmp_path):
    def write(name, data):
        (tmp_path / name).write_text(json.dumps(data))

    return write


def test_the_newest_time_stands_beside_the_mean_error(tmp_path, write):
    old = [("sagebwd", "both", 64, 2.0), ("sagebwd consistent", "both", 64, 3.0)]
    old += [("sagebwd unsigned P", "both", 64, 5.0), ("sagebwd unsigned P", "both", 128, 5.0)]
    new = [("sagebwd", "both, graph", 64, 4.0), ("sagebwd consistent", "both, graph", 64, 3.0)]
    new += [("sagebwd consistent", "both", 64, 9.0), ("of no study", "both, graph", 64, 1.0)]
    write("bench_attention.json", bench("2026-02", new))
    write("bench_attention_more.json", bench("2026-01", old))
    write("bench_attention_cpu.json", bench("2026-03", old, device="cpu"))
    write("gradient_error.json", study({"default": (1, 4), "consistent": (0.1, 0.1), "unsigned P": (1, 1)}))
    out = ["--out", str(tmp_path / "error_against_time")]
    error_against_time.main(["--results", str(tmp_path), *out])

    result = json.loads((tmp_path / "error_against_time.json").read_text())
    rows = {row["setting"]: row for row in result["rows"]}
    assert list(rows) == ["sagebwd", "sagebwd unsigned P", "sagebwd consistent"]
    assert rows["sagebwd consistent"]["time"] == {"64": 0.75}
    assert rows["sagebwd consistent"]["commit"] == "commit of 2026-02"
    assert rows["sagebwd unsigned P"]["time"] == {"64": 2.5}  # the default has no time at 128
    assert rows["sagebwd"]["relative_l2"] == pytest.approx({"dq": 2, "dk": 4})  # geometric
    assert (tmp_path / "error_against_time.png").exists()
    table = gradients.against_time(result)
    assert "| sagebwd consistent | commit  | 0.75 | .1000 | .2000 |" in table


def test_names_are_those_of_the_scripts_that_measure():
    timed = {title for title, _, _ in CONFIGS.values()} | {peer.name for peer in PEERS.values()}
    assert timed >= error_against_time.VARIANT_OF.keys()
    assert variants(64, torch.bfloat16).keys() >= set(error_against_time.VARIANT_OF.values())


def test_a_damaged_result_is_named(tmp_path, write):
    write("gradient_error.json", study({"default": (1, 4)}))
    (tmp_path / "bench_attention.json").write_text("{")
    with pytest.raises(SystemExit, match=r"bench_attention\.json is damaged .*(run its command again)"):
        error_against_time.main(["--results", str(tmp_path)])


def test_nothing_timed_writes_nothing(tmp_path, write, capsys):
    write("gradient_error.json", study({"default": (1, 4)}))
    write("bench_attention.json", bench("2026-03", [("sagebwd", "both", 64, 2.0)], device="cpu"))
    out = tmp_path / "error_against_time"
    error_against_time.main(["--results", str(tmp_path), "--out", str(out)])
    assert "was both timed on a GPU and studied" in capsys.readouterr().out
    assert not (tmp_path / "error_against_time.json").exists()


def test_a_folder_without_a_study_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        error_against_time.main(["--results", str(tmp_path)])
    assert (
        "has no gradient_error.json; python -m scripts.paper.gradient_error --out" in capsys.readouterr().err
    )
